"""The commands `preflight`, `serve` and `keygen`."""

from __future__ import annotations

import functools
import json
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsv4convert.cli.commands import directory
from dsv4convert.cli.progress import gib
from dsv4convert.cli.shell import EXIT_HELP, Shell, command_options, fail
from dsv4convert.errors import EnvironmentFault, Exit, Finding, Refused, errors_of, finding
from dsv4convert.memory import Demand

if TYPE_CHECKING:
    from dsv4convert.runtime.launch import Launch
    from dsv4convert.runtime.preflight import Preflight
    from dsv4convert.runtime.supervise import Outcome

_PREFLIGHT_EXITS = """\b
Exit status:
  0  ready to serve
  1  findings: something is in the way
  2  usage
  4  environment or I/O: running the same command again is safe
  5  internal error"""
_SERVE_EXITS = """\b
Exit status:
  0  shown, with --dry-run
  2  usage, for instance an argument of SGLang that is not free
  3  refused: the preflight found errors, or a guard failed and the server was ended
  4  the server ended by itself, or was not ready in time
  5  internal error
  129, 130, 143  stopped by SIGHUP, SIGINT, SIGTERM"""

_LAUNCH_OPTIONS = (
    click.option(
        "--tp", type=click.IntRange(1, 64), default=4, show_default=True, help="GPUs to split over."
    ),
    click.option("--dspark", is_flag=True, help="Speculate with the DSpark draft of the checkpoint."),
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
    click.option("--port", type=click.IntRange(1, 65535), default=30000, show_default=True, help="TCP port."),
    click.option(
        "--api-key-file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Ask clients for the key in FILE, which only you may read; `keygen` makes one.",
    ),
    click.option("--context", type=click.IntRange(1), metavar="N", help="Longest request in tokens."),
    click.option("--concurrency", type=click.IntRange(1, 65536), metavar="M", help="Requests at once."),
    click.option(
        "--mem-fraction-static",
        type=click.FloatRange(0, 1, min_open=True, max_open=True),
        metavar="F",
        default=Demand().fraction,
        show_default=True,
        help="Share of the card for weights and KV pools.",
    ),
    click.option(
        "--moe-backend",
        type=click.Choice(["ours", "marlin", "humming"]),
        default="ours",
        show_default=True,
        help="Kernels of the routed experts; the others are SGLang's, for comparison, and need `mxfp4`.",
    ),
    click.option(
        "--parallel-indexer",
        is_flag=True,
        help="In a long prefill, let each GPU select keys for its share of the tokens only.",
    ),
    click.option(
        "--limit-images",
        type=click.IntRange(1, 10_000),
        metavar="N",
        default=96,
        show_default=True,
        help="Pictures of a request, for Vision-Exp.",
    ),
    click.option(
        "--whole-prompts",
        is_flag=True,
        help="Prefill every prompt in one step and keep no prefixes; limits the context.",
    ),
    click.option(
        "--allow-arch",
        type=click.IntRange(80, 200),
        multiple=True,
        metavar="80|90|...",
        help="Accept cards of another compute capability too, for tests; repeatable.",
    ),
)


