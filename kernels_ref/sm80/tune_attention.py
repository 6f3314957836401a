"""Which plans run attention and index scores fastest on this card; `kernels_ref.sm80.tune` is the command.

About a minute after compiling. Memory: 3 GiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from kernels_ref.indexer import PAGE
from kernels_ref.sm80 import attention, indexer
from kernels_ref.sm80.device import blocks_at_once
from kernels_ref.sm80.inputs import PICKED, SCALE, WINDOW, Pools, Scores, index_cache, scores
from kernels_ref.sm80.measure import CANNOT, code_of_sm80, compile_in_parallel, fastest
from kernels_ref.sm80.tiles import ATTENTION, AttentionPlan, ScoresPlan, Walk

#: Numbers of tokens of 16 heads, and of queries, that are measured.
TOKENS, QUERIES = (1, 8, 64, 512, 4096), (1, 8, 64)
#: Keys of a query: a context of 131,072 tokens, one key for four.
INDEX_KEYS = 32768
_MILLISECONDS = 20.0

_WALKS = tuple(
    Walk(*shape, slices) for shape in ((1, 2), (1, 3), (1, 4), (2, 2), (2, 3)) for slices in (1, 2, 4)
)
#: Warps and stages of the scores.
_RUNS = tuple(product((1, 2, 4), (2, 3, 4)))
ATTENTION_PLANS = tuple(AttentionPlan(0, walk, walk, blocks) for walk in _WALKS for blocks in (1, 2, 3))
SCORES_PLANS = tuple(
    ScoresPlan(0, *run, pages, blocks) for run, pages, blocks in product(_RUNS, (4, 16, 32), (4, 6, 8, 16))
)


def tune_attention(pools: Pools, tokens: Sequence[int] = TOKENS) -> Iterator[tuple[float, AttentionPlan]]:
    """Yield, for each number of tokens of 16 heads, the microseconds of the fastest plan, and the plan."""
    for count in tokens:
        problems = pools.problems(count, attention.HEADS)
        out = torch.empty_like(problems[0].q)
        calls = {plan: [partial(problem.call, out, plan) for problem in problems] for plan in ATTENTION_PLANS}
        us, plan = fastest(f"attention, {count} tokens", calls, _MILLISECONDS)
        yield us, only_measured(plan, count, blocks_at_once(out.device, plan.blocks))


def only_measured(plan: AttentionPlan, tokens: int, places: int) -> AttentionPlan:
    """Return a plan for `tokens`, whose walk that was not measured, of split or whole lists, is as shipped.

    Args:
        plan: With one walk for both.
        tokens: Tokens that it was measured with.
        places: Blocks that the card runs at a time under this plan.
    """
    tiles = (WINDOW + PICKED) // attention.KEYS
    shipped = next(one for one in ATTENTION if not one.tokens or tokens <= one.tokens)
    if attention.splits_of(tokens, tiles, places) > 1:
        return replace(plan, tokens=tokens, whole=shipped.whole)
    return replace(plan, tokens=tokens, split=shipped.split)


def tune_scores(
    queries: Sequence[int] = QUERIES, keys: int = INDEX_KEYS, device: str = "cuda"
) -> Iterator[tuple[float, ScoresPlan]]:
    """Yield, for each number of queries, the microseconds of the fastest plan, and the plan."""
    for count in queries:
        problems = scores(count, keys, device=device)
        out = torch.empty(count, keys, device=device)
        calls = {
            plan: [
                partial(indexer.index_logits, *problem.args(), out=out, clean=False, plan=plan)
                for problem in problems
            ]
            for plan in SCORES_PLANS
        }
        us, plan = fastest(f"index scores, {count} queries", calls, _MILLISECONDS)
        yield us, replace(plan, tokens=count)


def compile_all(processes: int) -> None:
    """Compile what the functions above will launch, in parallel, into Triton's cache and the driver's."""
    jobs = [(_compile_attention, *job) for job in product((True, False), _WALKS)]
    compile_in_parallel(processes, [*jobs, *((_compile_scores, *run) for run in _RUNS)])


def _compile_attention(split: bool, walk: Walk) -> None:
    """Compile a walk by launching it once on little data, a token whose keys are split or are not."""
    with code_of_sm80(), suppress(*CANNOT):
        keys = PICKED if split else 1
        index = torch.zeros(1, keys, dtype=torch.int32, device="cuda")
        length = torch.ones(1, dtype=torch.int32, device="cuda")
        cache, sink = torch.zeros(1, 512, dtype=torch.bfloat16, device="cuda"), torch.zeros(16, device="cuda")
        q = cache.expand(16, 512)[None].contiguous()
        attention.sparse_attention(
            q, cache, index, length, sink, SCALE, plan=AttentionPlan(0, walk, walk, 1),
            extra_cache=cache, extra_indices=index, extra_lengths=length,
        )  # fmt: skip


def _compile_scores(warps: int, stages: int) -> None:
    with code_of_sm80(), suppress(*CANNOT):
        problem = Scores.draw(index_cache(4), 1, 4 * PAGE)
        indexer.index_logits(*problem.args(), clean=False, plan=ScoresPlan(0, warps, stages, 4, 8))
