"""A checkpoint with a vision tower, loaded by SGLang's own code around ours: what belongs where."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sglang.srt.models import deepseek_v4 as stock
from sglang.srt.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.runtime_context import get_server_args

from dsv4convert.errors import Refused
from dsv4convert.runtime import contract, gate, settings
from dsv4convert.runtime.vision.models import deepseek_v4 as model_module
from tests.sglang import expected, world
from tests.sglang.world import Loaded

_MODELS = ("sglang.srt.models.deepseek_v4", "sglang.srt.models.deepseek_v4_dspark")
#: Initial values that no checkpoint replaces.
_OWN = (".k_scale", ".v_scale")
#: The tiny tower: 2 blocks of 8 tensors, 2 of the patches, a norm, 4 of the aligner, 4 vectors.
_TOWER, _LAYERS, _HASHED, _STAGES = 2 * 8 + 2 + 1 + 4 + 4, 5, 2, 3


def _names(parameter: str) -> list[str]:
    if parameter.startswith("tower."):
        return [parameter.removeprefix("tower.")]
    if parameter == "model.norm.weight" or parameter.startswith("model.hc_head"):
        return [parameter.removeprefix("model.")]
    return expected.source_names(parameter, _LAYERS)


def _is_of_pictures(name: str) -> bool:
    hashed = [f"layers.{i}.ffn.gate.bias" for i in range(_HASHED)]
    return name.startswith(("vision.", "aligner.", "image_")) or name.endswith(".bias_vl") or name in hashed


def test_the_class_that_sees_is_the_one_that_sglang_finds() -> None:
    found, architecture = ModelRegistry.resolve_model_cls(["DeepseekV4ForCausalLM"])
    assert architecture == "DeepseekV4ForCausalLM"
    assert found.__module__ == "dsv4convert.runtime.vision.models.deepseek_v4"
    assert issubclass(found, stock.DeepseekV4ForCausalLM)
    assert settings.sees_pictures()
    applied = gate.require_patches()
    assert sorted(applied) == sorted(p.id for p in contract.wanted())
    assert {p.id for p in contract.PICTURE_PATCHES} <= set(applied)


@pytest.mark.parametrize(
    ("layout", "rank", "size"), [("int8", 0, 1), ("int8", 0, 2), ("int8", 1, 2), ("mxfp4", 1, 2)]
)
def test_every_tensor_is_where_it_belongs_under_its_own_name(
    loaded: Callable[..., Loaded], shelf: Path, layout: str, rank: int, size: int
) -> None:
    model = loaded(f"vision-{layout}", rank=rank, size=size).model
    official = expected.Official(shelf / "vision")
    placed = set()
    for parameter, found in model.named_parameters():
        if ".mlp.experts." in parameter or parameter.endswith(_OWN):
            continue
        wanted = expected.dense(official, _names(parameter), parameter, rank, size)
        assert torch.equal(found, wanted.to(found.dtype)), parameter
        placed |= set(_names(parameter))
    of_pictures = {name for name in official.names() if _is_of_pictures(name)}
    # What is left out is what the official code never reads: text is routed by id there, and drafts are text.
    unused = {f"layers.{i}.ffn.gate.bias" for i in range(_HASHED)}
    unused |= {f"mtp.{i}.ffn.gate.bias_vl" for i in range(_STAGES)}
    assert of_pictures - placed == unused
    assert len(of_pictures) == _TOWER + _LAYERS + _STAGES + _HASHED
    biases = [p for n, p in model.named_parameters() if n.endswith("e_score_correction_bias_vl")]
    assert [b.dtype for b in biases] == [torch.float32] * _LAYERS
    assert {p.dtype for p in model.tower.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("draft", [False, True])
def test_models_log_one_guard_line_and_no_warning(
    shelf: Path, draft: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "dsv4convert.runtime"):
        model = world.load(shelf / "vision-int8", draft=draft, rank=1, size=2).model
    assert isinstance(model, DeepseekV4ForCausalLMDSpark) is draft
    lines = [r.getMessage() for r in caplog.records if r.name == "dsv4convert.runtime"]
    (guard,) = [line for line in lines if line.startswith("dsv4convert guard: ")]
    facts = dict(word.split("=") for word in guard.split()[2:])
    assert facts.get("pictures") == (None if draft else str(_TOWER + _LAYERS))
    warned = [r for r in caplog.records if r.levelname == "WARNING" and r.name in _MODELS]
    assert [r.getMessage() for r in warned] == []


@pytest.mark.parametrize(
    ("missing", "parameter"),
    [
        ("vision.blocks.1.attn.wqkv.bias", "tower.vision.blocks.1.attn.wqkv.bias"),
        ("image_newline", "tower.image_newline"),
        ("layers.0.ffn.gate.bias_vl", "model.layers.0.mlp.gate.e_score_correction_bias_vl"),
        ("layers.4.ffn.gate.bias", "model.layers.4.mlp.gate.e_score_correction_bias"),
    ],
)
def test_a_missing_tensor_is_named(shelf: Path, missing: str, parameter: str) -> None:
    built = world.build(shelf / "vision-int8")
    weights = list(world.weights_of(built))
    kept = [(name, tensor) for name, tensor in weights if name != missing]
    assert len(kept) == len(weights) - 1
    with pytest.raises(Refused) as caught:
        built.model.load_weights(kept)
    assert [(f.code, f.where) for f in caught.value.findings] == [("shim.unfilled", parameter)]
    # The tower is in its place again.
    assert "tower.image_start" in dict(built.model.named_parameters())


def test_a_bias_that_nothing_reads_may_be_missing(shelf: Path) -> None:
    built = world.build(shelf / "vision-int8")
    unused = {"layers.0.ffn.gate.bias", "mtp.1.ffn.gate.bias_vl"}
    built.model.load_weights([pair for pair in world.weights_of(built) if pair[0] not in unused])


def test_a_class_that_does_not_see_is_refused(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 18: SGLang ignores that a package cannot be imported, and goes on with its own class."""
    monkeypatch.setitem(ModelRegistry.models, "DeepseekV4ForCausalLM", stock.DeepseekV4ForCausalLM)
    with pytest.raises(Refused) as caught:
        world.build(shelf / "vision-int8")
    assert str(caught.value).splitlines()[0] == (
        "error: `DeepseekV4ForCausalLM`: the checkpoint has a vision tower, and this class does not see: "
        "expected a class of dsv4convert.runtime.vision.models, found sglang.srt.models.deepseek_v4"
        "   [shim.vision]"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_dp_attention", True),
        ("enable_two_batch_overlap", True),
        ("enable_prefill_cp", True),
        ("attn_cp_size", 2),
        ("pp_size", 2),
        ("moe_a2a_backend", "deepep"),
        ("allow_auto_truncate", True),
        ("enable_mixed_chunk", True),
        ("enable_dynamic_chunking", True),
        ("speculative_algorithm", "EAGLE"),
        ("speculative_algorithm", "NEXTN"),
        ("chunked_prefill_size", 1023),
    ],
)
def test_arguments_that_pictures_rule_out_are_refused(
    shelf: Path, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without `serve`; trap 14 among them."""
    args = copy.copy(get_server_args())
    monkeypatch.setattr(model_module, "get_server_args", lambda: args)
    monkeypatch.setattr(args, name, value)
    with pytest.raises(Refused) as caught:
        world.build(shelf / "vision-int8")
    assert [(f.code, f.where, f.found) for f in caught.value.findings] == [("shim.option", name, str(value))]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("speculative_algorithm", "DSPARK"),
        ("chunked_prefill_size", 1024),
        ("chunked_prefill_size", -1),
        ("chunked_prefill_size", None),
        ("disable_radix_cache", True),
    ],
)
def test_their_neighbours_are_not(name: str, value: object) -> None:
    args = copy.copy(get_server_args())
    setattr(args, name, value)
    model_module._require_supported(args)


def test_norms_of_the_model_take_their_epsilon_from_the_config(loaded: Callable[..., Loaded]) -> None:
    """Trap 13: 1e-20 for the model, 1e-6 within the tower; rows of zeros stay zeros."""
    model = loaded("vision-int8").model
    norms = {n: m for n, m in model.named_modules() if hasattr(m, "variance_epsilon")}
    assert norms and {m.variance_epsilon for m in norms.values()} == {1e-20}
    zeros = torch.zeros(3, 256, dtype=torch.bfloat16)
    assert torch.equal(model.model.norm.forward_native(zeros), zeros)
    narrow = zeros[:, :64]
    assert torch.equal(model.tower.vision.norm(narrow), narrow)
