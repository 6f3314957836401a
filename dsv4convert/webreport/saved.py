"""Saved checks: what `converted --save` wrote, read back, for a page that shows what was verified."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from dsv4convert.errors import Finding, Refused, errors_of, finding
from dsv4convert.files import printable
from dsv4convert.validate.report import Report

_TIME = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d):\d\dZ", re.ASCII)


class Check(NamedTuple):
    """A check as the page shows it.

    Attributes:
        report: What it found.
        file: Where it was saved; None for the one made with the page.
        is_here: Whether what it says of contents is about the shards that are here now.
    """

    report: Report
    file: Path | None = None
    is_here: bool = True

    @property
    def verdict(self) -> str:
        """What the page says above it; a saved one tells of which directory it is, and of when."""
        told = self.report.verdict()
        if self.file is None:
            return told
        time = _TIME.fullmatch(self.report.facts.get("contents_at", ""))
        parts = [
            f"check of {printable(self.report.subject)}",
            f"{time[1]} {time[2]} UTC" if time else "undated",
        ]
        if not self.is_here:
            known = "identity_sha256" in self.report.facts
            parts.append("not of the files here" if known else "of unknown files")
        return f"{told} ({', '.join(parts)})"

    @property
    def contents(self) -> float:
        """Percent of the tensor data here that was compared with something."""
        return (self.report.contents or 0) if self.is_here else 0

    @property
    def state(self) -> str:
        """``ok``, ``warning`` or ``failed``."""
        if errors_of(self.report.findings):
            return "failed"
        return "warning" if self.report.findings else "ok"


def overall(checks: Sequence[Check]) -> Check:
    """Return the check that the head of the page quotes: a failed one, else the one that compared most."""
    return max(checks, key=lambda check: (check.state == "failed", check.contents))


def read_saved(file: Path, own: Report) -> Check:
    """Return a saved check of the checkpoint that `own` is about.

    One that compared the contents of other files, such as those of another copy, says so in a warning.

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
    here, seen = own.facts["identity_sha256"], report.facts.get("identity_sha256")
    if report.contents is None or seen == here:
        return Check(report, file)
    problem = "compared contents in other files than those here, or before these were changed"
    if seen is None:
        problem = "does not say in which files it compared contents"
    expected, shown = f"identity_sha256 {here[:12]}…", f"{seen[:12]}…" if seen else "none"
    doubt = finding("report.elsewhere", printable(file.name), problem, expected=expected, found=shown)
    return Check(replace(report, findings=(*report.findings, doubt)), file, is_here=False)


def _report(saved: Any) -> Report:
    percent = saved["contents_percent"]
    if percent is not None and not 0 < float(percent) <= 100:
        raise ValueError("no percentage")
    facts = dict(saved["facts"])
    for key in ("manifest_sha256", "identity_sha256", "contents_at"):
        _text(facts.get(key, ""))
    if "contents_at" in facts and not _TIME.fullmatch(facts["contents_at"]):
        raise ValueError("no time")
    return Report(
        subject=_text(saved["subject"]),
        title=_text(saved["title"]),
        findings=tuple(_findings(saved["findings"])),
        facts=facts,
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
