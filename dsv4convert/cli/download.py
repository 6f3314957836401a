"""What `original` does beside looking at headers: its options, and the way from them to a report."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dsv4convert.cli.progress import LazyProgress
from dsv4convert.cli.shell import Shell
from dsv4convert.validate.report import Report

_OPTIONS = (
    click.option(
        "--checksums",
        metavar="auto|FILE|none",
        default="none",
        show_default=True,
        help="Hash every file and compare: with all lists that can be found, or with FILE "
        "(`sha256sum` output or JSON).",
    ),
    click.option("--online", is_flag=True, help="Ask the Hub for names, sizes and hashes of the commit."),
    click.option(
        "--repo",
        metavar="REPO[@COMMIT]",
        help="Repository to ask and to fetch from. [default: as the download says]",
    ),
    click.option(
        "--read-data",
        is_flag=False,
        flag_value="100",
        type=click.FloatRange(0, 100, min_open=True),
        metavar="[PERCENT]",
        help="Look at the values of weights too: NaN codes, scales, holes, expert ids.",
    ),
    click.option("--no-cache", is_flag=True, help="Hash again what an earlier run has hashed."),
    click.option(
        "--jobs",
        type=click.IntRange(1, 256),
        default=None,
        help="Threads for --checksums, processes for --read-data. [default: one per core]",
    ),
)


def contents_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say how far contents are checked."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def check_download(
    shell: Shell,
    src: Path,
    *,
    checksums: str,
    online: bool,
    repo: str | None,
    read_data: float | None,
    no_cache: bool,
    jobs: int | None,
) -> Report:
    """Check a download as far as the options say."""
    from dsv4convert.checkpoint import open_checkpoint
    from dsv4convert.validate import Contents, verify_original

    options = Contents(
        checksums=None if checksums == "none" else checksums,
        online=online,
        repo=repo,
        read_data=read_data,
        jobs=jobs or len(os.sched_getaffinity(0)),
        remember=not no_cache,
    )
    with LazyProgress("reading", shell.quiet) as bar:
        return verify_original(open_checkpoint(src), options, on_total=bar.begin, progress=bar)
