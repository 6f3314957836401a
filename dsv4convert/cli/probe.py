"""The command `probe`."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsv4convert.cli.progress import duration, gigabytes
from dsv4convert.cli.shell import EXIT_HELP, Shell, command_options, output_file
from dsv4convert.errors import Exit, encodable
from dsv4convert.files import printable

if TYPE_CHECKING:
    from dsv4convert.probe import Probed, Tick

_EVERY_SECONDS = 10.0
_IDS_SHOWN = 12
_PARTS = ("attention", "routed", "shared", "streams")


def _parse_ids(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and part.isascii() for part in parts):
        raise click.BadParameter(f"expected token ids separated by commas, got {value!r}")
    # More digits than any id has: refused as an id outside the vocabulary.
    return tuple(int((part.lstrip("0") or "0")[:19]) for part in parts)


@click.command(epilog=EXIT_HELP)
@click.argument("dst", type=click.Path(path_type=Path))
@click.option("--prompt", metavar="TEXT", help="Text, encoded by the checkpoint's `tokenizer.json`.")
@click.option("--ids", callback=_parse_ids, metavar="1,2,3", help="Token ids instead of text.")
@click.option(
    "--image",
    "images",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="Show a picture to a Vision checkpoint, before TEXT or at its `<｜deepseek_image｜>`; repeatable.",
)
@click.option("--chat", is_flag=True, help="Wrap TEXT as one user turn, answered without thinking.")
@click.option(
    "--tokens",
    type=click.IntRange(1, 4096),
    default=8,
    show_default=True,
    help="Tokens to generate, the most probable one each time.",
)
@click.option(
    "--top", type=click.IntRange(1, 1000), default=5, show_default=True, help="Probable tokens to note."
)
@click.option(
    "--numerics",
    type=click.Choice(["exact", "bf16", "sm80", "official"]),
    default="exact",
    show_default=True,
    help="What is rounded: nothing below FP32, or as BF16, as the SM80 runtime, as DeepSeek's own code does.",
)
@click.option(
    "--reference",
    type=click.Path(path_type=Path),
    metavar="SRC",
    help="Run SRC, the same model in any layout, beside it and compare every layer.",
)
@click.option(
    "--draft",
    is_flag=True,
    help="Run the draft layers behind every generated token too, and count their right guesses.",
)
@click.option(
    "--golden",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where prompt, tokens and margins go. [default: DST's name with `-golden.json`, in this directory]",
)
@command_options
def probe(shell: Shell, dst: Path, golden: Path | None, reference: Path | None, **question: Any) -> None:
    """Run the checkpoint in DST on this CPU and say which tokens follow a prompt.

    DST may have any layout. Layers are read one at a time, so memory stays small. Text and pictures need
    `pip install 'dsv4convert[probe]'`.
    """
    if (question["prompt"] is None) == (question["ids"] is None):
        raise click.UsageError("pass either --prompt or --ids")
    if question["chat"] and question["prompt"] is None:
        raise click.UsageError("--chat goes with --prompt")
    if reference is not None and reference.resolve() == dst.resolve():
        raise click.UsageError("--reference is DST itself: name the checkpoint it was made from")
    place = golden or Path(f"{dst.resolve().name}-golden.json")
    target = output_file(place, "--golden", dst, reference)
    from dsv4convert.probe import probe as run_probe

    with _Layers(shell.quiet) as layers:
        probed = run_probe(dst, reference=reference, progress=layers, **question)
    if not shell.json:
        # Before anything is written: an answer took time, and a full disk must not take it away.
        shell.findings(probed.findings)
        for line in _lines(probed, shell.verbose):
            shell.data(line)
    old = _keep_golden(probed, target)
    if shell.json:
        file = encodable(os.fspath(target)) if probed.ok() else None
        shell.data(json.dumps(probed.as_dict() | {"golden_file": file}, indent=1))
    else:
        shell.data(_verdict(probed, printable(golden or target.name), old))
    if not probed.ok():
        raise SystemExit(Exit.FINDINGS)


def _keep_golden(probed: Probed, target: Path) -> Path | None:
    """Write the golden file, or, if the checkpoint is not what it should be, set an older one aside.

    Returns:
        Where the older one is now. It speaks for weights that have changed since, so nobody may find it.
    """
    from dsv4convert.golden import encode_golden
    from dsv4convert.writer import write_bytes

    if probed.ok():
        write_bytes(target, target.parent, encode_golden(probed.golden))
        return None
    if not target.exists():
        return None
    return target.rename(target.with_name(f"{target.name}.old"))


def _verdict(probed: Probed, shown: str, old: Path | None) -> str:
    if not probed.ok():
        count = len(probed.findings)
        aside = f"; an older one is now {printable(old.name)}" if old else ""
        return f"FAILED: {count:,} finding{'s' if count > 1 else ''}; no golden file was written{aside}"
    agreement = probed.golden["agreement"]
    if agreement is None:
        count = len(probed.golden["steps"])
        return f"{shown}: {count:,} token{'s' if count > 1 else ''}; compared with nothing"
    owed = {
        "equal": "bit-equal to",
        "repacked": "equal up to the repack of its experts to",
        "rounded": "as close as its arithmetic allows to"
        if agreement["limit"]
        else "compared, not judged, with",
    }
    return f"{shown}: {owed[agreement['expectation']]} {printable(agreement['reference']['name'])}"


def _lines(probed: Probed, verbose: bool) -> Iterator[str]:
    golden = probed.golden
    checkpoint, prompt = golden["checkpoint"], golden["prompt"]
    layout = f"layout {checkpoint['layout']}, numerics {golden['numerics']}"
    yield f"{printable(checkpoint['name'])}: {checkpoint['title']}, {layout}"
    shown = ", ".join(map(str, prompt["ids"][:_IDS_SHOWN]))
    more = ", …" if len(prompt["ids"]) > _IDS_SHOWN else ""
    yield f"  prompt     {len(prompt['ids']):,} tokens: {shown}{more}"
    for picture in prompt["pictures"]:
        place = f"{picture['positions']:,} positions from {picture['start']:,}"
        size = f"{picture['width']:,} x {picture['height']:,}"
        yield f"  picture    {picture['file']}, {size}: {place}"
    yield f"  {'token':>8}  {'probability':>11}  {'margin':>8}  text"
    for step in golden["steps"]:
        best = step["top"][0]
        yield f"  {step['token']:>8}  {_share(best['logprob']):>11}  {step['margin']:>8.3g}  {_text(best)}"
        if verbose:
            others = (
                f"{row['token']} {_share(row['logprob'])} {_text(row)}".rstrip() for row in step["top"][1:]
            )
            yield f"  {'':>8}  then {', '.join(others)}"
    if golden["text"] is not None:
        yield f"  answer     {_quoted(golden['text'])}"
    if golden["agreement"]:
        yield from _agreement_lines(golden["agreement"])
    if golden["draft"]:
        yield from _draft_lines(golden["draft"])
    yield from _cost_lines(probed, verbose)


def _share(logprob: float) -> str:
    return f"{math.exp(logprob):.4f}"


def _text(row: Mapping[str, Any]) -> str:
    return "" if row["text"] is None else _quoted(row["text"])


def _quoted(text: str) -> str:
    # JSON leaves marks that change the direction of writing as they are.
    return printable(json.dumps(text, ensure_ascii=False), 4096)


def _agreement_lines(agreement: Mapping[str, Any]) -> Iterator[str]:
    reference = agreement["reference"]
    yield f"  reference  {printable(reference['name'])}, layout {reference['layout']}, numerics exact"
    heads = "".join(f"{part:>11}" for part in _PARTS) + f"{'same experts':>14}{'same entries':>14}"
    yield f"  {'layer':<11}{heads}"
    for row in agreement["layers"]:
        errors = "".join(f"{_error(row[key]):>11}" for key in _PARTS)
        picked = "-" if row["picked"] is None else f"{row['picked']:.2%}"
        yield f"  {row['layer']:<11}{errors}{row['chosen']:>14.2%}{picked:>14}"
    yield f"  {'logits':<11}{'':>33}{_error(agreement['logits']):>11}"
    count = len(agreement["tokens"])
    equal = agreement["equal_tokens"]
    parted = f"; the reference went another way after token {equal}" if equal < count else ""
    yield f"  tokens     {equal} of {count} equal to the reference's{parted}"
    if agreement["limit"]:
        yield f"  limit      {agreement['limit']:g}, with the reference's decisions"


def _draft_lines(draft: Mapping[str, Any]) -> Iterator[str]:
    guesses = f"{draft['depth']} guesses behind each of {draft['starts']:,} tokens"
    yield f"  draft      {guesses}: {draft['length']:.2f} of {draft['depth'] + 1} tokens a step expected"
    yield f"  {'':<11}right up to guess 1, 2, ...: {', '.join(f'{share:.0%}' for share in draft['shares'])}"
    if draft["reference_error"] is not None:
        yield f"  {'':<11}beside the reference's: {_error(draft['reference_error'])}"


def _error(value: float) -> str:
    return f"{value:.1e}" if value else "equal"


def _cost_lines(probed: Probed, verbose: bool) -> Iterator[str]:
    seconds = probed.layer_seconds
    each = f"{sum(seconds) / len(seconds):.2f} s each"
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    text = f"{len(seconds)} layers over the prompt, {each}, the slowest {seconds[slowest]:.2f} s"
    if probed.token_seconds:
        text += f"; {sum(probed.token_seconds) / len(probed.token_seconds):.2f} s for each further token"
    yield f"  time       {text}"
    if probed.picture_seconds:
        looks = probed.picture_seconds
        count = f"{len(looks)} picture{'s' if len(looks) > 1 else ''}"
        yield f"             {count} through the vision tower, {sum(looks) / len(looks):.1f} s each"
    if verbose:
        yield from (f"             layers.{i:<5}{s:>8.2f} s" for i, s in enumerate(seconds))
    if probed.peak_bytes:
        yield f"  memory     {gigabytes(probed.peak_bytes)} at most"


class _Layers:
    """Shows layers as they are done: a bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._bar: Any = None
        self._start = time.monotonic()
        self._next = self._start + _EVERY_SECONDS

    def __enter__(self) -> _Layers:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, tick: Tick) -> None:
        if self._quiet:
            return
        if sys.stderr.isatty():
            self._show_bar(tick)
            return
        now = time.monotonic()
        if not tick.done:
            self._start = now  # The vision tower comes before all layers and tells nothing about their time.
        if now >= self._next:
            self._next = now + _EVERY_SECONDS
            if not tick.done:
                print(f"probing: {tick.layer}: {tick.seconds:.1f} s", file=sys.stderr, flush=True)
                return
            left = duration((now - self._start) / tick.done * (tick.total - tick.done))
            done = f"{tick.layer}: {tick.seconds:.1f} s, {tick.done:,} of {tick.total:,} layers"
            print(f"probing: {done}, {left} left at most", file=sys.stderr, flush=True)

    def _show_bar(self, tick: Tick) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=tick.total, desc="probing", unit="layer", delay=1, dynamic_ncols=True)
        self._bar.set_postfix_str(f"{tick.layer} {tick.seconds:.1f} s", refresh=False)
        self._bar.update(tick.done - self._bar.n)
