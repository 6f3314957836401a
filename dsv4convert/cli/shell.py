"""What every command shares: options, streams, signals, and the border at which errors become sentences."""

from __future__ import annotations

import errno
import functools
import gc
import importlib.metadata
import json
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click

from dsv4convert import __version__
from dsv4convert.errors import Dsv4Error, EnvironmentFault, Exit, Finding, finding
from dsv4convert.files import printable
from dsv4convert.validate.report import Report, render

EXIT_HELP = """\b
Exit status:
  0  clean
  1  findings: something is wrong with the checkpoint
  2  usage
  3  refused: source or destination is not acceptable, no index was written
  4  environment or I/O: running the same command again is safe
  5  internal error
  129, 130, 143  interrupted: running the same command again continues"""


@dataclass(frozen=True, slots=True)
class Shell:
    """How a command talks: as JSON or as text, quiet or verbose."""

    json: bool
    quiet: bool
    verbose: bool
    debug: bool

    def data(self, text: str) -> None:
        """Print a result to stdout."""
        _print(text, sys.stdout)

    def say(self, text: str) -> None:
        """Print a remark to stderr, unless quiet."""
        if not self.quiet:
            _print(text, sys.stderr)

    def detail(self, text: str) -> None:
        """Print a remark to stderr if verbose."""
        if self.verbose:
            _print(text, sys.stderr)

    def findings(self, findings: Iterable[Finding], heading: str = "") -> None:
        """Print findings to stderr, and above them what they are about."""
        lines = list(render(findings))
        for line in [heading, *lines] if heading and lines else lines:
            _print(line, sys.stderr)

    def report(self, report: Report, strict: bool) -> NoReturn:
        """Print a report and leave with its exit status."""
        if self.json:
            self.data(json.dumps(report.as_dict(strict=strict), indent=1))
        else:
            self.findings(report.findings)
            for line in _verdict(report, strict):
                self.data(line)
        for dtype, count in report.facts.get("dtypes", {}).items():
            self.detail(f"  {count:>10,} tensors of {dtype}")
        raise SystemExit(Exit.CLEAN if report.ok(strict=strict) else Exit.FINDINGS)


def _verdict(report: Report, strict: bool) -> Iterable[str]:
    facts = report.facts
    yield f"{report.subject}: {report.title}, layout {facts.get('layout') or 'unknown'}"
    yield (
        f"  {facts['shards']:,} shards, {facts['tensors']:,} tensors, {facts['data_bytes']:,} data bytes, "
        f"{facts['expert_weights']:,} expert weights, {facts['mtp_tensors']:,} mtp tensors"
    )
    for line in report.checked:
        yield f"  checked      {line}"
    for line in report.not_checked:
        yield f"  NOT checked  {line}"
    if report.fetch_again:
        yield "fetch again:"
        yield from (f"  {name}" for name in report.fetch_again)
        yield f"  $ {report.fetch_command}"
    yield report.verdict(strict=strict)


def _print(text: str, stream: Any) -> None:
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        # The reader has enough (`| head`); the exit status must still be the verdict.
        _silence(stream)
    except OSError as error:
        # Nothing can be said on this stream any more, so the status has to say it.
        _silence(stream)
        if stream is sys.stderr:
            return
        _print(f"error: `stdout`: writing failed: {error.strerror}   [io.write]", sys.stderr)
        raise SystemExit(int(Exit.ENVIRONMENT)) from None


def _silence(stream: Any) -> None:
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Commands(click.Group):
    """A group whose usage errors are JSON too when ``--json`` is among the arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what comes before the command."""
        as_json = "--json" in args
        ctx.meta["as_json"] = as_json
        with _usage_as_json(as_json):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Parse and run the command."""
        with _usage_as_json(ctx.meta["as_json"]):
            return super().invoke(ctx)


@contextmanager
def _usage_as_json(as_json: bool) -> Iterator[None]:
    try:
        yield
    except click.UsageError as error:
        if as_json:
            where = error.ctx.command_path if error.ctx else "dsv4convert"
            fault = finding("cli.usage", printable(where), printable(error.format_message(), 400))
            Shell(True, False, False, False).data(_failure([fault], Exit.USAGE))
        raise  # click says it on stderr and exits with 2.


def output_file(path: Path, option: str, *checkpoints: Path | None) -> Path:
    """Return where a result goes, absolute; refuse before the work begins what could not be written after it.

    Raises:
        click.UsageError: the place is something else than a regular file, which a rename would replace, or
            it lies in one of `checkpoints`, whose files it could replace and whose checks it would disturb.
        EnvironmentFault: its directory is missing or read-only.
    """
    target = path.absolute()
    shown = printable(os.fspath(path))
    for checkpoint in filter(None, checkpoints):
        if path.resolve().is_relative_to(checkpoint.resolve()):
            inside = printable(os.fspath(checkpoint))
            raise click.UsageError(f"{option}: `{shown}` would lie in {inside}: name another place")
    if target.is_dir() or (target.exists() and not target.is_file()):
        raise click.UsageError(f"{option}: `{shown}` is not a file: name another place")
    directory = target.parent
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        problem = "nothing can be written there" if directory.is_dir() else "its directory does not exist"
        hint = f"make or unlock the directory, or name another place with `{option}`"
        raise EnvironmentFault(finding("io.write", shown, problem, hint=hint))
    return target


def command_options(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the common options and the error border; it receives a `Shell` first."""

    @functools.wraps(function)
    def wrapper(as_json: bool, quiet: bool, verbose: bool, debug: bool, **arguments: Any) -> None:
        shell = Shell(as_json, quiet, verbose, debug)
        run(shell, lambda: function(shell, **arguments))

    options = (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text."),
        click.option("-q", "--quiet", is_flag=True, help="No progress and no remarks."),
        click.option("-v", "--verbose", is_flag=True, help="Say more."),
        click.option("--debug", is_flag=True, help="Show the traceback of an internal error."),
    )
    wrapped: Callable[..., None] = wrapper
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped


