"""What SGLang accepts in silence, and what the guards say to it. Healthy models are those of `test_load`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.layers.moe.utils import MoeRunnerBackend
from sglang.srt.layers.quantization import fp8, mxfp4_marlin_moe
from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM
from sglang.srt.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark

from dsv4convert.errors import Refused
from tests.sglang import world
from tests.sglang.checkpoints import edit_config


@pytest.fixture
def copy(shelf: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Return ``copy(name)``: a new directory, as SGLang remembers configs by path."""

    def make(name: str) -> Path:
        return Path(shutil.copytree(shelf / name, tmp_path / f"{len(list(tmp_path.iterdir()))}-{name}"))

    return make


def _skip(root: Path, change: Callable[[list[str]], list[str]]) -> None:
    def edit(config: dict[str, Any]) -> None:
        for key in ("ignored_layers", "modules_to_not_convert"):
            config["quantization_config"][key] = change(config["quantization_config"][key])

    edit_config(root, edit)


def _sentence(caught: pytest.ExceptionInfo[Refused]) -> str:
    return str(caught.value)


# ---- a dense layer that is not on the skip list


def test_main_proj_off_the_skip_list_is_refused(shelf: Path, copy: Callable[[str], Path]) -> None:
    world.build(shelf / "0731-int8", draft=True)
    root = copy("0731-int8")
    _skip(root, lambda names: [n for n in names if n != "main_proj"])
    with pytest.raises(Refused) as caught:
        world.build(root, draft=True)
    assert _sentence(caught).splitlines() == [
        "error: `stages.0.main_proj.weight`: the parameter is FP8, one of 1: BF16 weights would be cast "
        "without their scale: expected bfloat16, found float8_e4m3fn   [shim.fp8]",
        "hint: serve a checkpoint made by `dsv4convert convert`, with the skip list of `config.json` that it "
        "wrote",
    ]