def _launch_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say what is served and how; the command receives a `Launch`."""

    @functools.wraps(function)
    def wrapper(
        *args: Any,
        dst: Path,
        tp: int,
        dspark: bool,
        host: str,
        port: int,
        api_key_file: Path | None,
        context: int | None,
        concurrency: int | None,
        mem_fraction_static: float,
        moe_backend: str,
        parallel_indexer: bool,
        limit_images: int,
        whole_prompts: bool,
        allow_arch: tuple[int, ...],
        extra: tuple[str, ...] = (),
        **rest: Any,
    ) -> None:
        from dsv4convert.runtime.launch import Launch

        _require_own(extra)
        if whole_prompts:
            _require_no_steps(extra)
        demand = Demand(context, concurrency, mem_fraction_static, draft=dspark)
        server = dst, tp, dspark, host, port, api_key_file, demand
        launch = Launch(*server, moe_backend, extra, parallel_indexer, limit_images, whole_prompts)
        function(*args, launch=launch, arch=(80, *allow_arch), **rest)

    wrapped: Callable[..., None] = wrapper
    for option in reversed(_LAUNCH_OPTIONS):
        wrapped = option(wrapped)
    wrapped = directory("dst")(wrapped)
    return wrapped


def _require_own(extra: tuple[str, ...]) -> None:
    from dsv4convert.runtime.launch import contradictions, faulty_values

    if extra and not extra[0].startswith("-"):
        raise click.UsageError(f"unexpected argument {extra[0]!r}; SGLang's own arguments come after `--`")
    found = (*contradictions(extra), *faulty_values(extra))
    if found:
        faults = "\n  ".join(f"{name}: {reason}" for name, reason in found)
        raise click.UsageError(f"these arguments of SGLang cannot be passed on:\n  {faults}")


def _require_no_steps(extra: tuple[str, ...]) -> None:
    from dsv4convert.runtime.launch import CHUNK, number_of

    steps = number_of(extra, CHUNK)
    if steps not in (None, -1):
        raise click.UsageError(f"--whole-prompts contradicts {CHUNK} {steps}: leave one out")


@click.command(epilog=_PREFLIGHT_EXITS)
@_launch_options
@click.option("--strict", is_flag=True, help="Let warnings fail too.")
@command_options
def preflight(shell: Shell, launch: Launch, arch: tuple[int, ...], strict: bool) -> None:
    """Check whether this machine can serve the converted checkpoint in DST: seconds, no model is loaded.

    Takes the options of `serve`. All failures are reported together, each with what to do about it.
    """
    from dsv4convert.runtime.preflight import preflight as check

    found = check(launch, os.environ, arch)
    if shell.json:
        shell.data(json.dumps(found.as_dict(strict=strict), indent=1))
    else:
        shell.findings(found.findings)
        for line in _preflight_lines(found, strict):
            shell.data(line)
    raise SystemExit(int(Exit.CLEAN if found.ok(strict=strict) else Exit.FINDINGS))


def _preflight_lines(found: Preflight, strict: bool) -> Iterator[str]:
    facts = found.facts
    yield f"{found.subject}: {found.title}"
    if "checkpoint" in facts:
        layout, packing = facts["checkpoint"]["layout"], facts["checkpoint"]["packing"]
        yield f"  experts      {layout or 'unknown'}{f', packing {packing}' if packing else ''}"
    if facts.get("sglang", {}).get("path"):
        sglang = facts["sglang"]
        commit = f", commit {sglang['commit'][:12]}" if sglang["commit"] else ""
        yield f"  SGLang       {sglang['version'] or 'unknown version'}{commit} in {sglang['path']}"
        others = [f"{name} {version}" for name, version in sglang["versions"].items() if version]
        yield f"  with         {', '.join(others[1:])}"
    for index, gpu in enumerate(facts.get("gpus", ())):
        major, minor = gpu["capability"]
        sizes = f"{gib(gpu['free_bytes'])} of {gib(gpu['total_bytes'])} free"
        yield f"  GPU {index:<8} {gpu['name']}, capability {major}.{minor}, {sizes}"
    if found.budget:
        left = f"{gib(found.budget.left)} left beside weights and pools"
        yield f"  capacity     {found.budget.tokens:,} tokens, {left}"
    for line in found.checked:
        yield f"  checked      {line}"
    for line in found.not_checked:
        yield f"  NOT checked  {line}"
    errors = len(errors_of(found.findings))
    counts = ((errors, "error"), (len(found.findings) - errors, "warning"))
    told = ", ".join(f"{count:,} {noun}{'' if count == 1 else 's'}" for count, noun in counts)
    yield "ready to serve" if found.ok(strict=strict) else f"NOT ready: {told}"


@click.command(epilog=_SERVE_EXITS)
@_launch_options
@click.argument("extra", nargs=-1, type=click.UNPROCESSED, metavar="[-- SGLANG ARGUMENTS]")
@click.option("--dry-run", is_flag=True, help="Show environment and command, start nothing.")
@click.option(
    "--log-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Log of the server; rotates at 64 MiB. [default: DST's name with `-serve.log`, in this directory]",
)
@click.option(
    "--ready-timeout",
    type=click.FloatRange(1),
    metavar="SECONDS",
    default=1800,
    show_default=True,
    help="Give up when the server is not ready by then.",
)
@click.option(
    "--stop-timeout",
    type=click.FloatRange(0),
    metavar="SECONDS",
    default=60,
    show_default=True,
    help="Time for running requests when the server is stopped.",
)
@command_options
def serve(
    shell: Shell,
    launch: Launch,
    arch: tuple[int, ...],
    dry_run: bool,
    log_file: Path | None,
    ready_timeout: float,
    stop_timeout: float,
) -> None:
    """Serve the converted checkpoint in DST with SGLang and the SM80 shim, after a preflight.

    Stays in the foreground; SIGINT and SIGTERM end the server and all of its processes. Lines of the server
    go to stderr, unless --quiet, and to the log file.
    """
    from dsv4convert.runtime.preflight import check_launch
    from dsv4convert.runtime.preflight import preflight as check

    log = log_file or Path(f"{launch.root.resolve().name}-serve.log")
    if launch.key_file and os.path.realpath(log) == os.path.realpath(launch.key_file):
        raise click.UsageError("--log-file and --api-key-file name the same file")
    if dry_run:
        _show_command(shell, launch, check_launch(launch, os.environ))
        return
    shell.say("preflight: checkpoint, SGLang, shim, GPUs")
    found = check(launch, os.environ, arch)
    if not found.ok():
        fail(shell, found.findings, Exit.REFUSED)
    shell.findings(found.findings)
    outcome, tail = _run(shell, launch, found, log, ready_timeout, stop_timeout)
    if shell.quiet and outcome.end != "stopped":
        # Otherwise they are on the screen already.
        for line in tail:
            click.echo(line, err=True)
    _finish(shell, log, outcome)


def _start(launch: Launch, found: Preflight) -> tuple[list[str], dict[str, str]]:
    """Return the command of the server and the variables that are set for it."""
    from dsv4convert.runtime.launch import arguments, command, variables
    from dsv4convert.runtime.preflight import prefill_steps

    if found.budget is None:
        raise Refused(found.findings)
    steps, pictures = prefill_steps(launch, found.budget)._asdict(), found.pictures
    sglang = arguments(launch, name=found.name, **steps, pictures=pictures)
    return command(launch, sglang), variables(launch, os.environ, pictures=pictures)


def _show_command(shell: Shell, launch: Launch, found: Preflight) -> None:
    if not found.ok():
        fail(shell, found.findings, Exit.REFUSED)
    words, variables = _start(launch, found)
    if shell.json:
        shell.data(json.dumps({"ok": True, "environment": variables, "command": words}, indent=1))
        return
    shell.findings(found.findings)
    for line in _as_shell(words, variables):
        shell.data(line)
    shell.say("nothing was started and this machine was not checked: `dsv4convert preflight` does")


def _as_shell(words: list[str], variables: dict[str, str]) -> Iterator[str]:
    """Yield the command as text that a shell takes: one setting and one option a line."""
    yield "env \\"
    yield from (f"  {name}={shlex.quote(value)} \\" for name, value in variables.items())
    split = words.index("--") + 1
    parts = [words[:split]]
    for word in words[split:]:
        # An option takes its values along.
        if word.startswith("--"):
            parts.append([])
        parts[-1].append(word)
    for number, part in enumerate(parts, 1):
        yield f"  {shlex.join(part)}{' ' + chr(92) if number < len(parts) else ''}"


def _run(
    shell: Shell, launch: Launch, found: Preflight, log_file: Path, ready_timeout: float, stop_timeout: float
) -> tuple[Outcome, list[str]]:
    from dsv4convert.runtime.guards import Guards
    from dsv4convert.runtime.keys import read_key
    from dsv4convert.runtime.launch import NAME, value_of
    from dsv4convert.runtime.logs import ServerLog
    from dsv4convert.runtime.supervise import Server

    words, variables = _start(launch, found)
    key = read_key(launch.key_file) if launch.key_file else ""
    try:
        log = ServerLog(log_file, key, None if shell.quiet else shell.say)
    except OSError as error:
        problem = f"the log cannot be written: {error.strerror}"
        raise EnvironmentFault(finding("io.write", os.fspath(log_file), problem)) from None
    guards = Guards(launch.tp, launch.dspark, launch.backend, found.pictures)
    model = value_of(launch.extra, NAME) or found.name

    def ready(seconds: float) -> None:
        page = {
            "ok": True,
            "url": f"{launch.url}/v1",
            "model": model,
            "seconds": round(seconds, 1),
            "log": os.fspath(log_file),
            "guards": guards.lines,
        }
        if shell.json:
            shell.data(json.dumps(page))
            return
        shell.data(f"ready after {seconds:.0f} s: {page['url']}, model {model}, log {log_file}")
        for line in guards.lines:
            shell.data(f"  {line}")

    environment = {**os.environ, **variables}
    server = Server(words, environment, launch.url, log, guards, ready_timeout, stop_timeout, ready)
    try:
        return server.run(), list(log.tail)
    finally:
        if log.fault:
            click.echo(f"log {log_file}: lines are missing: {log.fault}", err=True)
        log.close()
        shell.say(f"log: {log_file}")


def _finish(shell: Shell, log: Path, outcome: Outcome) -> None:
    """Say how the server ended, and leave with the status that stands for it."""
    if outcome.was_ready:
        # stdout holds one object, and that was the one of the ready server.
        shell = replace(shell, json=False)
    faults: list[Finding] = []
    status = Exit.ENVIRONMENT
    if outcome.end == "died":
        how = f"signal {-outcome.status}" if outcome.status < 0 else f"exit status {outcome.status}"
        when = "after it had been ready" if outcome.was_ready else "before it was ready"
        faults = [finding("serve.died", log.name, f"the server ended by itself {when}", found=how)]
    elif outcome.end == "timeout":
        faults = [finding("serve.timeout", log.name, "the server did not become ready in time")]
    elif outcome.end == "refused":
        faults = [finding("serve.guard", log.name, reason[:300]) for reason in outcome.reasons]
        status = Exit.REFUSED
    if outcome.left:
        problem = "processes of the server could not be ended and may hold GPU memory"
        faults.append(finding("serve.left", log.name, problem, found=f"{outcome.left:,}"))
    if faults:
        fail(shell, faults, status)
    shell.say("stopped: the server and all of its processes have ended")
    if shell.json:
        shell.data(json.dumps({"ok": False, "exit_status": 128 + outcome.signal, "findings": []}))
    raise SystemExit(128 + outcome.signal)


@click.command(epilog=EXIT_HELP)
@click.argument("file", type=click.Path(path_type=Path))
@command_options
def keygen(shell: Shell, file: Path) -> None:
    """Write a new random API key into FILE, which only you can read; an existing file is never replaced."""
    from dsv4convert.runtime.keys import make_key

    make_key(file)
    if shell.json:
        shell.data(json.dumps({"ok": True, "file": os.fspath(file), "mode": "0600"}))
    else:
        shell.data(f"{file}: 256 random bits, mode 0600; pass it with `--api-key-file`")
