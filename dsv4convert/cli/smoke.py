"""The command `smoke`."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from dsv4convert.cli.shell import EXIT_HELP, Shell, command_options
from dsv4convert.errors import Exit, errors_of
from dsv4convert.files import printable

if TYPE_CHECKING:
    from dsv4convert.smoke.answers import Picture
    from dsv4convert.smoke.checks import Outcome, Suite
    from dsv4convert.smoke.suite import Smoke

#: Width of the names of checks; all are shorter.
COLUMN = 26
_MARKS = {"passed": "ok  ", "failed": "FAIL", "skipped": "skip", "not run": "-   "}


def parse_url(ctx: click.Context, parameter: click.Parameter, value: str) -> str:
    """Return the address of a server without ``/v1``."""
    from dsv4convert.smoke.server import root_of

    try:
        return root_of(value)
    except ValueError as error:
        raise click.BadParameter(f"{error}") from None


key_option = click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The key of the server, in a file that only you may read.",
)


def read_key_file(path: Path | None) -> str:
    """Return the key in a file; empty without one."""
    from dsv4convert.runtime.keys import read_key

    return read_key(path) if path else ""


def bypass_proxy(url: str) -> None:
    """Let no proxy of the environment answer for a server on this machine."""
    host = urlsplit(url).hostname or ""
    if host in ("localhost", "::1") or host.startswith("127."):
        for name in ("NO_PROXY", "no_proxy"):
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), host)))


@click.command(epilog=EXIT_HELP)
@click.argument("url", callback=parse_url)
@key_option
@click.option(
    "--golden",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Compare with the tokens that `probe` wrote there.",
)
@click.option(
    "--image",
    "images",
    type=click.Path(path_type=Path, dir_okay=False),
    multiple=True,
    metavar="FILE",
    help="A picture of the golden prompt; repeatable, in the order of `probe --image`.",
)
@click.option(
    "--suite",
    type=click.Choice(["quick", "full", "vision"]),
    default="quick",
    show_default=True,
    help="`full` adds turns, functions in all protocols, grammars, long prompts and 8 requests at once; "
    "`vision` asks about pictures instead.",
)
@click.option(
    "--only",
    multiple=True,
    metavar="PATTERN",
    help="Only the checks of the suite with such names, as `'tokens.*'`; repeatable.",
)
@click.option(
    "--tool-choice",
    type=click.Choice(["auto", "required"]),
    default="auto",
    show_default=True,
    help="What the function loop passes; `required` makes the server use a grammar.",
)
@click.option(
    "--length",
    "lengths",
    type=click.IntRange(1024, 1 << 20),
    multiple=True,
    metavar="N",
    help="Tokens of a long prompt; repeatable. [default: 8192 and 32768]",
)
@click.option(
    "--tie",
    type=click.FloatRange(0),
    metavar="NATS",
    help="Distance up to which two tokens may change places. [default: 0.25]",
)
@click.option(
    "--min-accept-length", type=click.FloatRange(1), metavar="X", help="[default: 1.5 tokens per step]"
)
@click.option(
    "--min-accept-rate", type=click.FloatRange(0, 1), metavar="X", help="[default: 0.1 of the guesses]"
)
@click.option(
    "--random-weights", is_flag=True, help="The checkpoint is synthetic: count answers, judge none of them."
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest time for one request; a first one may compile kernels.",
)
@click.option("--strict", is_flag=True, help="Let warnings fail too.")
@command_options
def smoke(
    shell: Shell,
    url: str,
    api_key_file: Path | None,
    golden: Path | None,
    images: tuple[Path, ...],
    suite: Suite,
    timeout: float,
    strict: bool,
    **terms: Any,
) -> None:
    """Ask the server at URL through the official clients, and judge what it answers.

    Every check says what it asserts; all of them run, and all findings are reported together. Needs
    `pip install 'dsv4convert[smoke]'`.
    """
    from dsv4convert.smoke.checks import Scene, Terms
    from dsv4convert.smoke.server import LIBRARIES, PICTURE_LIBRARY, open_server, require_libraries
    from dsv4convert.smoke.suite import NoSuchCheckError, run_suite

    require_libraries((*LIBRARIES, PICTURE_LIBRARY) if suite == "vision" else ())
    bypass_proxy(url)
    known = _golden(golden)
    chosen = Terms(
        suite=suite,
        only=terms["only"],
        choice=terms["tool_choice"],
        lengths=terms["lengths"] or Terms().lengths,
        tie=Terms().tie if terms["tie"] is None else terms["tie"],
        random_weights=terms["random_weights"],
        accept_length=terms["min_accept_length"],
        accept_rate=terms["min_accept_rate"],
        golden=known,
        shown=_shown(images, known),
        number=secrets.randbelow(1 << 24),
    )
    key = read_key_file(api_key_file)
    with open_server(url, key, timeout) as server, Scene.of(server, chosen) as scene:
        shell.say(f"{url}: {printable(server.model)}, suite {suite}")
        try:
            found = run_suite(scene, lambda outcome: shell.say(_line(outcome)))
        except NoSuchCheckError as error:
            raise click.BadParameter(str(error), param_hint="--only") from None
    if shell.json:
        shell.data(json.dumps(found.as_dict(strict=strict), indent=1))
    else:
        shell.findings(found.findings)
        for line in _lines(found, strict):
            shell.data(line)
    if found.lost:
        raise SystemExit(int(Exit.ENVIRONMENT))
    raise SystemExit(int(Exit.CLEAN if found.ok(strict=strict) else Exit.FINDINGS))


def _golden(path: Path | None) -> dict[str, Any] | None:
    from dsv4convert.golden import read_golden

    return read_golden(path) if path else None


def _shown(images: tuple[Path, ...], golden: dict[str, Any] | None) -> tuple[Picture, ...]:
    from dsv4convert.smoke.shown import read_shown

    if images and golden is None:
        raise click.UsageError("--image needs --golden: it gives the pictures of the golden prompt")
    return read_shown(images, golden) if images and golden else ()


def _line(outcome: Outcome) -> str:
    return f"  {_MARKS[outcome.state]}  {outcome.name:<{COLUMN}}{outcome.seconds:>7.1f} s"


def _lines(found: Smoke, strict: bool) -> Iterator[str]:
    server = found.server
    version = server.info.get("version")
    shown = f", SGLang {printable(version, 40)}" if version else ""
    yield f"{server.url}: {printable(server.model)}{shown}, suite {found.suite}"
    for outcome in found.outcomes:
        yield f"  {_MARKS[outcome.state]}  {outcome.name:<{COLUMN}}{outcome.reason or outcome.asserts}"
    for line in found.not_checked:
        yield f"  NOT checked  {line}"
    counts = found.counts()
    errors = len(errors_of(found.findings))
    warnings = len(found.findings) - errors
    states = ", ".join(f"{counts[state]} {state}" for state in _MARKS if counts[state])
    verdict = "passed" if found.ok(strict=strict) else "FAILED"
    yield f"{verdict}: {states}; {errors} errors, {warnings} warnings"
