"""One self-contained HTML page about a conversion: what was made, what it cost, what was checked.

The page loads nothing and runs nothing. Its numbers come from the manifest and say so; the same checkpoint
and the same saved checks give the same page, which therefore carries no date but those of the checks.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from dsv4convert.checkpoint import open_checkpoint
from dsv4convert.errors import EnvironmentFault, Refused, finding
from dsv4convert.journal import MANIFEST
from dsv4convert.survey import survey
from dsv4convert.validate.provenance import read_manifest
from dsv4convert.validate.structure import check_converted
from dsv4convert.webreport.saved import Check, overall, read_saved

# With one of these there is no finished conversion of ours to report on.
_NOTHING_THERE = ("dst.unfinished", "dst.not-converted", "manifest.not-json", "dir.no-weights")


class Page(NamedTuple):
    """The page, the checks on it (first the structural one made for it), and the one that its head quotes."""

    html: str
    checks: tuple[Check, ...]
    overall: Check


def make_page(path: str | os.PathLike[str], saved: Iterable[Path] = (), golden: Path | None = None) -> Page:
    """Check the structure of a conversion and make the page about it.

    Args:
        path: A checkpoint that `convert` has finished.
        saved: Files that ``converted --save`` wrote about the same checkpoint.
        golden: A file that `probe` wrote about it.

    Raises:
        Refused: it is no finished conversion of this tool, or one of the files is about something else.
        EnvironmentFault: a library is missing, or reading failed.
    """
    _require_libraries()
    from dsv4convert.webreport.answers import read_answers
    from dsv4convert.webreport.cited import Manifest
    from dsv4convert.webreport.facts import read_facts
    from dsv4convert.webreport.page import render_page

    checkpoint = open_checkpoint(path)
    report = check_converted(checkpoint)
    nothing = [f for f in report.findings if f.code in _NOTHING_THERE]
    if nothing:
        raise Refused(nothing)
    tree, _ = read_manifest(checkpoint.root)
    if tree is None:
        problem = "not there: a report shows what the conversion recorded"
        raise Refused(finding("report.no-manifest", MANIFEST, problem))
    facts = read_facts(Manifest(tree))
    checks = (Check(report), *(read_saved(file, report) for file in saved))
    answers = read_answers(golden, survey(checkpoint)) if golden else None
    html = render_page(checkpoint.root.name, facts, checks, answers)
    return Page(html, checks, overall(checks))


def _require_libraries() -> None:
    missing = [name for name in ("jinja2", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        hint = "pip install 'dsv4convert[report]'"
        raise EnvironmentFault(
            [
                finding("env.missing", name, "is not installed; pages are made with it", hint=hint)
                for name in missing
            ]
        )
