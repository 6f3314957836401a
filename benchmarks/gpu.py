"""What the GPU benchmarks share: how a time is taken, what counts as 100 %, and how a row is printed.

A time is the median over replays of one CUDA graph that holds a call for each of several inputs, so that no
call finds its weights in the L2 cache and no launch gap counts. Code is SM80 code on every card
(`kernels_ref.sm80.gate.sm80_code`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        group: What is compared, as ``moe TP1``; rows of a group and case are printed beside each other.
        case: Sizes, as ``64 tokens``.
        name: Which kernel, as ``ours W4A16`` or ``B marlin``.
        us: Microseconds of one call.
        spread: Relative distance of the quartiles of its replays.
        nbytes: Bytes the task must move (not what the kernel happens to move).
        ops: Operations of the task, two for a multiply-add.
        error: Relative error (Frobenius) against float64; 0 where bits are equal.
        note: Anything else, as the tile or a recorded source.
    """

    group: str
    case: str
    name: str
    us: float
    spread: float = 0.0
    nbytes: int | None = None
    ops: int | None = None
    error: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Ceilings:
    """What this card gave in this process.

    Attributes:
        copy: Bytes per second, read plus written, of an eager device-to-device `copy_`.
        int8, bf16: Operations per second of 8192^3 products by the vendor's library, Hopper code allowed.
    """

    copy: float
    int8: float
    bf16: float


@dataclass(frozen=True)
class Context:
    """What a module of rows is given: the ceilings, the public peer or None, and whether to be brief."""

    ceilings: Ceilings
    marlin: Any
    quick: bool


def time_calls(calls: Sequence[Call], *, milliseconds: float = 60.0) -> tuple[float, float]:
    """Time calls that do the same work on different inputs.

    Args:
        calls: Each is captured once; they must be safe to capture. Enough of them that their inputs exceed
            L2.
        milliseconds: Least time of replays that counts, after as much for warming up.

    Returns:
        Microseconds of one call (median over replays), and the distance of the quartiles relative to it.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # Compiles, and lets allocators and libraries settle.
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return _replays(graph.replay, len(calls), milliseconds)


def time_eager(call: Call, *, milliseconds: float = 60.0) -> tuple[float, float]:
    """Time one call without a graph, for what a graph would turn into something else, as `copy_`."""
    call()
    return _replays(call, 1, milliseconds)


def _replays(call: Call, count: int, milliseconds: float) -> tuple[float, float]:
    def once() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    torch.cuda.synchronize()
    first = once()
    repeats = max(7, min(400, round(milliseconds / max(first, 1e-3))))
    for _ in range(repeats):
        call()
    times = [once() for _ in range(repeats)]
    low, middle, high = statistics.quantiles(times, n=4)
    return 1e3 * middle / count, (high - low) / middle


def _copy() -> tuple[float, int]:
    source = torch.randint(0, 255, (1 << 31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return time_eager(lambda: target.copy_(source))[0], 2 * source.numel()


def measure_ceilings() -> Ceilings:
    """Measure the ceilings; about a second."""
    copy, nbytes = _copy()
    size = 8192
    a = torch.randint(-127, 128, (size, size), dtype=torch.int8, device="cuda")
    b = torch.randint(-127, 128, (size, size), dtype=torch.int8, device="cuda").t()
    int8, _ = time_eager(lambda: torch._int_mm(a, b))
    c, d = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    bf16, _ = time_eager(lambda: torch.mm(c, d))
    return Ceilings(1e6 * nbytes / copy, 2e6 * size**3 / int8, 2e6 * size**3 / bf16)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ``|found - expected| / |expected|`` (Frobenius), computed in float64; NaN stays NaN."""
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).norm() / expected.norm())


def markdown(rows: Sequence[Row], ceilings: Ceilings) -> str:
    """Return the table, one section for each group."""
    lines = [
        f"100 % of bytes is the copy, {ceilings.copy / 1e9:,.0f} GB/s; of operations `_int_mm` "
        f"{ceilings.int8 / 1e12:,.0f} TOP/s or BF16 `mm` {ceilings.bf16 / 1e12:,.0f} TFLOP/s."
    ]
    for group in dict.fromkeys(row.group for row in rows):
        lines += ["", f"### {group}", "", "| case | kernel | us | GB/s | % copy | T/s | error | note |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        lines += [_line(row, ceilings) for row in rows if row.group == group]
    return "\n".join(lines)


def _line(row: Row, ceilings: Ceilings) -> str:
    rate = 1e6 * row.nbytes / row.us if row.nbytes else None
    cells = [
        row.case,
        row.name,
        f"{row.us:,.1f}",
        f"{rate / 1e9:,.0f}" if rate else "",
        f"{rate / ceilings.copy:.0%}" if rate else "",
        f"{row.ops / row.us / 1e6:,.1f}" if row.ops else "",
        "" if row.error is None else "bits equal" if row.error == 0 else f"{row.error:.1e}",
        row.note,
    ]
    return f"| {' | '.join(cells)} |"


def as_json(rows: Sequence[Row], ceilings: Ceilings) -> dict[str, Any]:
    """Return everything as one document, with the versions it was measured with."""
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "ceilings": asdict(ceilings),
        "rows": [asdict(row) for row in rows],
    }
