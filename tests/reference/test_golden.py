"""Single operations on real weights of 0731, against outputs that somebody else computed.

The outputs are BF16 and come from the official arithmetic. Where all terms of a sum are exact in float32, or
where its order can hardly show after rounding, equality is bit for bit.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dsv4convert import releases
from dsv4convert.formats.block import dequantize_mxfp4
from kernels_ref import mhc, router
from kernels_ref.arithmetic import BF16, OFFICIAL, Numerics, linear
from kernels_ref.block import Block
from kernels_ref.config import ModelConfig
from kernels_ref.rotary import apply_rotary
from tests.reference.tiny import Weights
from tests.tolerances import ROUTE_WEIGHT

DATA = Path(__file__).parents[1] / "data" / "real_0731"
CONFIG = ModelConfig.from_dict(releases.config("deepseek-v4-flash-0731"))
POSITIONS = torch.arange(2)


@pytest.fixture(scope="module")
def stored() -> dict[str, Tensor]:
    """Return the real weights; E8M0 as uint8."""
    raw = load_file(DATA / "weights.safetensors")
    return {n: t.view(torch.uint8) if t.dtype == torch.float8_e8m0fnu else t for n, t in raw.items()}


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    """Return inputs and expected outputs."""
    return load_file(DATA / "golden.safetensors")


def _layer_0(stored: dict[str, Tensor], numerics: Numerics = OFFICIAL) -> Block:
    # Two of the 64 heads are there; attention treats every head alike.
    sink = {"layers.0.attn.attn_sink": stored["layers.0.attn.attn_sink[0:2]"]}
    return Block(CONFIG, Weights(stored | sink), numerics, "layers.0", hashed=True)


def _mixing(stored: dict[str, Tensor], h: Tensor) -> tuple[Tensor, mhc.Mixing]:
    fn, scale, base = (stored[f"layers.0.hc_attn_{part}"] for part in ("fn", "scale", "base"))
    return mhc.collapse(h, fn, scale, base, CONFIG)


def test_streams_collapse_to_the_same_bits(stored: dict[str, Tensor], golden: dict[str, Tensor]) -> None:
    x, _ = _mixing(stored, golden["mhc0.residual"][None])
    assert torch.equal(x[0], golden["mhc0.expected_pre"])


def test_streams_expand_to_the_same_bits(stored: dict[str, Tensor], golden: dict[str, Tensor]) -> None:
    h = golden["mhc0.residual"][None]
    _, mixing = _mixing(stored, h)
    assert torch.equal(mhc.expand(golden["mhc0.branch"][None], h, mixing)[0], golden["mhc0.expected_post"])


def test_latents_are_the_same_bits(stored: dict[str, Tensor], golden: dict[str, Tensor]) -> None:
    """Projection, norm, rotation at two positions, FP8 of the unrotated dims."""
    found = _layer_0(stored).latents(golden["attn0.input"], POSITIONS)
    assert torch.equal(found, golden["attn0.kv_after_qat"])


def test_latents_without_rounding_are_others(stored: dict[str, Tensor], golden: dict[str, Tensor]) -> None:
    """The equality above sees KV quantization; not that of the input, which lies on the FP8 grid."""
    without_kv, without_linear = (
        _layer_0(stored, dataclasses.replace(OFFICIAL, **{switch: "none"})).latents(
            golden["attn0.input"], POSITIONS
        )
        for switch in ("kv", "linear")
    )
    assert (without_kv != golden["attn0.kv_after_qat"]).sum() > 100
    assert torch.equal(without_linear, golden["attn0.kv_after_qat"])


def test_attention_gives_the_same_bits(stored: dict[str, Tensor], golden: dict[str, Tensor]) -> None:
    """Causal softmax with sink over one and two keys, weights in BF16, rotated back."""
    layer = _layer_0(stored)
    rows = torch.tensor([[0, -1], [0, 1]])
    o = layer.attend(golden["attn0.q_after_rope.heads0_1"], golden["attn0.kv_after_qat"], rows)
    found = apply_rotary(o, layer.table(POSITIONS), inverse=True)
    assert torch.equal(found, golden["attn0.out_after_inverse_rope.heads0_1"])


def test_router_chooses_the_same_experts_by_score(
    stored: dict[str, Tensor], golden: dict[str, Tensor]
) -> None:
    scores = router.router_scores(golden["router.input"][None], stored["layers.3.ffn.gate.weight"])
    chosen = router.choose_by_score(scores, stored["layers.3.ffn.gate.bias"], CONFIG.top_k)
    assert chosen[0].tolist() == golden["router.layer3.ids"].tolist()
    without_bias = router.choose_by_score(scores, torch.zeros(CONFIG.experts), CONFIG.top_k)
    assert set(without_bias[0].tolist()) != set(chosen[0].tolist()), "the bias decides nothing here"
    weights = router.route_weights(scores, chosen, CONFIG.route_scale)[0]
    torch.testing.assert_close(weights, golden["router.layer3.weights"], rtol=ROUTE_WEIGHT, atol=0)


def test_router_chooses_the_same_experts_by_token(
    stored: dict[str, Tensor], golden: dict[str, Tensor]
) -> None:
    table = torch.zeros(5000, CONFIG.top_k, dtype=torch.int64)
    table[4242] = stored["layers.0.ffn.gate.tid2eid[4242]"]
    chosen = router.choose_by_token(table, torch.tensor([4242]))
    assert chosen[0].tolist() == golden["router.layer0_hash_token4242.ids"].tolist()
    scores = router.router_scores(golden["router.input"][None], stored["layers.0.ffn.gate.weight"])
    weights = router.route_weights(scores, chosen, CONFIG.route_scale)[0]
    expected = golden["router.layer0_hash_token4242.weights"]
    torch.testing.assert_close(weights, expected, rtol=ROUTE_WEIGHT, atol=0)


def test_last_projection_of_an_expert_gives_the_same_bits(
    stored: dict[str, Tensor], golden: dict[str, Tensor]
) -> None:
    base = "layers.3.ffn.experts.2.w2"
    w2 = dequantize_mxfp4(stored[f"{base}.weight[0:8]"], stored[f"{base}.scale[0:8]"])
    hidden = golden["expert3_2.hidden_after_route_weight"][None]
    expected = golden["expert3_2.expected_out_rows0_8"]
    assert torch.equal(linear(hidden, w2, OFFICIAL)[0], expected)
    assert not torch.equal(linear(hidden, w2, BF16)[0], expected), "the activations were not quantized"
