"""Which losses of a conversion are still acceptable, and the judgement of a shard by them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dsv4convert.errors import Finding, Refused, finding
from dsv4convert.journal import ShardRecord
from dsv4convert.transform import Outcome

_ALLOWED_BY_ROUNDING = frozenset({"value.inexact", "value.mxfp4-overflow"})


@dataclass(frozen=True, slots=True)
class Limits:
    """What is still acceptable.

    Attributes:
        allow_rounding: Accept blocks that leave the exact range of BF16.
        max_relative_error: Largest relative error (Frobenius) of a repacked matrix; None for any.
        min_exact: Smallest share of exact non-zero codes of a repacked matrix; None for any.
    """

    allow_rounding: bool = False
    max_relative_error: float | None = None
    min_exact: float | None = None


def judge(outcome: Outcome, limits: Limits) -> list[Finding]:
    """Return the findings that the limits accept; refuse the shard for all others together."""
    accepted = [f for f in outcome.findings if limits.allow_rounding and f.code in _ALLOWED_BY_ROUNDING]
    refused = [f for f in outcome.findings if f not in accepted]
    refused += _loss_findings(outcome.figures, limits)
    if refused:
        raise Refused(refused)
    return accepted


def judge_again(records: Iterable[ShardRecord], limits: Limits) -> None:
    """Hold shards that were made earlier, perhaps under other limits, to those of this run."""
    refused: list[Finding] = []
    for record in records:
        refused += _loss_findings(record.figures, limits)
        if not limits.allow_rounding:
            problem = "was rounded by an earlier run"
            refused += [finding(f["code"], f["tensor"], problem, found=f["found"]) for f in record.rounded]
    if refused:
        raise Refused(refused)


def _loss_findings(figures: Mapping[str, Mapping[str, Any]], limits: Limits) -> Iterator[Finding]:
    for base, row in figures.items():
        error, share = row.get("relative_error", 0.0), row.get("exact_share", 1.0)
        if limits.max_relative_error is not None and error > limits.max_relative_error:
            problem, expected = "the repack loses too much", f"at most {limits.max_relative_error:g}"
            yield finding("value.relative-error", base, problem, expected=expected, found=f"{error:.3g}")
        if limits.min_exact is not None and share < limits.min_exact:
            problem, expected = "the repack changes too many codes", f"at least {limits.min_exact:g} exact"
            yield finding("value.exact-share", base, problem, expected=expected, found=f"{share:.6f}")
