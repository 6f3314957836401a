"""What tuning shares: how a time is taken, which setting is fastest, how settings are compiled beforehand."""

from __future__ import annotations

import multiprocessing
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from triton import OutOfResources

from kernels_ref.sm80.gate import sm80_code
from kernels_ref.sm80.tiles import AnyPlan

#: What a card without enough shared memory or registers for a setting raises.
CANNOT = (OutOfResources, RuntimeError)

Setting = TypeVar("Setting")


class CannotRunError(RuntimeError):
    """This card can run none of the settings of a kernel."""


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


def fastest(
    what: str, calls: Mapping[Setting, Sequence[Callable[[], object]]], milliseconds: float = 8.0
) -> tuple[float, Setting]:
    """Return the microseconds of the fastest setting, and the setting; those that the card cannot run lose.

    Args:
        what: What is measured, for messages.
        calls: Setting -> calls that do the same work on different inputs.
        milliseconds: Time for the replays of one setting.

    Raises:
        CannotRunError: the card can run none of them.
    """
    times: dict[Setting, float] = {}
    reason: Exception | None = None
    for setting, some in calls.items():
        try:
            times[setting] = time_calls(some, milliseconds)
        except CANNOT as error:
            reason = error
            print(f"  {what}: {setting}: {type(error).__name__}: {error}", file=sys.stderr)
    if not times:
        found = f"; the last failed with {reason}" if reason else ""
        raise CannotRunError(f"{what}: this card can run none of {len(calls)} settings{found}") from reason
    best = min(times, key=times.__getitem__)
    return times[best], best


def code_of_sm80() -> AbstractContextManager[None]:
    """Return the context in which this card runs SM80 code: its own on compute capability 8.0."""
    return nullcontext() if torch.cuda.get_device_capability() == (8, 0) else sm80_code()


def merge(plans: Sequence[AnyPlan]) -> tuple[AnyPlan, ...]:
    """Join neighbours that differ in the number of tokens only; the last plan holds for any number."""
    kept: list[AnyPlan] = []
    for plan in plans:
        if kept and replace(kept[-1], tokens=plan.tokens) == plan:
            kept.pop()
        kept.append(plan)
    return (*kept[:-1], replace(kept[-1], tokens=0))


def compile_in_parallel(processes: int, jobs: Sequence[tuple[Any, ...]]) -> None:
    """Call ``job[0](*job[1:])`` in other processes, which leaves their kernels in Triton's cache."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for done in [pool.submit(*job) for job in jobs]:
            done.result()
