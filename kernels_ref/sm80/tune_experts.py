"""Which tiles run the experts fastest on this card; `kernels_ref.sm80.tune` is the command.

Memory: the experts of one layer, ``experts * 1.5 * hidden * intermediate`` bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from kernels_ref.sm80.align import align_experts
from kernels_ref.sm80.measure import CANNOT, code_of_sm80, compile_in_parallel, fastest, time_calls
from kernels_ref.sm80.moe import fused_moe, grouped_gemm, warm_up
from kernels_ref.sm80.quantize import quantize_rows
from kernels_ref.sm80.tiles import Plan, Tile
from kernels_ref.tensors import Int8Shift

#: Numbers of tokens that are measured.
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
#: The coarser arithmetic is taken only where it is faster by more than this.
PRICE_OF_W4A8 = 0.10

_FEW = [
    Tile("few", rows, warps, stages, halves)
    for (rows, warps), (stages, halves) in product(
        ((16, 1), (32, 1), (32, 2), (64, 2)), ((3, 4), (4, 4), (4, 2))
    )
]
_SOME = [
    Tile("many", rows, warps, stages, halves)
    for (rows, warps), (stages, halves) in product(
        ((64, 2), (128, 2), (128, 4)), ((2, 4), (3, 4), (4, 2), (4, 1))
    )
]
_MANY = [
    Tile("many", rows, warps, stages, halves)
    for (rows, warps), (stages, halves) in product(((128, 4), (256, 8)), ((3, 1), (4, 1), (5, 1), (3, 2)))
]


@dataclass(frozen=True)
class Family:
    """Tiles that may be combined: one arithmetic, one number of columns, a range of tokens."""

    arithmetic: str
    columns: int
    first: int
    last: int
    tiles: Sequence[Tile]

    @property
    def digits(self) -> int:
        """INT8 digits of an activation."""
        return 1 if self.arithmetic == "w4a8" else 2


FAMILIES = (
    Family("w4a16", 0, 1, 8, _FEW),
    Family("w4a16", 8, 4, 256, _FEW),
    Family("w4a16", 32, 128, 2048, _SOME),
    Family("w4a16", 128, 2048, sys.maxsize, _MANY),
    Family("w4a8", 0, 1, 8, _FEW),
    Family("w4a8", 8, 4, 256, _FEW),
    Family("w4a8", 16, 64, 1024, _SOME),
    Family("w4a8", 64, 512, 4096, _MANY),
    Family("w4a8", 128, 1024, sys.maxsize, _MANY),
)


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer on one rank."""

    hidden: int
    intermediate: int
    experts: int
    topk: int

    def matrices(self) -> tuple[Int8Shift, Int8Shift]:
        """Return random w13 and w2 on the GPU; no code is minus zero."""
        return (
            self._random(2 * self.intermediate, self.hidden),
            self._random(self.hidden, self.intermediate),
        )

    def _random(self, n: int, k: int) -> Int8Shift:
        def bytes_of(*shape: int) -> Tensor:
            return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")

        codes = bytes_of(self.experts, n, k // 2)
        for part in codes.split(16):
            part[(part & 0x0F) == 0x08] &= 0xF7
            part[(part & 0xF0) == 0x80] &= 0x7F
        scale = torch.full((self.experts, n), 2.0**-9, device="cuda")
        return Int8Shift(codes, bytes_of(self.experts, n, k // 128), scale)

    def routings(self, tokens: int) -> list[Tensor]:
        """Return different routings, enough of them that their weights do not stay in the L2 cache."""
        count = max(1, min(32, 256 // tokens))
        ids = [torch.rand(tokens, self.experts, device="cuda").argsort(1) for _ in range(count)]
        return [one[:, : self.topk].to(torch.int32).contiguous() for one in ids]


def tune(layer: Layer, tokens: Sequence[int]) -> Iterator[dict[str, tuple[float, Plan]]]:
    """Yield, for each number of tokens, the best plan of each arithmetic and its time in microseconds."""
    w13, w2 = layer.matrices()
    for count in tokens:
        best: dict[str, tuple[float, Plan]] = {}
        for family in FAMILIES:
            if family.first <= count <= family.last:
                found = _best_of_family(layer, family, count, w13, w2)
                best[family.arithmetic] = min(
                    best.get(family.arithmetic, found), found, key=lambda pair: pair[0]
                )
        yield best


def preferred(best: dict[str, tuple[float, Plan]]) -> str:
    """Return the arithmetic of ``auto``."""
    return "w4a8" if best["w4a8"][0] < best["w4a16"][0] * (1 - PRICE_OF_W4A8) else "w4a16"


def _best_of_family(
    layer: Layer, family: Family, tokens: int, w13: Int8Shift, w2: Int8Shift
) -> tuple[float, Plan]:
    x = torch.randn(tokens, layer.hidden, device="cuda", dtype=torch.bfloat16)
    activated = torch.randn(tokens * layer.topk, layer.intermediate, device="cuda", dtype=torch.bfloat16)
    routings = layer.routings(tokens)
    block = family.columns // family.digits
    aligned: list[tuple[Tensor | None, Tensor]] = [
        align_experts(ids, block, layer.experts)[:2] if block else (None, ids) for ids in routings
    ]
    outputs = torch.empty_like(activated), torch.empty(len(activated), layer.hidden, **_like(x))
    found = []
    for gated, rows, weight, out in ((True, x, w13, outputs[0]), (False, activated, w2, outputs[1])):
        q, scale = quantize_rows(rows, family.digits)
        run = partial(
            grouped_gemm, topk=layer.topk if gated else 1, columns=family.columns, gated=gated,
            limit=10.0 if gated else None,
        )  # fmt: skip
        calls = {
            tile: [partial(run, q, scale, weight, *ids, out, tile) for ids in aligned]
            for tile in family.tiles
            if _fits(tile, weight.channel_scale.shape[1])
        }
        found.append(fastest(f"experts, {family}", calls)[1])
    plan = Plan(tokens, family.arithmetic, family.columns, *found)
    weights = torch.rand(tokens, layer.topk, device="cuda")
    us = time_calls([partial(fused_moe, x, w13, w2, weights, ids, plan=plan) for ids in routings])
    return us, plan


def _like(x: Tensor) -> dict[str, object]:
    return {"dtype": x.dtype, "device": x.device}


def _fits(tile: Tile, n: int) -> bool:
    return n % tile.rows == 0


def compile_all(layer: Layer, tokens: Sequence[int], processes: int) -> None:
    """Compile what `tune` will launch, in parallel, into Triton's cache."""
    jobs = [
        (layer, family, tile, gated)
        for family in FAMILIES
        if any(family.first <= count <= family.last for count in tokens)
        for tile in family.tiles
        for gated in (True, False)
    ]
    compile_in_parallel(processes, [(_compile, *job) for job in jobs])


def _compile(layer: Layer, family: Family, tile: Tile, gated: bool) -> None:
    n, k = (2 * layer.intermediate, layer.hidden) if gated else (layer.hidden, layer.intermediate)
    if _fits(tile, n):
        with code_of_sm80(), suppress(*CANNOT):
            warm_up(n, k, tile, layer.topk if gated else 1, family.columns, family.digits, gated)