def run(shell: Shell, action: Callable[[], None]) -> None:
    """Run a command; turn every error into sentences and the exit status it stands for."""
    # Plans are large trees without cycles: with the default threshold the collector takes half of the time.
    gc.set_threshold(1_000_000)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    _on_signals()
    started = time.monotonic()
    try:
        action()
        shell.detail(f"done in {time.monotonic() - started:.2f} s")
    except Dsv4Error as error:
        fail(shell, error.findings, error.exit_code)
    except click.ClickException:
        raise  # Options that are wrong together: click says so and exits with 2.
    except KeyboardInterrupt:
        interrupted(shell, Exit.SIGINT)
    except _Terminated as ended:
        interrupted(shell, ended.status)
    except MemoryError as error:
        _memory_error(shell, f"{error}")
    except OSError as error:
        _system_error(shell, error)
    except Exception as error:
        if f"{error}" == "can't start new thread":  # A thread needs address space for its stack.
            _memory_error(shell, f"{error}")
        _internal(shell, error)


class _Terminated(BaseException):
    """SIGTERM or SIGHUP arrived."""

    def __init__(self, status: Exit) -> None:
        super().__init__()
        self.status = status


def _on_signals() -> None:
    def handler(number: int, frame: object) -> None:
        raise _Terminated(Exit(128 + number))

    with suppress(ValueError):  # Only the main thread may; tests run commands elsewhere.
        signal.signal(signal.SIGTERM, handler)
        # `nohup` ignores the hang-up before the command begins, and that is to last.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, handler)


def fail(shell: Shell, findings: Iterable[Finding], status: int) -> NoReturn:
    """Print findings and leave."""
    found = tuple(findings)
    if shell.json:
        shell.data(_failure(found, status))
    else:
        shell.findings(found)
    raise SystemExit(int(status))


def _failure(findings: Iterable[Finding], status: int) -> str:
    failed = {"ok": False, "exit_status": int(status), "findings": [f.as_dict() for f in findings]}
    return json.dumps(failed, indent=1)


def interrupted(shell: Shell, status: Exit) -> NoReturn:
    """Say that nothing is lost, and leave."""
    if shell.json:
        shell.data(json.dumps({"ok": False, "exit_status": int(status), "findings": []}))
    _print("interrupted: nothing is lost; run the same command again to continue", sys.stderr)
    raise SystemExit(int(status))


def _memory_error(shell: Shell, found: str) -> NoReturn:
    problem = "the process was given less memory than it needs"
    fail(shell, [finding("env.memory", "memory", problem, found=found)], Exit.ENVIRONMENT)


def _system_error(shell: Shell, error: OSError) -> NoReturn:
    name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "system"
    if error.errno == errno.ENOMEM:
        _memory_error(shell, error.strerror or "")
    code = "env.files" if error.errno in (errno.EMFILE, errno.ENFILE) else "io.read"
    fail(shell, [finding(code, printable(name), f"{error.strerror or error}")], Exit.ENVIRONMENT)


def _internal(shell: Shell, error: Exception) -> NoReturn:
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{os.path.basename(last.filename)}:{last.lineno}"
    if shell.json:
        shell.data(json.dumps({"ok": False, "exit_status": int(Exit.INTERNAL), "findings": []}))
    _print(f"internal error: {type(error).__name__} at {place}: {error}", sys.stderr)
    _print("This is a bug of dsv4convert. Please report it with this block:", sys.stderr)
    _print(version_block(), sys.stderr)
    if shell.debug:
        traceback.print_exception(error)
    else:
        _print("`--debug` shows the traceback", sys.stderr)
    raise SystemExit(int(Exit.INTERNAL))


def version_block() -> str:
    """Return what a bug report needs: versions, Python, system."""
    rows: Mapping[str, str] = {
        "dsv4convert": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        **{name: _version(name) for name in ("torch", "numpy", "safetensors", "huggingface_hub", "xxhash")},
    }
    return "\n".join(f"  {name:16}{value}" for name, value in rows.items())


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
