"""What the converter writes, loaded by SGLang's own code: target, NextN, DSpark; both layouts; two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.sglang import expected
from tests.sglang.world import Loaded

_TARGET = "DeepseekV4ForCausalLM"
_NEXTN = "DeepseekV4ForCausalLMNextN"
_DSPARK = "DeepseekV4ForCausalLMDSpark"
_MODELS = "sglang.srt.models.deepseek_v4"
#: Checkpoint, draft, rank, size, class, layers with routed experts.
CASES = [
    ("0731-int8", False, 0, 1, _TARGET, 5),
    ("0731-int8", False, 0, 2, _TARGET, 5),
    ("0731-int8", False, 1, 2, _TARGET, 5),
    ("0731-mxfp4", False, 0, 2, _TARGET, 5),
    ("0731-mxfp4", False, 1, 2, _TARGET, 5),
    ("0731-int8", True, 0, 2, _DSPARK, 3),
    ("0731-int8", True, 1, 2, _DSPARK, 3),
    ("0731-mxfp4", True, 1, 2, _DSPARK, 3),
    ("preview-int8", True, 0, 2, _NEXTN, 1),
    ("preview-mxfp4", True, 1, 2, _NEXTN, 1),
]
#: Initial values that no checkpoint replaces, and what a NextN draft takes from the target.
_OWN = (".k_scale", ".v_scale")
_SHARED = ("lm_head.weight", "model.embed_tokens.weight")

each_model = pytest.mark.parametrize(("name", "draft", "rank", "size", "cls", "layers"), CASES)


def _parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    shared = _SHARED if type(model).__name__ == _NEXTN else ()
    return {n: p for n, p in model.named_parameters() if not n.endswith(_OWN) and n not in shared}


def _names(parameter: str, cls: str) -> list[str]:
    if cls == _NEXTN and not parameter.startswith("model.decoder."):
        leaf = parameter.removeprefix("model.").removeprefix("shared_head.")
        return [f"mtp.0.{leaf}"]
    if cls == _DSPARK and parameter.startswith("markov_head."):
        return [f"mtp.2.{parameter}"]
    if parameter in ("model.norm.weight",) or parameter.startswith("model.hc_head"):
        return [parameter.removeprefix("model.")]
    return expected.source_names(parameter, 5)


@each_model
def test_every_dense_parameter_is_what_the_official_bytes_say(
    loaded: Callable[..., Loaded],
    shelf: Path,
    name: str,
    draft: bool,
    rank: int,
    size: int,
    cls: str,
    layers: int,
) -> None:
    model = loaded(name, draft, rank, size).model
    assert type(model).__name__ == cls
    official = expected.Official(shelf / name.split("-")[0])
    compared = 0
    for parameter, found in _parameters(model).items():
        if ".mlp.experts." in parameter:
            continue
        wanted = expected.dense(official, _names(parameter, cls), parameter, rank, size)
        assert torch.equal(found, wanted.to(found.dtype)), parameter
        compared += 1
    assert compared == len(_parameters(model)) - 6 * layers


@each_model
def test_every_expert_is_what_the_repack_of_the_official_bytes_says(
    loaded: Callable[..., Loaded],
    shelf: Path,
    name: str,
    draft: bool,
    rank: int,
    size: int,
    cls: str,
    layers: int,
) -> None:
    model = loaded(name, draft, rank, size).model
    source, layout = name.split("-")
    official = expected.Official(shelf / source)
    places = [
        n.removesuffix(".w13_weight_codes") for n in _parameters(model) if n.endswith("w13_weight_codes")
    ]
    assert len(places) == layers
    for place in places:
        prefix = expected.source_names(place, 5)[0]
        for matrix in ("w13", "w2"):
            wanted = expected.experts(official, prefix, matrix, layout, rank, size)
            for leaf, array in zip(("weight_codes", "weight_shift2", "channel_scale"), wanted, strict=True):
                found = model.get_parameter(f"{place}.{matrix}_{leaf}")
                assert torch.equal(found, torch.from_numpy(array)), f"{place}.{matrix}_{leaf}"


@pytest.mark.parametrize("draft", [False, True])
def test_healthy_models_log_one_guard_line(
    shelf: Path, draft: bool, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.sglang import world

    with caplog.at_level("INFO", "dsv4convert.runtime"):
        world.load(shelf / "0731-int8", draft=draft, rank=1, size=2)
    lines = [r.getMessage() for r in caplog.records if r.name == "dsv4convert.runtime"]
    guard = [line for line in lines if line.startswith("dsv4convert guard: ")]
    tail = " layers=3 main_proj=bfloat16" if draft else " layers=5"
    cls, filled = (_DSPARK, 86) if draft else (_TARGET, 150)
    assert guard == [f"dsv4convert guard: model={cls} rank=1/2 filled={filled} fp8=0 experts=ours/int8{tail}"]
    # Neither a tensor without a parameter nor a parameter without a tensor, which SGLang would warn of.
    warned = [r for r in caplog.records if r.levelname == "WARNING" and r.name.startswith(_MODELS)]
    assert [r.getMessage() for r in warned] == []
