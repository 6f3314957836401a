"""Routed experts through SGLang's layer: what they compute, what they leave alone, who scales them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.quantization import mxfp4_marlin_moe
from sglang.srt.layers.quantization.mxfp4_flashinfer_trtllm_moe import maybe_fuse_routed_scale_and_shared_add

from dsv4convert.errors import Refused
from dsv4convert.names import Layout
from dsv4convert.runtime.patches import moe
from tests.samples import int8_values
from tests.sglang.world import Loaded
from tests.tolerances import W4A16_ERROR

_LIMIT, _SCALE = 10.0, 1.5


def _values(layer: Any, matrix: str, expert: int) -> torch.Tensor:
    """[N, K] float64, decoded by the tests' own reading of the format."""
    codes, shifts, scales = (
        getattr(layer, f"{matrix}_{leaf}").data[expert]
        for leaf in ("weight_codes", "weight_shift2", "channel_scale")
    )
    raw = (t.contiguous().view(torch.uint8).numpy().tobytes() for t in (codes, shifts, scales))
    return torch.from_numpy(int8_values(*raw, len(codes), codes.shape[1] * 2))


def _dense(layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(ids.tolist()):
        for place, expert in enumerate(row):
            if expert >= 0:
                gate, up = (_values(layer, "w13", expert) @ x[token].double()).chunk(2)
                gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
                inner = gate / (1 + (-gate).exp()) * up
                out[token] += weights[token, place].double() * (_values(layer, "w2", expert) @ inner)
    return out


def _batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # Large enough that the limit of SwiGLU matters.
    x = (40 * torch.randn(5, 256)).to(torch.bfloat16)
    ids = torch.tensor([[0, 3], [2, -1], [1, 0], [-1, -1], [3, 2]], dtype=torch.int32)
    return x, torch.rand(5, 2) + 0.1, ids


def _apply(layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    top = StandardTopKOutput(weights, ids, torch.empty(0))
    found = layer.quant_method.apply(layer, StandardDispatchOutput(x, None, top))
    assert type(found).__name__ == "StandardCombineInput"
    return found.hidden_states


@pytest.mark.parametrize(("name", "rank"), [("0731-int8", 0), ("0731-int8", 1), ("0731-mxfp4", 1)])
def test_experts_compute_limited_swiglu_and_leave_their_input_alone(
    loaded: Callable[..., Loaded], name: str, rank: int
) -> None:
    layer = loaded(name, False, rank, 2).model.model.layers[1].mlp.experts
    x, weights, ids = _batch()
    kept = x.clone()
    found = _apply(layer, x, weights, ids)
    wanted = _dense(layer, x, weights, ids)
    assert found.dtype is torch.bfloat16
    # Not multiplied by routed_scaling_factor: that is SGLang's part.
    assert float((found.double() - wanted).norm() / wanted.norm()) < W4A16_ERROR
    assert not found[3].any()
    assert torch.equal(x, kept)
    # The limit was at work, or this compared less than it says.
    pushed = [_values(layer, "w13", e) @ x[0].double() for e in (0, 3)]
    assert any((p > _LIMIT).any() for p in pushed)


def test_sglang_scales_our_result_once_and_would_scale_a_scaled_one_twice(
    loaded: Callable[..., Loaded],
) -> None:
    layer = loaded("0731-int8").model.model.layers[1].mlp.experts
    x, weights, ids = _batch()
    shared = torch.randn(5, 256, dtype=torch.float64)
    routed = _apply(layer, x, weights, ids).double()
    once = maybe_fuse_routed_scale_and_shared_add(layer, routed.clone(), shared.clone(), _SCALE)
    torch.testing.assert_close(once, shared + 1.5 * routed)
    # A kernel that applies the factor itself, as an earlier public one does, is multiplied again.
    twice = maybe_fuse_routed_scale_and_shared_add(layer, _SCALE * routed, shared.clone(), _SCALE)
    torch.testing.assert_close(twice, shared + 2.25 * routed)


def test_the_method_is_a_marlin_one_for_sglang(loaded: Callable[..., Loaded]) -> None:
    layer = loaded("0731-int8").model.model.layers[1].mlp.experts
    stock = type(layer.quant_method).__mro__[1]
    assert isinstance(layer.quant_method, mxfp4_marlin_moe.Mxfp4MarlinMoEMethod)
    assert type(layer.quant_method) is mxfp4_marlin_moe.Mxfp4MarlinMoEMethod
    assert (stock.__name__, stock.__module__) == ("Mxfp4MarlinMoEMethod", mxfp4_marlin_moe.__name__)


def test_marlin_loses_its_refusal_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """DSV4_SM80_MOE=marlin: the stock class, which then gets past the check of the architecture."""
    monkeypatch.setenv("DSV4_SM80_MOE", "marlin")
    stock = mxfp4_marlin_moe.Mxfp4MarlinMoEMethod.__mro__[1]
    method = stock(SimpleNamespace(process_weights_after_loading=lambda layer: None), "layers.0")
    method.runner = SimpleNamespace(config=SimpleNamespace(gemm1_alpha=None))
    with pytest.raises(RuntimeError, match="MXFP4 Marlin requires SM90 or SM120"):
        method.process_weights_after_loading(SimpleNamespace())
    # Restored after the test.
    monkeypatch.setattr(mxfp4_marlin_moe, "is_sm90_supported", mxfp4_marlin_moe.is_sm90_supported)
    assert moe.method(stock, mxfp4_marlin_moe) is stock
    # The next thing it asks for is the shape of the layer.
    with pytest.raises(AttributeError, match="hidden_size"):
        method.process_weights_after_loading(SimpleNamespace())


def test_humming_keeps_its_own_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_SM80_MOE", "humming")
    assert moe.method(str, SimpleNamespace()) is str


@pytest.mark.parametrize(
    ("layout", "hidden", "inter", "sentence"),
    [
        (Layout.INT8, 256, 192, "`intermediate size per GPU`.*expected a multiple of 128, found 192"),
        (Layout.INT8, 320, 128, "`hidden size`.*expected a multiple of 128, found 320"),
        (Layout.MXFP4, 384, 128, "`hidden size`.*expected a multiple of 256, found 384"),
    ],
)
def test_a_cut_inside_a_group_is_refused(layout: Layout, hidden: int, inter: int, sentence: str) -> None:
    method = mxfp4_marlin_moe.Mxfp4MarlinMoEMethod(None, "layers.0")
    with moe.expert_layout(layout), pytest.raises(Refused, match=sentence):
        method.create_weights(torch.nn.Module(), 4, hidden, inter, torch.bfloat16)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("apply_router_weight_on_input", True),
        ("activation", "gelu"),
        ("num_local_experts", 2),
        ("no_combine", True),
    ],
)
def test_an_option_the_kernels_lack_is_refused(
    loaded: Callable[..., Loaded], option: str, value: Any
) -> None:
    layer = loaded("0731-int8").model.model.layers[1].mlp.experts
    config = SimpleNamespace(**vars(layer.moe_runner_config))
    layer.quant_method.create_moe_runner(layer, config)
    setattr(config, option, value)
    with pytest.raises(Refused, match=rf"`{option}`: .*expected .*, found {value}"):
        layer.quant_method.create_moe_runner(layer, config)