def test_without_the_guard_main_proj_becomes_fp8_without_a_scale(
    copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: stock SGLang loads the same checkpoint and says nothing."""
    for name in ("__init__", "load_weights"):
        patched = getattr(DeepseekV4ForCausalLMDSpark, name)
        monkeypatch.setattr(DeepseekV4ForCausalLMDSpark, name, patched.__wrapped__)
    root = copy("0731-mxfp4")
    _skip(root, lambda names: [n for n in names if n != "main_proj"])
    built = world.build(root, draft=True)
    original = torch.randn(256, 768).to(torch.bfloat16)
    built.model.load_weights([("mtp.0.main_proj.weight", original)])
    projection = built.model.stages[0].main_proj
    assert projection.weight.dtype is torch.float8_e4m3fn
    assert torch.equal(projection.weight.data.float(), original.to(torch.float8_e4m3fn).float())
    assert bool((projection.weight_scale_inv == torch.finfo(torch.float32).min).all())


def test_wq_a_by_its_checkpoint_name_does_not_skip_the_fused_module(copy: Callable[[str], Path]) -> None:
    root, healthy = copy("0731-int8"), copy("0731-int8")
    by_name = [f"self_attn.{n}" for n in ("wq_a", "wkv", "wq_b", "wo_a", "wo_b", "indexer")]
    _skip(root, lambda names: [*by_name, *names[1:]])
    with pytest.raises(Refused) as caught:
        world.build(root)
    assert [f.where for f in caught.value.findings] == [
        f"model.layers.{i}.self_attn.wqkv_a.weight" for i in range(5)
    ]
    # The name of the module does, which is what the draft's unfused layers need beside it.
    _skip(healthy, lambda names: [*by_name, "self_attn.wqkv_a", *names[1:]])
    world.build(healthy)


def test_exact_names_of_draft_stages_do_not_match(copy: Callable[[str], Path]) -> None:
    root = copy("0731-int8")
    _skip(root, lambda names: [n if n != "main_proj" else "mtp.0.main_proj" for n in names])
    with pytest.raises(Refused, match=r"`stages\.0\.main_proj\.weight`: the parameter is FP8"):
        world.build(root, draft=True)


def test_an_official_checkpoint_is_refused(shelf: Path) -> None:
    with pytest.raises(Refused, match=r"`model\.layers\.0\.self_attn\.wqkv_a\.weight`: the parameter is FP8"):
        world.build(shelf / "0731")


# ---- tensors that are missing


def _load_without(root: Path, draft: bool, missing: str) -> None:
    built = world.build(root, draft=draft)
    weights = list(world.weights_of(built))
    kept = [(name, tensor) for name, tensor in weights if name != missing]
    assert len(kept) == len(weights) - 1
    built.model.load_weights(kept)


@pytest.mark.parametrize(
    ("name", "draft", "missing", "parameter"),
    [
        ("0731-int8", False, "layers.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
        # Half of a fused module.
        (
            "0731-int8",
            False,
            "layers.1.ffn.shared_experts.w3.weight",
            "model.layers.1.mlp.shared_experts.gate_up_proj.weight",
        ),
        ("0731-int8", False, "layers.0.ffn.gate.tid2eid", "model.layers.0.mlp.topk.tid2eid"),
        ("0731-int8", False, "hc_head_base", "model.hc_head_base"),
        ("0731-int8", True, "mtp.2.markov_head.markov_w2.weight", "markov_head.markov_w2.weight"),
        ("0731-int8", True, "mtp.0.main_proj.weight", "stages.0.main_proj.weight"),
        ("preview-int8", True, "mtp.0.h_proj.weight", "model.h_proj.weight"),
    ],
)
def test_a_missing_tensor_is_named_by_its_parameter(
    shelf: Path, name: str, draft: bool, missing: str, parameter: str
) -> None:
    with pytest.raises(Refused) as caught:
        _load_without(shelf / name, draft, missing)
    assert _sentence(caught).splitlines() == [
        f"error: `{parameter}`: no tensor of the checkpoint filled it, or not all of it   [shim.unfilled]",
        "hint: check the checkpoint: `dsv4convert converted DST`",
    ]


@pytest.mark.parametrize(
    ("name", "draft", "missing", "parameter", "expected"),
    [
        (
            "0731-int8",
            False,
            "layers.4.ffn.experts.2.w1.weight_codes",
            "model.layers.4.mlp.experts.w13_weight_codes",
            8,
        ),
        (
            "0731-int8",
            False,
            "layers.0.ffn.experts.3.w2.weight_shift2",
            "model.layers.0.mlp.experts.w2_weight_shift2",
            4,
        ),
        (
            "0731-int8",
            True,
            "mtp.1.ffn.experts.0.w3.channel_scale",
            "stages.1.mlp.experts.w13_channel_scale",
            8,
        ),
        (
            "0731-mxfp4",
            False,
            "layers.2.ffn.experts.1.w2.scale",
            "model.layers.2.mlp.experts.w2_weight_scale_inv",
            4,
        ),
        ("preview-mxfp4", True, "mtp.0.ffn.experts.1.w1.weight", "model.decoder.mlp.experts.w13_weight", 8),
    ],
)
def test_a_missing_expert_tensor_is_counted(
    shelf: Path, name: str, draft: bool, missing: str, parameter: str, expected: int
) -> None:
    with pytest.raises(Refused) as caught:
        _load_without(shelf / name, draft, missing)
    assert _sentence(caught).splitlines()[0] == (
        f"error: `{parameter}`: tensors of routed experts are missing: expected {expected} tensors, "
        f"found {expected - 1}   [shim.unfilled]"
    )


def test_without_the_guard_a_missing_tensor_is_a_warning(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The twin: stock SGLang goes on with whatever memory held."""
    monkeypatch.setattr(DeepseekV4ForCausalLM, "load_weights", DeepseekV4ForCausalLM.load_weights.__wrapped__)
    _load_without(shelf / "0731-int8", False, "layers.0.ffn_norm.weight")
    warned = [r.getMessage() for r in caplog.records if "not initialized from checkpoints" in r.getMessage()]
    assert len(warned) == 1 and "post_attention_layernorm" in warned[0]


def test_a_second_load_may_be_partial(shelf: Path) -> None:
    loaded = world.load(shelf / "0731-int8")
    loaded.model.load_weights([("norm.weight", torch.full((256,), 3.0))])
    assert bool((loaded.model.model.norm.weight == 3).all())


# ---- layout and backend


def _section(key: str, value: str) -> Callable[[dict[str, Any]], object]:
    return lambda config: config["dsv4convert"].__setitem__(key, value)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        (
            "packing",
            "g64-split32",
            "`packing` of the routed experts is not one this version reads: expected g128-split64, "
            "found g64-split32",
        ),
        ("rounding", "nearest-even", "`rounding` of the routed experts is not one this version reads"),
        ("experts", "nf4", "`experts` is no layout that can be served: expected int8 or mxfp4, found nf4"),
    ],
)
def test_an_unknown_layout_is_refused(
    copy: Callable[[str], Path], key: str, value: str, sentence: str
) -> None:
    root = copy("0731-int8")
    edit_config(root, _section(key, value))
    with pytest.raises(Refused) as caught:
        world.build(root)
    assert f"error: `config.json, dsv4convert`: {sentence}" in _sentence(caught)


