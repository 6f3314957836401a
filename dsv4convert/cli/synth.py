"""The command `synth`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from dsv4convert.cli.commands import directory
from dsv4convert.cli.progress import gigabytes, progress
from dsv4convert.cli.shell import EXIT_HELP, Shell, command_options
from dsv4convert.releases import RELEASES


@click.command(epilog=EXIT_HELP)
@directory("directory")
@click.option(
    "--release",
    type=click.Choice(list(RELEASES)),
    default="deepseek-v4-flash-0731",
    show_default=True,
    help="Whose names and shapes.",
)
@click.option(
    "--scale",
    type=click.Choice(["tiny", "served", "slice", "full"]),
    default="tiny",
    show_default=True,
    help="Everything small; the smallest that SGLang takes; true shapes but few layers; or everything, as "
    "sparse files.",
)
@click.option("--layers", type=click.IntRange(3, 1024), default=None, help="Trunk layers (not full).")
@click.option(
    "--experts", type=click.IntRange(2, 4096), default=None, help="Routed experts per layer (not full)."
)
@click.option("--vocab", type=click.IntRange(16, 1 << 24), default=None, help="Vocabulary (not full).")
@click.option(
    "--intermediate",
    type=click.IntRange(32, 1 << 16),
    default=None,
    help="Intermediate size of an expert, a multiple of 32 (not full).",
)
@click.option("--ragged", is_flag=True, help="Tiny only: sides that end in partial blocks and groups.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the values.")
@command_options
def synth(
    shell: Shell,
    directory: Path,
    release: str,
    scale: str,
    layers: int | None,
    experts: int | None,
    vocab: int | None,
    intermediate: int | None,
    ragged: bool,
    seed: int,
) -> None:
    """Write a synthetic checkpoint into DIRECTORY: for tests, demos and rehearsals."""
    from dsv4convert.synth import Recipe, data_bytes, disk_usage, synthesize

    if ragged and scale != "tiny":
        raise click.UsageError("--ragged goes with --scale tiny")
    if scale == "full" and (layers or experts or vocab or intermediate):
        raise click.UsageError("--layers, --experts, --vocab and --intermediate do not go with --scale full")
    sizes = layers or 0, experts or 0, vocab or 0
    try:
        recipe = Recipe(release, scale, *sizes, ragged, seed, intermediate or 0)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--intermediate") from None
    with progress("writing", data_bytes(recipe), quiet=shell.quiet) as bar:
        size = synthesize(directory, recipe, bar)
    used = disk_usage(directory)
    result = {"ok": True, "directory": os.fspath(directory), "file_bytes": size, "disk_bytes": used}
    text = f"{directory}: {scale} {release}, {size:,} bytes in shards, {gigabytes(used)} on disk"
    shell.data(json.dumps(result, indent=1) if shell.json else text)
