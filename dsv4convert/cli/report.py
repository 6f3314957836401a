"""The command `report`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dsv4convert.cli.shell import EXIT_HELP, Shell, command_options, output_file
from dsv4convert.errors import Exit, encodable, errors_of
from dsv4convert.files import printable

if TYPE_CHECKING:
    from dsv4convert.webreport.saved import Check


@click.command(epilog=EXIT_HELP)
@click.argument("dst", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The page; replaced if it exists. [default: DST's name with `-report.html`, in this directory]",
)
@click.option(
    "--reference-report",
    "saved",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    multiple=True,
    metavar="FILE.json",
    help="Show a check of DST saved by `converted --save`; repeatable.",
)
@click.option(
    "--golden",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Show what `probe` wrote. [default: DST's name with `-golden.json`, if it is in this directory]",
)
@command_options
def report(
    shell: Shell, dst: Path, output: Path | None, saved: tuple[Path, ...], golden: Path | None
) -> None:
    """Write one HTML page about the conversion in DST: what was made, lost and checked.

    Needs `pip install 'dsv4convert[report]'`. The structure is checked on the way; its errors, and those of
    saved checks, are shown on the page and fail the command.
    """
    from dsv4convert.webreport import make_page
    from dsv4convert.writer import write_bytes

    beside = Path(f"{dst.resolve().name}-golden.json")
    if golden is None and beside.is_file():
        shell.say(f"showing {beside}")
        golden = beside
    target = output_file(output or Path(f"{dst.resolve().name}-report.html"), "--output", dst)
    _spare_inputs(output or Path(target.name), (*saved, *filter(None, [golden])))
    page = make_page(dst, saved, golden)
    data = page.html.encode()
    write_bytes(target, target.parent, data)
    # A saved check repeats what the structural one finds.
    found = tuple(dict.fromkeys(f for check in page.checks for f in check.report.findings))
    errors = errors_of(found)
    if shell.json:
        result = {"ok": not errors, "file": encodable(os.fspath(target)), "bytes": len(data)}
        findings = [f.as_dict() for f in found]
        shell.data(json.dumps(result | {"findings": findings}, indent=1))
    else:
        for check in page.checks:
            shell.findings(check.report.findings, _heading(check) if saved else "")
        shell.data(f"{printable(output or target.name)}: {len(data):,} bytes; {page.overall.verdict}")
    if errors:
        raise SystemExit(Exit.FINDINGS)


def _spare_inputs(output: Path, inputs: Iterable[Path]) -> None:
    """Refuse to put the page over a file that it is made from."""
    for file in inputs:
        if file.resolve() == output.resolve():
            shown = printable(os.fspath(output))
            raise click.UsageError(f"--output: `{shown}` is what the page is to show: name another place")


def _heading(check: Check) -> str:
    if check.file is None:
        return "structure, checked now:"
    return f"saved check {printable(os.fspath(check.file))} of {printable(check.report.subject)}:"
