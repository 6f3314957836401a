"""Where the pictures of a request stand, read from what SGLang keeps of them. No torch, no SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def blocks(inputs: Any) -> Iterator[range]:
    """Yield the positions of each picture, lead PADs included, in order.

    Args:
        inputs: SGLang's ``MultimodalInputs`` of a request, None without pictures.
    """
    for item in inputs.mm_items if inputs is not None else ():
        # One picture is one item with one pair of first and last position.
        yield from (range(first, last + 1) for first, last in item.offsets)


def start_around(inputs: Any, position: int) -> int | None:
    """Return the first position of the picture that a cut before `position` would divide; None if none."""
    return next((b.start for b in blocks(inputs) if b.start < position < b.stop), None)


def extended(batch: Any) -> list[tuple[range, Any]]:
    """Return, for each request of a prefill step, the positions it computes and its inputs.

    Args:
        batch: SGLang's ``ForwardBatch``.

    Returns:
        Nothing unless the step is a prefill with pictures among the positions that it computes.
    """
    if not batch.forward_mode.is_extend_without_speculative() or not batch.mm_inputs:
        return []
    lengths = zip(batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True)
    steps = [
        (range(prefix, prefix + length), i)
        for (prefix, length), i in zip(lengths, batch.mm_inputs, strict=True)
    ]
    return steps if any(_meet(step, b) for step, inputs in steps for b in blocks(inputs)) else []


def _meet(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop
