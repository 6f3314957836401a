"""The memory part of `plan`: its options, and its budget as text and as JSON."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click

from dsv4convert.cli.progress import gib
from dsv4convert.memory import (
    CARD_BYTES,
    RUNTIME_BYTES,
    Demand,
    GpuMemory,
)

_OPTIONS = (
    click.option(
        "--context", type=click.IntRange(1), metavar="N", help="Tokens of a request that has to fit."
    ),
    click.option(
        "--concurrency",
        type=click.IntRange(1, 65536),
        metavar="M",
        help="Requests of that length that have to fit at once.",
    ),
    click.option(
        "--mem-fraction-static",
        type=click.FloatRange(0, 1, min_open=True, max_open=True),
        metavar="F",
        default=0.70,
        show_default=True,
        help="SGLang's option of that name: share of the card for weights and KV pools.",
    ),
    click.option(
        "--gpu-memory",
        type=click.IntRange(1 << 30),
        metavar="BYTES",
        default=CARD_BYTES,
        show_default="79.25 GiB: A100 or A800 with 80 GB",
        help="Size of a card as CUDA reports it.",
    ),
    click.option("--draft/--no-draft", default=True, show_default=True, help="Serve with the draft layers."),
)


def memory_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of the memory budget; the command receives them as one `demand`."""

    @functools.wraps(function)
    def wrapper(
        *args: Any,
        tp: tuple[int, ...],
        context: int | None,
        concurrency: int | None,
        mem_fraction_static: float,
        gpu_memory: int,
        draft: bool,
        **rest: Any,
    ) -> None:
        demand = Demand(context, concurrency, mem_fraction_static, gpu_memory, draft)
        if demand.is_asked and not tp:
            raise click.UsageError("--context and --concurrency need --tp")
        function(*args, tp=tp, demand=demand, **rest)

    wrapped: Callable[..., None] = wrapper
    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped


def lines(memory: GpuMemory, draft: str) -> Iterator[str]:
    """Yield one budget as text; `draft` names the kind of draft."""
    pools, weights = memory.pools, memory.weights
    yield f"  memory of each of {memory.tp} GPUs under SGLang 0.5.16, BF16 keys and INT8 index cache"
    yield f"    card       {gib(memory.demand.card_bytes)}, {gib(RUNTIME_BYTES)} of it for CUDA and NCCL"
    parts = sorted(((role.value, size) for role, size in weights.roles.items()), key=lambda item: -item[1])
    parts = [*parts[:4], ("the rest", sum(size for _, size in parts[4:]))]
    yield f"    weights    {gib(weights.target)}: {_parts(parts)}"
    if weights.draft:
        yield f"    draft      {gib(weights.draft)} of {draft} weights"
    yield f"    rope       {gib(memory.tables)} of tables for {memory.limit:,} positions"
    yield (
        f"    capacity   {memory.tokens:,} tokens at --mem-fraction-static {memory.demand.fraction:.2f}, "
        f"{memory.per_token:,.0f} bytes each"
    )
    parts = [
        ("window", pools["window"] + pools["draft_window"]),
        ("C4", pools["c4"]),
        ("C128", pools["c128"]),
        ("index", pools["index"]),
        ("state", pools["c4_state"] + pools["c128_state"]),
        ("page lists", pools["page_lists"]),
    ]
    yield f"    KV pools   {gib(sum(pools.values()))}: {_parts(parts)}"
    yield f"    left       {gib(memory.left)} for CUDA graphs, activations and fragmentation"
    yield f"    requests   {_requests(memory)}"


def _parts(parts: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts)


def _requests(memory: GpuMemory) -> str:
    each = f"{memory.concurrency:,} at once: {memory.longest:,} tokens each"
    if not memory.demand.is_asked:
        return each
    verdict = "fits" if memory.needed <= memory.tokens else "does not fit"
    return f"{each}; {memory.concurrency:,} x {memory.context:,} tokens {verdict}"
