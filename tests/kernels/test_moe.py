"""The MoE kernels, interpreted, against the reference: integers and bytes are equal, the rest is close."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels_ref import moe as reference
from kernels_ref import quantize as reference_quantize
from kernels_ref.tensors import Int8Shift
from tests.kernels.experts import random_experts, random_matrices, random_routing, relative_error
from tests.kernels.interpreted import call
from tests.tolerances import MOE_AGAINST_REFERENCE

# The interpreter pays per operation, not per element: one tile of many rows beats many small ones.
TILES = {
    "few, pairs": ("few", 256, 0, 8),
    "few, aligned": ("few", 128, 8, 4),
    "few, wide": ("few", 256, 16, 2),
    "many": ("many", 256, 16, 1),
}


# ---- what runs in the process of interpreted kernels


def quantized(x: Tensor, digits: int) -> tuple[Tensor, Tensor]:
    """Quantise with the kernel."""
    from kernels_ref.sm80 import quantize

    return quantize.per_token_int8(x) if digits == 1 else quantize.per_token_int16(x)


def aligned(ids: Tensor, block: int, experts: int, chunk: int, small: int) -> tuple[Tensor, ...]:
    """Align with the kernels, in chunks and with a limit that suit few pairs."""
    from kernels_ref.sm80 import align

    align.CHUNK, align.SMALL = chunk, small
    return align.align_experts(ids, block, experts)


def product(q: Tensor, scale: Tensor, weight: Int8Shift, ids: Tensor, tile: tuple, topk: int) -> Tensor:
    """Multiply with a kernel into a poisoned float32 output."""
    from kernels_ref.sm80 import moe
    from kernels_ref.sm80.tiles import Tile

    kernel, rows, columns, halves = tile
    experts, n = weight.channel_scale.shape
    sorted_ids, expert_ids = None, ids
    if columns:
        sorted_ids, expert_ids, _ = moe.align_experts(ids, columns // q.shape[1], experts)
    out = torch.full((ids.numel(), n), float("nan"))
    tile = Tile(kernel, rows, 1, 1, halves)
    moe.grouped_gemm(q, scale, weight, sorted_ids, expert_ids, out, tile, topk, columns=columns)
    return out


def layer(
    x: Tensor, w13: Int8Shift, w2: Int8Shift, weights: Tensor, ids: Tensor, options: dict, tile: tuple
) -> Tensor:
    """Run the layer in float32: the interpreter truncates where a GPU rounds to bfloat16."""
    from kernels_ref.sm80 import moe
    from kernels_ref.sm80.tiles import Plan, Tile

    kernel, rows, columns, halves = tile
    one = Tile(kernel, rows, 1, 1, halves)
    plan = Plan(0, options["arithmetic"], columns, one, one)
    out = torch.full_like(x.float(), float("nan"))
    return moe.fused_moe(x.float(), w13, w2, weights, ids, **options, plan=plan, out=out)


# ---- tests


@pytest.mark.parametrize("digits", [1, 2])
@pytest.mark.parametrize("k", [16, 128, 384])
def test_quantisation_is_that_of_the_reference(digits: int, k: int) -> None:
    x = torch.randn(5, k) * torch.tensor([1.0, 1e-3, 300.0, 0.0, 1.0])[:, None]
    # Halves are where roundings differ: this row has scale 1.
    largest = 127.0 if digits == 1 else 32639.0
    x[4] = torch.randint(-50, 50, (k,)) + 0.5
    x[4, 0] = largest
    expected = (reference_quantize.per_token_int8 if digits == 1 else reference_quantize.per_token_int16)(x)
    found = call(quantized, x, digits)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "block", "skipped", "chunk", "small"),
    [
        (3, 2, 4, 2, 0.3, 128, 512),
        (40, 6, 8, 16, 0.2, 128, 512),  # two blocks that count for themselves
        (40, 6, 8, 16, 0.2, 16, 128),  # four blocks after a count
        (90, 6, 300, 4, 0.0, 128, 1024),  # more experts than 256
        (4, 2, 3, 128, 1.0, 128, 512),  # nobody is wanted
        (1, 1, 1, 1, 0.0, 128, 512),
        (0, 6, 8, 16, 0.0, 128, 512),
    ],
)
def test_alignment_is_that_of_the_reference(
    tokens: int, k: int, experts: int, block: int, skipped: float, chunk: int, small: int
) -> None:
    ids = random_routing(tokens, k, experts, skipped=skipped)[1]
    found = call(aligned, ids, block, experts, chunk, small)
    for one, other in zip(found, reference.align_experts(ids, block, experts), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("digits", [1, 2])
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_products_are_exact_in_integers(tile: tuple, digits: int) -> None:
    """With every scale 1 the result is the integer itself (below 2^24, where float32 holds integers)."""
    weight = random_matrices(3, 256, 512)
    weight = weight._replace(channel_scale=torch.ones_like(weight.channel_scale))
    ids = random_routing(3, 2, 3)[1]
    ids[2, 1] = -1
    q = torch.randint(-127, 128, (3, digits, 512), dtype=torch.int8)
    if digits == 2:
        q[:, 0] //= 64  # keep 256 * high + low times weights below 2^24
    rows = torch.arange(6) // 2
    expected = reference.grouped_gemm(q, torch.ones(3), weight, ids, rows)
    assert expected.abs().max() < 2**24
    found = call(product, q, torch.ones(3), weight, ids, tile, 2)
    assert torch.equal(found[:5], expected[:5])
    assert found[5].isnan().all()


def test_minus_zero_never_comes_from_a_repack_and_what_happens_if_it_does() -> None:
    """`magnitudes` reads code 8 as 0. The assembly of `signed` reads -1: see `test_moe_gpu`."""
    weight = random_matrices(1, 256, 128)
    weight.codes[:] = 0x88
    ids = torch.zeros((1, 1), dtype=torch.int32)
    q = torch.full((1, 1, 128), 127, dtype=torch.int8)
    assert call(product, q, torch.ones(1), weight, ids, TILES["few, pairs"], 1).tolist() == [[0.0] * 256]


@pytest.mark.parametrize("arithmetic", ["w4a8", "w4a16"])
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_layer_is_that_of_the_reference(tile: tuple, arithmetic: str) -> None:
    w13, w2 = random_experts(3, hidden=256, intermediate=128)
    x = torch.randn(3, 256).bfloat16()
    weights, ids = random_routing(3, 2, 3)
    ids[0, 1] = -1
    options = {"arithmetic": arithmetic, "limit": 2.0}
    expected = reference.fused_moe(x, w13, w2, weights, ids, **options)
    found = call(layer, x, w13, w2, weights, ids, options, tile)
    assert relative_error(found, expected) < MOE_AGAINST_REFERENCE[arithmetic]


@pytest.mark.parametrize("arithmetic", ["w4a8", "w4a16"])
@pytest.mark.parametrize("tile", [TILES["few, wide"], TILES["many"]], ids=["few, wide", "many"])
def test_a_token_of_nan_stays_alone(tile: tuple, arithmetic: str) -> None:
    """As a padded token of a captured graph may be; it shares experts, and so tiles, with the others."""
    w13, w2 = random_experts(2, hidden=256, intermediate=128)
    x = torch.randn(3, 256).bfloat16()
    weights, ids = random_routing(3, 2, 2)
    options = {"arithmetic": arithmetic, "limit": 2.0}
    whole = call(layer, x, w13, w2, weights, ids, options, tile)
    x[1], weights[1] = torch.nan, torch.nan
    found = call(layer, x, w13, w2, weights, ids, options, tile)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], whole[[0, 2]])


def test_no_token_and_a_token_of_skipped_pairs() -> None:
    w13, w2 = random_experts(2, hidden=256, intermediate=128)
    ids = torch.full((2, 2), -1, dtype=torch.int32)
    for tile in (TILES["many"], TILES["few, pairs"]):
        options = {"arithmetic": "w4a8", "limit": None}
        x = torch.randn(2, 256).bfloat16()
        assert call(layer, x, w13, w2, torch.ones(2, 2), ids, options, tile).tolist() == [[0.0] * 256] * 2
        nothing = call(layer, x[:0], w13, w2, torch.ones(0, 2), ids[:0], options, tile)
        assert nothing.shape == (0, 256)
