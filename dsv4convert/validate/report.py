"""The result of a check: findings, facts, and what was not looked at.

Checks return a `Report`; commands print it. "Structure OK" and "contents verified" are different sentences,
so a report always carries both lists: what was checked and what was not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import ROUND_DOWN, Decimal
from typing import Any

from dsv4convert.errors import Finding, errors_of

#: After this many findings of one code the rest is a count.
SHOWN_PER_CODE = 20


@dataclass(frozen=True, slots=True)
class Report:
    """What a check found.

    Attributes:
        subject: Name of the directory that was checked.
        title: What it was taken for.
        findings: Everything wrong, errors first.
        facts: Numbers for people and for ``--json``: shards, tensors, bytes.
        checked: What was looked at, in words; the findings say with which result.
        not_checked: What was not, in words.
        contents: Percent of the tensor data that was compared with something; None for none.
        fetch_again: Files of a download that are missing or wrong.
        fetch_command: The command that fetches them.
    """

    subject: str
    title: str
    findings: tuple[Finding, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    checked: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()
    contents: float | None = None
    fetch_again: tuple[str, ...] = ()
    fetch_command: str = ""

    def ok(self, *, strict: bool = False) -> bool:
        """Tell whether there are no errors or, under `strict`, no findings at all."""
        return not (self.findings if strict else errors_of(self.findings))

    def verdict(self, *, strict: bool = False) -> str:
        """Return the last line: what can be relied on now."""
        errors = len(errors_of(self.findings))
        warnings = _counted(len(self.findings) - errors, "warning")
        if not self.ok(strict=strict):
            return f"FAILED: {_counted(errors, 'error')}, {warnings}"
        depth = "structure OK, contents not verified"
        if self.contents is not None:
            share = f"structure OK, {shown_percent(self.contents)} of the contents verified"
            depth = "contents verified" if self.contents >= 100 else share
        return depth if len(self.findings) == errors else f"{depth}, {warnings}"

    def as_dict(self, *, strict: bool = False) -> dict[str, Any]:
        """Return the JSON form; its ``ok`` is the verdict of the exit status."""
        errors = len(errors_of(self.findings))
        return {
            "ok": self.ok(strict=strict),
            "subject": self.subject,
            "title": self.title,
            "errors": errors,
            "warnings": len(self.findings) - errors,
            "facts": dict(self.facts),
            "checked": list(self.checked),
            "not_checked": list(self.not_checked),
            "contents_percent": self.contents,
            "fetch_again": list(self.fetch_again),
            "fetch_command": self.fetch_command,
            "findings": [f.as_dict() for f in self.findings],
        }


def shown_percent(percent: float) -> str:
    """Return a share with at most four decimals, rounded down: only the whole is ``100 %``."""
    shown = Decimal(repr(float(percent))).quantize(Decimal("0.0001"), ROUND_DOWN)
    return f"{float(shown):.7g} %" if shown or not percent else "less than 0.0001 %"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def render(findings: Iterable[Finding]) -> Iterator[str]:
    """Yield the lines that show findings: errors first, the hint of a code once, long lists cut."""
    found = sorted(findings, key=lambda f: f.severity)
    totals = Counter(f.code for f in found)
    shown: Counter[str] = Counter()
    for position, f in enumerate(found):
        shown[f.code] += 1
        if shown[f.code] <= SHOWN_PER_CODE:
            yield str(f)
        last = position + 1 == len(found) or (found[position + 1].code, found[position + 1].hint) != (
            f.code,
            f.hint,
        )
        if last:
            left = totals[f.code] - SHOWN_PER_CODE
            if left > 0 and shown[f.code] == totals[f.code]:
                yield f"  … and {left:,} more of `{f.code}`; `--json` lists all"
            yield f"  hint: {f.hint}"