@pytest.mark.parametrize("backend", ["marlin", "humming"])
def test_int8_is_for_our_kernels_only(shelf: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setenv("DSV4_SM80_MOE", backend)
    with pytest.raises(Refused) as caught:
        world.build(shelf / "0731-int8")
    assert _sentence(caught).splitlines()[0] == (
        "error: `DSV4_SM80_MOE`: this backend of the routed experts reads layout `mxfp4` only: "
        f"expected ours, found {backend}   [shim.layout]"
    )


@pytest.mark.parametrize("backend", ["marlin", "humming"])
def test_mxfp4_is_for_the_other_backends_too(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """SGLang's own classes, in processes that were started with the switch; the card is asked later."""
    stock = mxfp4_marlin_moe.Mxfp4MarlinMoEMethod.__mro__[1]
    monkeypatch.setattr(mxfp4_marlin_moe, "Mxfp4MarlinMoEMethod", stock)
    monkeypatch.setattr(fp8, "get_moe_runner_backend", lambda: MoeRunnerBackend(backend))
    monkeypatch.setenv("DSV4_SM80_MOE", backend)
    layer = world.build(shelf / "0731-mxfp4").model.model.layers[0].mlp.experts
    assert type(layer.quant_method).__name__ == f"Mxfp4{backend.title()}MoEMethod"
    monkeypatch.setenv("DSV4_SM80_MOE", "ours")
    with pytest.raises(Refused, match="the routed experts of this layer run elsewhere"):
        world.build(shelf / "0731-mxfp4")


def test_experts_that_run_elsewhere_are_refused(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--moe-runner-backend triton` would send them to the FP8 class."""

    class Other:
        def __getattr__(self, name: str) -> Callable[[], bool]:
            return lambda: False

    monkeypatch.setattr(fp8, "get_moe_runner_backend", Other)
    with pytest.raises(Refused) as caught:
        world.build(shelf / "0731-mxfp4")
    wanted = "the routed experts of this layer run elsewhere: expected Int8ShiftMoEMethod, found Fp8MoEMethod"
    assert f"error: `model.layers.0.mlp.experts`: {wanted}   [shim.experts]" in _sentence(caught).splitlines()


def test_config_without_a_section_is_read_as_mxfp4(copy: Callable[[str], Path]) -> None:
    root = copy("0731-mxfp4")
    edit_config(root, lambda config: config.pop("dsv4convert"))
    names = {n.rsplit(".", 1)[1] for n, _ in world.build(root).model.named_parameters() if ".experts." in n}
    assert names == {"w13_weight", "w13_weight_scale_inv", "w2_weight", "w2_weight_scale_inv"}
