"""Whether two greedy answers differ by a tie or by a fault.

A server that batches, caches or splits a prompt otherwise adds in another order, so that of two tokens that
are almost equally probable either may win. A trace, an answer with the most probable tokens of every
position, tells such a tie from a fault: the tokens that won lie no further apart than a bound in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

#: A text that ends inside a character shows this instead.
_HOLE: Final = "\ufffd"
#: Special tokens of DeepSeek begin so; the one that ends an answer is not part of its text.
_MARK: Final = "<｜"

Verdict = Literal["equal", "tie", "fault", "unknown"]


@dataclass(frozen=True, slots=True)
class Step:
    """One token of a trace.

    Attributes:
        text: The token as text.
        others: The next most probable tokens as text, with their distance to the winner in nats.
    """

    text: str
    others: tuple[tuple[str, float], ...]


def agree(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many items two answers have in common, from the beginning on."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def compare(one: str, other: str, trace: Sequence[Step], bound: float) -> Verdict:
    """Compare two answers to one question.

    Args:
        one: An answer.
        other: Another.
        trace: A third, with probabilities; empty when the server gives none.
        bound: Distance in nats up to which two tokens may change places.

    Returns:
        ``unknown`` when they differ and there is no trace.
    """
    if one.rstrip(_HOLE) == other.rstrip(_HOLE):
        return "equal"
    if not trace:
        return "unknown"
    return "tie" if all(_follows(text, trace, bound) for text in (one, other)) else "fault"


def _follows(text: str, trace: Sequence[Step], bound: float) -> bool:
    """Tell whether a text is what the trace says, up to its end or up to a tie."""
    at = 0
    for step in trace:
        if _HOLE in step.text:
            # From here on text cannot be laid beside tokens: only the gap itself can be judged.
            rest = trace[trace.index(step) :]
            return any(gap <= bound for later in rest for _, gap in later.others[:1])
        if text.startswith(step.text, at):
            at += len(step.text)
            continue
        if at == len(text) and step is trace[-1] and step.text.startswith(_MARK):
            return True
        return any(gap <= bound and _goes_on(text, at, token) for token, gap in step.others)
    return at == len(text.rstrip(_HOLE))


def _goes_on(text: str, at: int, token: str) -> bool:
    if at == len(text):
        return not token or token.startswith(_MARK)
    return _HOLE in token or (token != "" and text.startswith(token, at))
