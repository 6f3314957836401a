"""Which settings of attention and scores are fastest: ``python benchmarks/tune_gpu_attention.py [-h]``.

Times tiles, stages, slices, warps and splits and prints the fastest of each size: they are the constants at
the top of `kernels_ref.sm80.attention` and `kernels_ref.sm80.indexer`. Takes about a minute, writes nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from triton import OutOfResources

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_gpu_attention import (
    KEYS,
    PICKED,
    SCALE,
    WINDOW,
    Pools,
    Scores,
    attention_calls,
    index_cache,
    logits_calls,
)
from benchmarks.gpu import Call, time_calls
from kernels_ref.indexer import PAGE
from kernels_ref.sm80 import attention, indexer
from kernels_ref.sm80.gate import require_card, sm80_code

#: Tiles of a round, stages and slices of `attention._SPLIT` or `_WHOLE`.
_SHAPES = tuple(
    (*shape, slices) for shape in ((1, 2), (1, 3), (1, 4), (2, 2), (2, 3)) for slices in (1, 2, 4)
)
#: Warps and stages of `indexer`.
_RUNS = tuple(product((1, 2, 4), (2, 3, 4)))
# What a card without enough shared memory or registers raises.
_CANNOT = (OutOfResources, RuntimeError)


@contextmanager
def _constants(module: Any, names: str, values: Sequence[Any]) -> Iterator[None]:
    with patch.multiple(module, **dict(zip(names.split(), values, strict=True))):
        yield


def _swept(module: Any, names: str, values: Sequence[Any], calls: list[Call]) -> float | None:
    """Return microseconds with some constants of a module replaced; None if the card cannot run that."""
    with _constants(module, names, values):
        try:
            return time_calls(calls, milliseconds=20)[0]
        except _CANNOT as error:
            print(f"  {names} = {values}: {type(error).__name__}", file=sys.stderr)
            return None


def _tune(what: str, module: Any, names: str, grid: Iterable[Sequence[Any]], calls: list[Call]) -> None:
    times = {tuple(values): _swept(module, names, values, calls) for values in grid}
    ranked = sorted((us, values) for values, us in times.items() if us is not None)
    print(f"\n{what}: {', '.join(names.split())}")
    for us, values in ranked[:6]:
        print(f"  {us:9.1f} us  {', '.join(map(str, values))}", flush=True)


def _compile_attention(split: bool, shape: tuple[int, ...]) -> None:
    """Compile what `_tune` will launch, by launching it once on little data."""
    index = torch.zeros(1, PICKED, dtype=torch.int32, device="cuda")
    length = torch.ones(1, dtype=torch.int32, device="cuda")
    cache, sink = torch.zeros(1, 512, dtype=torch.bfloat16, device="cuda"), torch.zeros(16, device="cuda")
    extra = {"extra_cache": cache, "extra_indices": index, "extra_lengths": length}
    names, values = f"{'_SPLIT' if split else '_WHOLE'} splits_of", (shape, lambda *_: 1 + split)
    with sm80_code(), _constants(attention, names, values), suppress(*_CANNOT):
        q = cache.expand(16, 512)[None].contiguous()
        attention.sparse_attention(q, cache, index[:, :WINDOW], length, sink, SCALE, **extra)


def _compile_logits(warps: int, stages: int) -> None:
    with sm80_code(), _constants(indexer, "_WARPS _STAGES", (warps, stages)):
        problem = Scores.draw(index_cache(4), 1, 4 * PAGE, shared=False)
        with suppress(*_CANNOT):
            indexer.index_logits(*problem.args(), clean=False)


def _compile_all() -> None:
    """Compile everything in parallel, into Triton's cache and the driver's."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(16, multiprocessing.cpu_count()), mp_context=context) as pool:
        jobs = [pool.submit(_compile_attention, *job) for job in product((True, False), _SHAPES)]
        jobs += [pool.submit(_compile_logits, *run) for run in _RUNS]
        for job in jobs:
            job.result()


def main() -> None:
    """Time the settings of both kernels and print the fastest of each size."""
    style = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=style).parse_args()
    require_card()
    _compile_all()
    with sm80_code():
        pools = Pools.draw()
        for tokens in (1, 8, 64, 512, 4096):
            calls = attention_calls(pools, tokens, 16)[1]
            names = f"{'_SPLIT' if tokens <= 64 else '_WHOLE'} _BLOCKS_PER_PROCESSOR"
            grid = product(_SHAPES, (1, 2, 3))
            _tune(f"sparse attention, {tokens} tokens, 16 heads", attention, names, grid, calls)
        del pools, calls
        for tokens in (1, 8, 64):
            what, calls = f"index logits, {tokens} queries", logits_calls(tokens, KEYS)[1]
            names = "_WARPS _STAGES _MOST_PAGES _BLOCKS_PER_PROCESSOR"
            grid = ((*run, *rest) for run in _RUNS for rest in product((4, 16, 32), (4, 6, 8, 16)))
            _tune(what, indexer, names, grid, calls)


if __name__ == "__main__":
    main()
