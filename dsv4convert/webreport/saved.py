"""Saved checks: what `converted --save` wrote, read back, for a page that shows what was verified."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from dsv4convert.errors import Dsv4Error, Finding, Refused, errors_of, finding
from dsv4convert.files import parse_json, printable, read_whole
from dsv4convert.validate.report import Report

#: Room for a finding about every tensor of the largest release.
_MOST_BYTES: Final = 256 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TIME: Final = "%Y-%m-%dT%H:%M:%SZ"


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
        time = self.report.facts.get("contents_at", "")
        parts = [
            f"check of {printable(self.report.subject)}",
            f"{time[:10]} {time[11:16]} UTC" if time else "undated",
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
        EnvironmentFault: it cannot be read.
    """
    name = printable(file.name)
    raw = read_whole(file, file.name, _MOST_BYTES, "report.not-json")
    try:
        report = _report(*parse_json(raw, file.name, "report.not-json"))
    except Dsv4Error as fault:
        raise Refused(fault.findings) from None
    except _Unlike as unlike:
        problem = "is not a saved check"
        shown = {"expected": unlike.expected, "found": unlike.found}
        raise Refused(finding("report.not-json", name, problem, **shown)) from None
    wanted, found = own.facts.get("manifest_sha256"), report.facts.get("manifest_sha256")
    if wanted != found:
        problem = "is a check of a checkpoint with another manifest"
        expected = f"manifest_sha256 {str(wanted)[:12]}…"
        shown_digest = f"{found[:12]}…" if found else "none"
        raise Refused(finding("report.other", name, problem, expected=expected, found=shown_digest))
    here, seen = own.facts["identity_sha256"], report.facts.get("identity_sha256")
    if report.contents is None or seen == here:
        return Check(report, file)
    problem = "compared contents in other files than those here, or before these were changed"
    if seen is None:
        problem = "does not say in which files it compared contents"
    expected, shown_digest = f"identity_sha256 {here[:12]}…", f"{seen[:12]}…" if seen else "none"
    doubt = finding("report.elsewhere", name, problem, expected=expected, found=shown_digest)
    return Check(replace(report, findings=(*report.findings, doubt)), file, is_here=False)


class _Unlike(Exception):
    """A value is not what `converted --save` writes."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(expected)
        self.expected = expected
        self.found = found


def _report(saved: Any, repeated: Sequence[str]) -> Report:
    if repeated:
        raise _Unlike("every key once", f"`{printable(repeated[0], 60)}` twice")
    if not isinstance(saved, dict):
        raise _Unlike("a JSON object", _shown(saved))
    percent = _take(saved, "contents_percent", "a number above 0 and up to 100, or null", _is_percent)
    facts = dict(_take(saved, "facts", "an object", lambda value: isinstance(value, dict)))
    for key in facts.keys() & {"manifest_sha256", "identity_sha256"}:
        _take(facts, key, "64 hexadecimal digits", _is_digest, "facts.")
    # A check with an identity always says when; earlier versions saved neither.
    if "contents_at" in facts or (percent is not None and "identity_sha256" in facts):
        _take(facts, "contents_at", "a time such as `2026-11-30T08:10:00Z`", _is_time, "facts.")
    report = Report(
        subject=_take(saved, "subject", "a string", _is_text),
        title=_take(saved, "title", "a string", _is_text),
        findings=tuple(_findings(_take(saved, "findings", "a list", lambda v: isinstance(v, list)))),
        facts=facts,
        checked=tuple(_take(saved, "checked", "a list of strings", _are_texts)),
        not_checked=tuple(_take(saved, "not_checked", "a list of strings", _are_texts)),
        contents=None if percent is None else float(percent),
    )
    _agree(saved, report)
    return report


def _agree(saved: dict[str, Any], report: Report) -> None:
    """Refuse a check that says one thing in its findings and another beside them."""
    errors = len(errors_of(report.findings))
    for key, count in {"errors": errors, "warnings": len(report.findings) - errors}.items():
        _take(saved, key, f"{count}, the number in `findings`", partial(_equals, count))
    # With `--strict` warnings are enough to fail.
    possible = {report.ok(), report.ok(strict=True)}
    shown = " or ".join(json.dumps(ok) for ok in sorted(possible))
    _take(saved, "ok", f"{shown}, as `findings` say", lambda v: isinstance(v, bool) and v in possible)


def _take(part: dict[str, Any], key: str, wanted: str, fits: Callable[[Any], bool], place: str = "") -> Any:
    """Return a value of an object; complain if it is not there or does not fit."""
    if key not in part:
        raise _Unlike(f"`{place}{key}`: {wanted}", "no such key")
    if not fits(part[key]):
        raise _Unlike(f"`{place}{key}`: {wanted}", _shown(part[key]))
    return part[key]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    return "a list" if isinstance(value, list) else printable(json.dumps(value), 60)


def _is_percent(value: Any) -> bool:
    # An integer of JSON may be larger than any float; `True` is one to Python.
    return value is None or (type(value) in (int, float) and 0 < value <= 100 and math.isfinite(value))


def _equals(count: int, value: Any) -> bool:
    return type(value) is int and value == count


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _is_time(value: Any) -> bool:
    try:
        # There and back: `strptime` alone also takes numbers without their zeros.
        return isinstance(value, str) and datetime.strptime(value, _TIME).strftime(_TIME) == value
    except ValueError:
        return False


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _findings(rows: list[Any]) -> Iterator[Finding]:
    for number, row in enumerate(rows):
        place = f"findings[{number}]"
        if not isinstance(row, dict):
            raise _Unlike(f"`{place}`: an object", _shown(row))
        texts = {f.name: _take(row, f.name, "a string", _is_text, f"{place}.") for f in fields(Finding)}
        _take(row, "severity", "`error` or `warning`", lambda v: v in ("error", "warning"), f"{place}.")
        # They are printed, too, and a file may hold what drives a terminal.
        yield Finding(**{key: printable(text, 10_000) for key, text in texts.items()})  # type: ignore[arg-type]
