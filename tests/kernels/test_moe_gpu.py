"""The MoE kernels on a GPU, in native code and as PTX for SM80: every tile of the table, poisoned outputs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from kernels_ref import moe as reference
from kernels_ref import quantize as reference_quantize
from kernels_ref.tensors import Int8Shift
from tests.kernels.experts import random_experts, random_matrices, random_routing, relative_error
from tests.tolerances import MOE_AGAINST_REFERENCE

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("code")]

EXPERTS, TOPK = 8, 3


def _gpu(weight: Int8Shift) -> Int8Shift:
    return Int8Shift(*(part.cuda() for part in weight))


def _plans() -> list:
    from kernels_ref.sm80.tiles import DEFAULT

    found = {plan for table in DEFAULT.values() for plans in table.values() for plan in plans}
    # What differs in the number of tokens only runs the same code.
    return sorted({replace(plan, tokens=0) for plan in found}, key=repr)


@pytest.mark.parametrize("digits", [1, 2])
@pytest.mark.parametrize("k", [256, 4096, 7168])
def test_quantisation_is_that_of_the_reference(digits: int, k: int) -> None:
    from kernels_ref.sm80 import quantize

    name = "per_token_int8" if digits == 1 else "per_token_int16"
    x = (torch.randn(33, k) * torch.logspace(-6, 4, 33)[:, None]).bfloat16()
    x[7] = 0
    # On the CPU: torch on a GPU divides by a number by multiplying with its reciprocal.
    expected = getattr(reference_quantize, name)(x)
    found = getattr(quantize, name)(x.cuda())
    assert torch.equal(found[0].cpu(), expected[0])
    assert torch.equal(found[1].cpu(), expected[1])


@pytest.mark.parametrize("block", [1, 4, 16, 128])
@pytest.mark.parametrize("tokens", [1, 7, 85, 86, 3000])
def test_alignment_is_that_of_the_reference(tokens: int, block: int) -> None:
    from kernels_ref.sm80.align import align_experts

    ids = random_routing(tokens, 6, 256, skipped=0.1)[1]
    for found, expected in zip(
        align_experts(ids.cuda(), block, 256), reference.align_experts(ids, block, 256), strict=True
    ):
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("plan", _plans(), ids=str)
def test_products_are_exact_in_integers(plan) -> None:
    """Scales of 1, and activations that keep the integers below 2^24, where float32 holds them."""
    from kernels_ref.sm80.moe import align_experts, grouped_gemm

    weight = random_matrices(EXPERTS, 512, 1024)
    weight = weight._replace(channel_scale=torch.ones_like(weight.channel_scale))
    ids = random_routing(70, TOPK, EXPERTS, skipped=0.1)[1]
    digits = 1 if plan.arithmetic == "w4a8" else 2
    q = torch.randint(-127, 128, (70, digits, 1024), dtype=torch.int8)
    if digits == 2:
        q[:, 0] //= 64
    rows = torch.arange(ids.numel()) // TOPK
    expected = reference.grouped_gemm(q, torch.ones(70), weight, ids, rows)
    assert expected.abs().max() < 2**24
    wanted = ids.flatten() >= 0
    for tile in (plan.w13, plan.w2):
        out = torch.full((ids.numel(), 512), float("nan"), device="cuda")
        sorted_ids, expert_ids = None, ids.cuda()
        if plan.columns:
            sorted_ids, expert_ids, _ = align_experts(ids.cuda(), plan.columns // digits, EXPERTS)
        grouped_gemm(
            q.cuda(), torch.ones(70, device="cuda"), _gpu(weight), sorted_ids, expert_ids, out, tile, TOPK,
            columns=plan.columns,
        )  # fmt: skip
        assert torch.equal(out.cpu()[wanted], expected[wanted])
        assert out.cpu()[~wanted].isnan().all()


@pytest.mark.parametrize(("hidden", "intermediate"), [(512, 128), (256, 384), (1024, 512)])
@pytest.mark.parametrize("plan", _plans(), ids=str)
def test_layer_is_that_of_the_reference(plan, hidden: int, intermediate: int) -> None:
    from kernels_ref.sm80.moe import fused_moe

    w13, w2 = random_experts(EXPERTS, hidden=hidden, intermediate=intermediate)
    for tokens, skipped, limit in ((1, 0.0, 10.0), (37, 0.2, 2.0), (150, 0.0, None)):
        x = torch.randn(tokens, hidden).bfloat16()
        weights, ids = random_routing(tokens, TOPK, EXPERTS, skipped=skipped)
        run = partial(fused_moe, limit=limit, plan=plan)
        out = torch.full((tokens, hidden), float("nan"), dtype=torch.bfloat16, device="cuda")
        found = run(x.cuda(), _gpu(w13), _gpu(w2), weights.cuda(), ids.cuda(), out=out)
        assert found is out
        expected = reference.fused_moe(x, w13, w2, weights, ids, limit=limit, arithmetic=plan.arithmetic)
        assert relative_error(found.cpu(), expected) < MOE_AGAINST_REFERENCE[plan.arithmetic]
        again = run(x.cuda(), _gpu(w13), _gpu(w2), weights.cuda(), ids.cuda())
        assert torch.equal(again, found)


@pytest.mark.parametrize("tokens", [1, 6, 64, 300, 1100])
def test_graph_holds_for_another_routing(tokens: int) -> None:
    """A captured call reads what lies in its inputs at replay, and rows of skipped tokens become 0."""
    from kernels_ref.sm80.moe import fused_moe

    w13, w2 = map(_gpu, random_experts(EXPERTS, hidden=512, intermediate=256))
    x = torch.randn(tokens, 512).bfloat16().cuda()
    weights, ids = (t.cuda() for t in random_routing(tokens, TOPK, EXPERTS))
    out = torch.empty_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fused_moe(x, w13, w2, weights, ids, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        fused_moe(x, w13, w2, weights, ids, out=out)
    for skipped in (0.0, 0.5, 1.0):
        other = random_routing(tokens, TOPK, EXPERTS, skipped=skipped)
        x.copy_(torch.randn(tokens, 512))
        weights.copy_(other[0])
        ids.copy_(other[1])
        expected = fused_moe(x, w13, w2, weights, ids)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
        assert not out.isnan().any()
        if skipped == 1.0:
            assert not out.any()


def test_minus_zero_counts_as_zero_or_as_minus_one() -> None:
    """Code 8 is never stored; `few` reads it as 0, `many` as -1 in units of the table."""
    from kernels_ref.sm80.moe import align_experts, grouped_gemm
    from kernels_ref.sm80.tiles import Tile

    weight = random_matrices(1, 64, 128)
    weight.codes[:] = 0x88
    weight = _gpu(weight._replace(channel_scale=torch.ones_like(weight.channel_scale)))
    ids = torch.zeros((1, 1), dtype=torch.int32, device="cuda")
    q = torch.ones((1, 1, 128), dtype=torch.int8, device="cuda")
    sorted_ids, expert_ids, _ = align_experts(ids, 16, 1)

    def product(kernel: str) -> Tensor:
        out = torch.full((1, 64), float("nan"), device="cuda")
        one = torch.ones(1, device="cuda")
        tile = Tile(kernel, 64, 2, 2, 2)
        grouped_gemm(q, one, weight, sorted_ids, expert_ids, out, tile, 1, columns=16)
        return out

    assert not product("few").any()
    assert (product("many") == -128).all()
