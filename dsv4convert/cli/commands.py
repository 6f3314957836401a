"""The commands: parse, call the library, print, exit."""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from dsv4convert.cli import pages
from dsv4convert.cli.download import check_download, contents_options
from dsv4convert.cli.expect import expect_option, with_expectations
from dsv4convert.cli.limits import device_option, limit_options
from dsv4convert.cli.memory import memory_options
from dsv4convert.cli.progress import LazyProgress, gigabytes, progress
from dsv4convert.cli.shell import (
    EXIT_HELP,
    Commands,
    Shell,
    command_options,
    output_file,
    version_block,
)
from dsv4convert.errors import Exit, errors_of
from dsv4convert.memory import Demand
from dsv4convert.names import Layout

_SETTINGS = {"help_option_names": ["-h", "--help"]}
_LAYOUTS = click.Choice([Layout.INT8.value, Layout.MXFP4.value])


def _show_version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        click.echo(version_block())
        ctx.exit()


@click.group(cls=Commands, context_settings=_SETTINGS, epilog=EXIT_HELP)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Print the versions that a bug report needs.",
)
def main() -> None:
    """Validate, convert and prove DeepSeek-V4 checkpoints for SM80 GPUs (A100, A800)."""


class _Directory(click.Path):
    """A path that was really given: an unset variable of a script must not mean the current directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty", param, ctx)
        return super().convert(value, param, ctx)


def directory(name: str) -> Callable[..., Any]:
    """Add an argument that names a directory."""
    return click.argument(name, type=_Directory(path_type=Path))


_experts = click.option(
    "--experts",
    type=_LAYOUTS,
    default=Layout.INT8.value,
    show_default=True,
    help="What becomes of the routed experts: INT8-ready codes with shifts, or MXFP4 as they are.",
)
_strict = click.option("--strict", is_flag=True, help="Let warnings fail too.")


def _jobs(purpose: str) -> Callable[..., Any]:
    return click.option(
        "--jobs", type=click.IntRange(1, 256), default=None, help=f"{purpose} [default: by cores]"
    )


def _default_jobs(jobs: int | None) -> int:
    # Each job keeps two cores busy (transform and write); more than eight outrun the disks.
    return jobs or max(1, min(8, len(os.sched_getaffinity(0)) // 2))


@main.command(epilog=EXIT_HELP)
@directory("path")
@click.option(
    "--tensors",
    is_flag=False,
    flag_value="*",
    metavar="[GLOB]",
    help="List the tensors, or those that match.",
)
@command_options
def inspect(shell: Shell, path: Path, tensors: str | None) -> None:
    """Say what the checkpoint in PATH is: release, layout, families of tensors."""
    from dsv4convert.checkpoint import open_checkpoint
    from dsv4convert.survey import survey

    seen = survey(open_checkpoint(path))
    chosen = None
    if tensors is not None:
        chosen = [t for n, t in seen.checkpoint.tensors.items() if fnmatch.fnmatchcase(n, tensors)]
    if shell.json:
        shell.data(json.dumps(pages.inspect_json(seen, chosen), indent=1))
    else:
        for line in pages.tensor_lines(chosen) if chosen is not None else pages.inspect_lines(seen):
            shell.data(line)
    if chosen == []:
        shell.say(f"no tensor has a name like `{tensors}`")
    errors = errors_of(seen.findings)
    if errors:
        number = f"{len(errors):,} error{'s' if len(errors) > 1 else ''}"
        shell.say(f"{number}; `dsv4convert original` shows {'them' if len(errors) > 1 else 'it'}")
        raise SystemExit(Exit.FINDINGS)


@main.command(epilog=EXIT_HELP)
@directory("src")
@contents_options
@expect_option
@_strict
@command_options
def original(shell: Shell, src: Path, expect: Mapping[str, int | str], strict: bool, **contents: Any) -> None:
    """Validate a downloaded official checkpoint in SRC: structure; contents and values on request.

    Without --checksums a file with the right headers passes, whatever its other bytes are.
    """
    shell.report(with_expectations(check_download(shell, src, **contents), expect), strict)


@main.command(epilog=EXIT_HELP)
@directory("src")
@_experts
@click.option(
    "--tp",
    type=click.IntRange(1, 1024),
    multiple=True,
    help="Tensor-parallel size to check and to budget; repeatable. [default: show 4 and 8]",
)
@click.option(
    "--dst",
    type=click.Path(path_type=Path),
    help="Measure the write speed there (256 MiB, removed) and check the room.",
)
@click.option("--steps", is_flag=True, help="With --json: add one object per output tensor.")
@_jobs("Processes the estimate assumes.")
@memory_options
@command_options
def plan(
    shell: Shell,
    src: Path,
    experts: str,
    tp: tuple[int, ...],
    dst: Path | None,
    steps: bool,
    jobs: int | None,
    demand: Demand,
) -> None:
    """Show every decision and every total of a conversion of SRC, without writing anything."""
    from dsv4convert.checkpoint import open_checkpoint
    from dsv4convert.cli.shell import fail
    from dsv4convert.handoff import split_findings
    from dsv4convert.journal import destination_findings
    from dsv4convert.plan import plan as make_plan
    from dsv4convert.survey import survey
    from dsv4convert.writer import measure_write_speed

    seen = survey(open_checkpoint(src))
    if errors_of(seen.findings):
        fail(shell, seen.findings, Exit.FINDINGS)
    made = make_plan(seen, experts)
    occupied = destination_findings(dst, seen.checkpoint.root, made) if dst else ()
    speed = measure_write_speed(dst) if dst and not occupied else None
    budget = pages.Budget.of(seen, made, tp, demand, dst, speed, _default_jobs(jobs))
    faults = [f for size in tp if seen.geometry for f in split_findings(seen.geometry, made.layout, size)]
    faults += (*occupied, *budget.findings(made))
    if shell.json:
        verdict = {"ok": not faults, "findings": [f.as_dict() for f in (*seen.findings, *faults)]}
        page = verdict | made.as_dict(steps=steps) | budget.as_dict()
        shell.data(json.dumps(page, indent=None if steps else 1))
    else:
        for line in pages.plan_lines(made, budget):
            shell.data(line)
        shell.findings([*seen.findings, *faults])
    if faults:
        raise SystemExit(Exit.FINDINGS)


@main.command(epilog=EXIT_HELP)
@directory("src")
@directory("dst")
@_experts
@_jobs("Worker processes.")
@click.option(
    "--shards",
    metavar="I/N",
    help="Convert only every N-th shard, from the I-th (0 to N-1) on; close with `finalize`.",
)
@click.option(
    "--consume",
    is_flag=True,
    help="DELETE each shard of SRC once what was made of it has been read back. Cannot be undone.",
)
@device_option
@limit_options
@command_options
def convert(
    shell: Shell,
    src: Path,
    dst: Path,
    experts: str,
    jobs: int | None,
    shards: str | None,
    consume: bool,
    device: str,
    allow_rounding: bool,
    max_relative_error: float | None,
    min_exact: float | None,
) -> None:
    """Convert SRC into DST, shard by shard; the same command continues after any interruption.

    SRC is an official checkpoint or an mxfp4 output. DST must be empty, absent, or an interrupted conversion.
    """
    from dsv4convert.convert import Result
    from dsv4convert.convert import convert as run_convert
    from dsv4convert.limits import Limits
    from dsv4convert.plan import Plan

    limits = Limits(allow_rounding, max_relative_error, min_exact)
    part = _parse_part(shards)
    if consume and part:
        raise click.UsageError("--consume does not go with --shards: other jobs may need a shard")

    def begin(made: Plan, todo: int) -> None:
        shell.say(f"{made.title}: {made.source_layout.value} -> {made.layout.value}, plan {made.digest[:12]}")
        shell.say(
            f"{gigabytes(todo)} to read, {len(made.shards):,} shards, {made.tensors:,} tensors to write"
        )

    with LazyProgress("converting", shell.quiet) as bar:

        def planned(made: Plan, todo: int) -> None:
            begin(made, todo)
            bar.begin(todo)

        result: Result = run_convert(
            src,
            dst,
            experts=experts,
            jobs=_default_jobs(jobs),
            part=part,
            limits=limits,
            progress=bar,
            on_plan=planned,
            consume=consume,
            device=device,
        )
    _show_result(shell, result, dst, src)


@main.command(epilog=EXIT_HELP)
@directory("dst")
@click.option("--source", type=click.Path(path_type=Path), help="The source, if it moved since.")
@limit_options
@command_options
def finalize(
    shell: Shell,
    dst: Path,
    source: Path | None,
    allow_rounding: bool,
    max_relative_error: float | None,
    min_exact: float | None,
) -> None:
    """Close a conversion in DST whose shards were made by several `convert --shards` jobs."""
    from dsv4convert.convert import finalize as run_finalize
    from dsv4convert.limits import Limits

    result = run_finalize(dst, source, Limits(allow_rounding, max_relative_error, min_exact))
    if result is None:
        already = {"ok": True, "complete": True, "destination": os.fspath(dst)}
        shell.data(json.dumps(already, indent=1) if shell.json else f"{dst}: was complete before")
        return
    _show_result(shell, result, dst, source)


@main.command(epilog=EXIT_HELP)
@directory("dst")
@click.option("--reference", type=click.Path(path_type=Path), help="The checkpoint that was converted.")
@click.option(
    "--read-data",
    is_flag=False,
    flag_value="100",
    type=click.FloatRange(0, 100, min_open=True),
    metavar="[PERCENT]",
    help="Read tensors too: recompute from the reference, or compare hashes without one.",
)
@click.option(
    "--tp", type=click.IntRange(1, 1024), help="Tensor-parallel size whose splits must fall on block borders."
)
@click.option(
    "--save",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.json",
    help="Write the JSON form there, too: `report --reference-report` shows it.",
)
@expect_option
@_jobs("Worker processes for --read-data.")
@_strict
@command_options
def converted(
    shell: Shell,
    dst: Path,
    reference: Path | None,
    read_data: float | None,
    tp: int | None,
    save: Path | None,
    expect: Mapping[str, int | str],
    jobs: int | None,
    strict: bool,
) -> None:
    """Validate a converted checkpoint in DST: structure, config, manifest; contents on request."""
    from dsv4convert.checkpoint import open_checkpoint
    from dsv4convert.validate import verify_converted
    from dsv4convert.writer import write_bytes

    target = output_file(save, "--save", dst, reference) if save else None
    checkpoint = open_checkpoint(dst)
    total = sum(t.nbytes for t in checkpoint.tensors.values())
    quiet = shell.quiet or read_data is None
    # A sample takes at least one weight of every kind from every shard: its size is not known beforehand.
    with progress("comparing", total if read_data == 100 else 0, quiet=quiet) as bar:
        report = verify_converted(
            checkpoint,
            reference=reference,
            read_data=read_data,
            tp=tp,
            jobs=_default_jobs(jobs),
            progress=bar,
        )
    report = with_expectations(report, expect)
    if target:
        text = json.dumps(report.as_dict(strict=strict), indent=1) + "\n"
        write_bytes(target, target.parent, text.encode())
    shell.report(report, strict)


def _parse_part(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    index, slash, count = text.partition("/")
    if slash and index.isdecimal() and count.isdecimal() and int(index) < int(count):
        return int(index), int(count)
    raise click.BadParameter(f"expected I/N with I from 0 to N-1, got {text!r}", param_hint="--shards")


def _show_result(shell: Shell, result: Any, dst: Path, source: Path | None) -> None:
    if shell.json:
        shell.data(json.dumps(pages.result_json(result, dst), indent=1))
        return
    for line in pages.result_lines(result, dst, source):
        shell.data(line)
