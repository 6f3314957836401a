"""The reference of the experts against plain float64 arithmetic, typed layouts and its own limits."""

from __future__ import annotations

import pytest
import torch

from kernels_ref.moe import align_experts, aligned_size, fused_moe, limited_swiglu, quantize_activations
from kernels_ref.quantize import per_token_int16
from tests.kernels.experts import random_experts, random_routing, relative_error
from tests.tolerances import W4A8_ERROR, W4A16_ERROR


def exact_moe(x, w13, w2, weights, ids, limit):
    """The layer in float64, pair by pair."""
    w13, w2 = w13.values().double(), w2.values().double()
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(ids.shape[0]):
        for j, e in enumerate(ids[t].tolist()):
            if e >= 0:
                gate, up = (w13[e] @ x[t].double()).chunk(2)
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                out[t] += weights[t, j].double() * (w2[e] @ (gate / (1 + (-gate).exp()) * up))
    return out


# ---- alignment


def test_alignment_of_a_typed_example() -> None:
    ids = torch.tensor([[2, 0], [2, -1], [2, 3]], dtype=torch.int32)
    sorted_ids, expert_ids, total = align_experts(ids, block=2, experts=4)
    # Pairs 0..5. Expert 0 has pair 1; expert 2 has pairs 0, 2, 4; expert 3 has pair 5; pair 3 is skipped.
    assert sorted_ids.tolist() == [1, 6, 0, 2, 4, 6, 5, 6, 6, 6]
    assert expert_ids.tolist() == [0, 2, 2, 3, -1]
    assert total.tolist() == [8]
    assert {t.dtype for t in (sorted_ids, expert_ids, total)} == {torch.int32}


def test_alignment_of_nothing() -> None:
    sorted_ids, expert_ids, total = align_experts(torch.empty((0, 6), dtype=torch.int32), 16, 8)
    assert (sorted_ids.numel(), expert_ids.numel(), total.tolist()) == (0, 0, [0])
    sorted_ids, expert_ids, total = align_experts(torch.full((2, 2), -1, dtype=torch.int32), 16, 8)
    assert total.tolist() == [0]
    assert set(sorted_ids.tolist()) == {4}
    assert set(expert_ids.tolist()) == {-1}


@pytest.mark.parametrize(("pairs", "block", "experts"), [(1, 16, 8), (7, 4, 3), (16, 16, 1), (40, 8, 64)])
def test_no_routing_needs_more_than_the_aligned_size(pairs: int, block: int, experts: int) -> None:
    size = aligned_size(pairs, block, experts)
    # The worst routing: every expert but one has one pair, the last has the rest.
    spread = min(pairs, experts) - 1
    used = spread * block + -(-(pairs - spread) // block) * block
    assert used <= size < used + block
    assert size % block == 0


# ---- quantisation


def test_two_digits_of_typed_numbers() -> None:
    x = torch.tensor([[32639.0, -32639.0, 128.0, 127.0, -128.0, -129.0, 0.5, 1.5]])
    digits, scale = per_token_int16(x)
    assert scale.tolist() == [1.0]
    assert digits[0, 0].tolist() == [127, -127, 1, 0, 0, -1, 0, 0]
    assert digits[0, 1].tolist() == [127, -127, -128, 127, -128, 127, 0, 2]


def test_digits_of_a_row_of_zeros_and_of_no_rows() -> None:
    for digits in (1, 2):
        q, scale = quantize_activations(torch.zeros(1, 4), digits)
        assert q.tolist() == [[[0] * 4] * digits]
        assert scale.tolist() == [1.0]
        assert quantize_activations(torch.zeros(0, 4), digits)[0].shape == (0, digits, 4)


def test_error_of_two_digits_is_as_documented() -> None:
    x = torch.randn(8, 4096)
    digits, scale = per_token_int16(x)
    back = (256 * digits[:, 0].double() + digits[:, 1]) * scale[:, None]
    rms = (back - x).square().mean(1).sqrt() / x.abs().amax(1)
    torch.testing.assert_close(rms, torch.full_like(rms, 1 / 32639 / 12**0.5), rtol=0.05, atol=0)


# ---- the layer


@pytest.mark.parametrize(("arithmetic", "bound"), [("w4a8", W4A8_ERROR), ("w4a16", W4A16_ERROR)])
def test_layer_is_close_to_float64(arithmetic: str, bound: float) -> None:
    w13, w2 = random_experts(5, hidden=256, intermediate=128)
    x = torch.randn(9, 256).bfloat16()
    weights, ids = random_routing(9, 3, 5, skipped=0.2)
    expected = exact_moe(x, w13, w2, weights, ids, 10.0)
    found = fused_moe(x, w13, w2, weights, ids, arithmetic=arithmetic)
    assert found.dtype == torch.bfloat16
    assert relative_error(found, expected) < bound
    # A bound that the coarser arithmetic would meet too says nothing about the finer one.
    if arithmetic == "w4a8":
        assert relative_error(found, expected) > W4A16_ERROR


def test_skipped_pairs_contribute_nothing_and_out_is_used() -> None:
    w13, w2 = random_experts(4, hidden=128, intermediate=128)
    x = torch.randn(3, 128).bfloat16()
    weights, ids = random_routing(3, 2, 4)
    ids[1] = -1
    ids[2, 0] = -1
    out = torch.full((3, 128), float("nan"), dtype=torch.bfloat16)
    found = fused_moe(x, w13, w2, weights, ids, out=out)
    assert found is out
    assert found[1].tolist() == [0.0] * 128
    alone = fused_moe(x[2:], w13, w2, weights[2:, 1:], ids[2:, 1:])
    assert torch.equal(found[2:], alone)


def test_no_tokens() -> None:
    w13, w2 = random_experts(2, hidden=128, intermediate=128)
    weights, ids = random_routing(0, 2, 2)
    assert fused_moe(torch.empty(0, 128).bfloat16(), w13, w2, weights, ids).shape == (0, 128)


def test_limit_cuts_gate_above_and_up_on_both_sides() -> None:
    gate, up = torch.tensor([20.0, -20.0, 1.0]), torch.tensor([-30.0, 30.0, 30.0])
    sigmoid = 1 / (1 + torch.tensor([-10.0, 20.0, -1.0]).exp())
    expected = torch.tensor([10.0 * -10.0, -20.0 * 10.0, 10.0]) * sigmoid
    torch.testing.assert_close(limited_swiglu(gate, up, 10.0), expected)
    torch.testing.assert_close(limited_swiglu(gate, up, None)[2], 30.0 * sigmoid[2])
