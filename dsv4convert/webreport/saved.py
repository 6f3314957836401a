"""Saved checks: the output of `converted --json`, read back, for a page that shows what was verified."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from dsv4convert.errors import Finding, Refused, finding
from dsv4convert.files import printable
from dsv4convert.validate.report import Report


def read_saved(file: Path, own: Report) -> Report:
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
    return report


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
