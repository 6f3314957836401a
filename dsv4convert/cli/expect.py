"""`--expect KEY=VALUE`: hold the numbers of a report against those that a script was written for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import click

from dsv4convert.errors import finding
from dsv4convert.validate.report import Report

#: What can be expected: keys of the report's ``facts``.
KEYS: Final = ("shards", "tensors", "data_bytes", "expert_weights", "mtp_tensors", "layout", "release")
_WORDS: Final = frozenset({"layout", "release"})


def _parse(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, int | str]:
    """Return what `--expect` says, key by key.

    Raises:
        BadParameter: an unknown key, one given twice with two values, or a value of another kind.
    """
    expected: dict[str, int | str] = {}
    for pair in (part for value in values for part in value.split(",")):
        key, equals, text = (part.strip() for part in pair.partition("="))
        if not equals or key not in KEYS:
            raise click.BadParameter(f"{pair!r} is no KEY=VALUE with a key of: {', '.join(KEYS)}")
        if key not in _WORDS and not (text.isascii() and text.isdecimal()):
            raise click.BadParameter(f"{key} is a whole number, got {text!r}")
        value = text if key in _WORDS else int(text)
        if expected.setdefault(key, value) != value:
            raise click.BadParameter(f"{key} is given twice: {expected[key]} and {value}")
    return expected


def expect_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--expect`; the command receives a mapping."""
    return click.option(
        "--expect",
        multiple=True,
        callback=_parse,
        metavar="KEY=VALUE[,KEY=VALUE...]",
        help=f"Fail unless the checkpoint has these numbers; repeatable. Keys: {', '.join(KEYS)}.",
    )(function)


def with_expectations(report: Report, expected: Mapping[str, int | str]) -> Report:
    """Return a report with one finding for every number that is not the expected one."""
    faults = []
    for key, wanted in expected.items():
        found = report.facts.get(key)
        # A derivative has no release, a directory that cannot be read no layout: `none` expects that.
        shown = "none" if found is None else found
        if shown != wanted:
            problem = "is not what `--expect` asks for"
            faults.append(finding("expect.mismatch", key, problem, expected=str(wanted), found=str(shown)))
    if not expected:
        return report
    checked = (*report.checked, f"expected numbers: {', '.join(expected)}")
    merged = tuple(sorted((*faults, *report.findings), key=lambda f: f.severity))
    return replace(report, findings=merged, checked=checked)
