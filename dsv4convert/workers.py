"""Worker processes for shards, started fresh (never forked) and watched.

A pool of its own, because two things must hold that the standard executors do not give together: a worker
that dies is an error with a sentence, not a hang; and an interrupt ends all workers at once, each of
which removes its temporary file.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from dsv4convert.errors import EnvironmentFault, finding

Emit = Callable[[int], None]

_TERMINAL = (signal.SIGINT, signal.SIGHUP)


def run_all(
    function: Callable[[Any, Emit], Any],
    tasks: Iterable[tuple[str, Any]],
    jobs: int,
    on_result: Callable[[Any], None],
    on_progress: Emit,
) -> None:
    """Run ``function(task, emit)`` for every task in `jobs` processes.

    Args:
        function: Importable; its results and exceptions must pickle.
        tasks: (name, argument) pairs.
        jobs: Number of processes.
        on_result: Called in this process with each result, in order of completion.
        on_progress: Called in this process with every number a worker emits.

    Raises:
        EnvironmentFault: ``worker.killed``, a process ended without a result.
        Exception: the first exception of a worker; the others are ended.
    """
    waiting = list(reversed(list(tasks)))
    busy: dict[Connection, tuple[SpawnProcess, str]] = {}
    context = mp.get_context("spawn")
    try:
        for _ in range(min(jobs, len(waiting))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, function), daemon=True)
            _start_deaf(process)
            theirs.close()
            name, task = waiting.pop()
            ours.send(task)
            busy[ours] = process, name
        while busy:
            for connection in wait(list(busy)):
                if isinstance(connection, Connection):
                    _take(connection, busy, waiting, on_result, on_progress)
    finally:
        _end(busy)


def _start_deaf(process: SpawnProcess) -> None:
    """Start a process deaf to the terminal from its first instruction on, before it can say so itself."""
    if threading.current_thread() is not threading.main_thread():
        process.start()
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _TERMINAL}
    try:
        process.start()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _take(
    connection: Connection,
    busy: dict[Connection, tuple[SpawnProcess, str]],
    waiting: list[tuple[str, Any]],
    on_result: Callable[[Any], None],
    on_progress: Emit,
) -> None:
    process, name = busy[connection]
    try:
        kind, value = connection.recv()
    except EOFError:
        process.join(5)
        problem = "the worker process of this shard was ended from outside"
        found = f"exit code {process.exitcode}"
        raise EnvironmentFault(finding("worker.killed", name, problem, found=found)) from None
    if kind == "progress":
        on_progress(value)
        return
    if kind == "error":
        raise value
    on_result(value)
    if waiting:
        name, task = waiting.pop()
        connection.send(task)
        busy[connection] = process, name
    else:
        connection.send(None)
        del busy[connection]
        process.join()


def _end(busy: dict[Connection, tuple[SpawnProcess, str]]) -> None:
    for process, _ in busy.values():
        process.terminate()
    for process, _ in busy.values():
        process.join(10)
        if process.is_alive():
            process.kill()


def _serve(connection: Connection, function: Callable[[Any, Emit], Any]) -> None:
    # The terminal sends these to the whole group; the parent decides what they mean and sends SIGTERM.
    for number in _TERMINAL:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def emit(count: int) -> None:
        connection.send(("progress", count))

    try:
        while (task := connection.recv()) is not None:
            connection.send(("result", function(task, emit)))
    except EOFError:
        return  # The parent is gone.
    except Exception as error:
        with suppress(OSError):  # A parent that is gone made the error, and reads none.
            connection.send(("error", error))


def _end_with_parent() -> None:
    # A killed parent ends nobody; an orphan would publish its shard under the feet of the next run.
    if parent := mp.parent_process():
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
