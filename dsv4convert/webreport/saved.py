"""Saved checks: the output of `converted --json`, read back, for a page that shows what was verified."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from dsv4convert.errors import Finding, Refused, errors_of, finding
from dsv4convert.files import printable
from dsv4convert.validate.report import Report


class Check(NamedTuple):
    """A check as the page shows it; `file` is where it was saved, None for the one made with the page."""

    report: Report
    file: Path | None = None

    @property
    def verdict(self) -> str:
        """What the page says above it."""
        return self.report.verdict()

    @property
    def state(self) -> str:
        """``ok``, ``warning`` or ``failed``."""
        if errors_of(self.report.findings):
            return "failed"
        return "warning" if self.report.findings else "ok"


def overall(checks: Sequence[Check]) -> Check:
    """Return the check that the head of the page quotes: a failed one, else the one that compared most."""
    return max(checks, key=lambda check: (check.state == "failed", check.report.contents or 0))


def read_saved(file: Path, own: Report) -> Check:
    """Return a saved check of the checkpoint that `own` is about.

    Raises:
        Refused: the file is no saved check, or it is about another manifest.
    """
    try:
        saved = json.loads(file.read_bytes())
        report = _report(saved)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        problem = "is not a saved check"
        cause = str(error.strerror) if isinstance(error, OSError) else ""
        raise Refused(finding("report.not-json", file.name, problem, found=cause)) from error
    wanted, found = own.facts.get("manifest_sha256"), report.facts.get("manifest_sha256")
    if wanted != found:
        problem = "is a check of a checkpoint with another manifest"
        expected = f"manifest_sha256 {str(wanted)[:12]}…"
        shown = f"{str(found)[:12]}…" if found else "none"
        raise Refused(finding("report.other", file.name, problem, expected=expected, found=shown))
    return Check(report, file)


def _report(saved: Any) -> Report:
    percent = saved["contents_percent"]
    if percent is not None and not 0 < float(percent) <= 100:
        raise ValueError("no percentage")
    return Report(
        subject=_text(saved["subject"]),
        title=_text(saved["title"]),
        findings=tuple(_findings(saved["findings"])),
        facts=dict(saved["facts"]),
        checked=tuple(map(_text, saved["checked"])),
        not_checked=tuple(map(_text, saved["not_checked"])),
        contents=percent,
    )


def _findings(rows: list[Mapping[str, Any]]) -> Iterator[Finding]:
    for row in rows:
        # They are printed, too, and a file may hold what drives a terminal.
        texts = {field.name: printable(_text(row[field.name]), 10_000) for field in fields(Finding)}
        found = Finding(**texts)  # type: ignore[arg-type]
        if found.severity not in ("error", "warning"):
            raise ValueError("no severity")
        yield found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("no text")
    return value
