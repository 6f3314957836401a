"""Measure which tiles run the experts fastest on this card: ``python -m kernels_ref.sm80.tune FILE``.

Writes a tile table that the environment variable DSV4_SM80_TILES then names; prints what it chose. A few
minutes, most of them compiling. On a card other than compute capability 8.0 the SM80 code is measured, as the
driver translates it. Memory: the experts of one layer, ``experts * 1.5 * hidden * intermediate`` bytes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from kernels_ref.sm80.align import align_experts
from kernels_ref.sm80.gate import require_card, sm80_code
from kernels_ref.sm80.moe import fused_moe, grouped_gemm, warm_up
from kernels_ref.sm80.quantize import quantize_rows
from kernels_ref.sm80.tiles import Plan, Table, Tile, write
from kernels_ref.tensors import Int8Shift

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


def time_calls(calls: Sequence[Callable[[], object]], milliseconds: float = 8.0) -> float:
    """Return the microseconds of one call: the median over replays of a CUDA graph of all of them."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()

    def replay() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    replay()
    repeats = max(5, min(50, round(milliseconds / replay())))
    return 1e3 * statistics.median(replay() for _ in range(repeats)) / len(calls)


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
    fastest = []
    for gated, rows, weight, out in ((True, x, w13, outputs[0]), (False, activated, w2, outputs[1])):
        q, scale = quantize_rows(rows, family.digits)
        run = partial(
            grouped_gemm, topk=layer.topk if gated else 1, columns=family.columns, gated=gated,
            limit=10.0 if gated else None,
        )  # fmt: skip
        times = {}
        for tile in family.tiles:
            if _fits(tile, weight.channel_scale.shape[1]):
                calls = [partial(run, q, scale, weight, *ids, out, tile) for ids in aligned]
                times[tile] = time_calls(calls)
        fastest.append(min(times, key=times.__getitem__))
    plan = Plan(tokens, family.arithmetic, family.columns, *fastest)
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
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        list(pool.map(_compile, *zip(*jobs, strict=True)))


def _compile(layer: Layer, family: Family, tile: Tile, gated: bool) -> None:
    n, k = (2 * layer.intermediate, layer.hidden) if gated else (layer.hidden, layer.intermediate)
    if _fits(tile, n):
        with code_of_sm80():
            warm_up(n, k, tile, layer.topk if gated else 1, family.columns, family.digits, gated)


def code_of_sm80() -> AbstractContextManager[None]:
    """Return the context in which this card runs SM80 code: its own on compute capability 8.0."""
    return nullcontext() if torch.cuda.get_device_capability() == (8, 0) else sm80_code()


def merge(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Join neighbours that differ in the number of tokens only; the last plan holds for any number."""
    kept: list[Plan] = []
    for plan in plans:
        if kept and replace(kept[-1], tokens=plan.tokens) == plan:
            kept.pop()
        kept.append(plan)
    return (*kept[:-1], replace(kept[-1], tokens=0))


def _require_sizes(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse, before minutes of measuring, sizes that no kernel takes and a file that cannot be written."""
    for name in ("hidden", "intermediate"):
        for size in sizes if isinstance(sizes := getattr(options, name), list) else [sizes]:
            if size < 128 or size % 128:
                parser.error(f"--{name}: expected a multiple of 128, found {size}")
    if min(options.tokens) < 1:
        parser.error(f"--tokens: expected 1 or more, found {min(options.tokens)}")
    if not 1 <= options.topk <= options.experts:
        parser.error(f"--topk: expected 1 to --experts {options.experts}, found {options.topk}")
    if options.processes < 1:
        parser.error(f"--processes: expected 1 or more, found {options.processes}")
    if options.file.is_dir() or not os.access(options.file.absolute().parent, os.W_OK):
        parser.error(f"{options.file}: expected a file in a folder that can be written to")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels_ref.sm80.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="the table to write")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument(
        "--intermediate", type=int, nargs="+", default=[2048, 1024, 512, 256], help="of a rank"
    )
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=6)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--processes", type=int, default=min(16, multiprocessing.cpu_count()))
    options = parser.parse_args(arguments)
    _require_sizes(parser, options)
    require_card()
    table: Table = {}
    for intermediate in options.intermediate:
        layer = Layer(options.hidden, intermediate, options.experts, options.topk)
        compile_all(layer, options.tokens, options.processes)
        rows: dict[str, list[Plan]] = {"auto": [], "w4a16": [], "w4a8": []}
        with code_of_sm80():
            for best in tune(layer, sorted(options.tokens)):
                choice = preferred(best)
                for name, (us, plan) in best.items():
                    mark = "*" if name == choice else " "
                    print(f"I={intermediate} {plan.tokens} tokens{mark} {us:.1f} us {plan}", flush=True)
                    rows[name].append(plan)
                rows["auto"].append(best[choice][1])
        table[intermediate] = {name: merge(plans) for name, plans in rows.items()}
        write(options.file, table, torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
