"""A server and what belongs to it: start, log, readiness, guards, and an end that leaves nothing behind.

The server gets a session of its own, so that a signal to the terminal reaches us alone; its process group is
what is ended. Everything that happens (a line, an answer, a signal, an exit) is an event in one queue.
"""

from __future__ import annotations

import http.client
import os
import queue
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any, Final, Literal

from dsv4convert.runtime.guards import Guards
from dsv4convert.runtime.logs import ServerLog

#: Seconds: between two questions for health, and until one is given up (SGLang answers within 20).
_HEALTH_EVERY, _HEALTH_PATIENCE = 2.0, 40.0
#: Seconds that killed processes may take to disappear; a driver may hold them.
_REAP: Final = 30.0

End = Literal["stopped", "died", "timeout", "refused"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a server ended.

    Attributes:
        end: ``stopped`` by a signal to us, ``died`` by itself, ``timeout`` before it was ready, ``refused``
            because a guard failed.
        was_ready: Whether it had been ready.
        status: Exit status of the server process; negative for a signal.
        signal: The signal that stopped us, 0 for none.
        reasons: Why it was refused.
        left: Processes that could not be ended.
    """

    end: End
    was_ready: bool
    status: int
    signal: int = 0
    reasons: tuple[str, ...] = ()
    left: int = 0


@dataclass(slots=True)
class Server:
    """What to run and what to expect of it.

    Attributes:
        command: The command.
        environment: All of its environment.
        url: Address that answers ``/health``.
        log: Takes every line.
        guards: Watches the lines.
        ready_seconds: How long it may take to become ready.
        stop_seconds: How long it may take to finish its requests when it is stopped.
        on_ready: Called once, with the seconds the start took.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    url: str
    log: ServerLog
    guards: Guards
    ready_seconds: float
    stop_seconds: float
    on_ready: Callable[[float], None]
    _events: queue.SimpleQueue[tuple[str, int]] = field(default_factory=queue.SimpleQueue)
    _ready: threading.Event = field(default_factory=threading.Event)

    def run(self) -> Outcome:
        """Run the server until it ends or a signal ends it; call it in the main thread."""
        with _signals(self._events):
            process = subprocess.Popen(
                self.command,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            reader = _in_background(self._read, process.stdout)
            _in_background(self._wait, process)
            _in_background(self._ask, process)
            try:
                outcome = self._follow(process)
            except BaseException:
                self._end(process, 0)
                raise
            reader.join(timeout=5)
            return outcome

    # ---- what happens in the background

    def _read(self, stream: IO[bytes]) -> None:
        for line in self.log.lines(stream):
            text = self.log.write(line)
            # Clients can write into the log of a ready server, so that it decides nothing any more.
            if not self._ready.is_set() and self.guards.feed(text):
                self._events.put(("guard", 0))

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        self._events.put(("exit", process.wait()))

    def _ask(self, process: subprocess.Popen[bytes]) -> None:
        # Proxies of the environment must not answer for a server on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while process.poll() is None:
            with (
                suppress(OSError, http.client.HTTPException),
                opener.open(f"{self.url}/health", timeout=_HEALTH_PATIENCE) as answer,
            ):
                if answer.status == 200:
                    self._events.put(("healthy", 0))
                    return
            time.sleep(_HEALTH_EVERY)

    # ---- what follows from it

    def _follow(self, process: subprocess.Popen[bytes]) -> Outcome:
        started = time.monotonic()
        deadline: float | None = started + self.ready_seconds
        healthy = ready = False
        while True:
            try:
                event, number = self._events.get(timeout=deadline and max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return self._ended("timeout", process, ready)
            if event == "exit":
                return self._ended("died", process, ready)
            if event == "signal":
                return self._ended("stopped", process, ready, signal=number)
            healthy = healthy or event == "healthy"
            if ready:
                continue
            if self.guards.failed:
                return self._ended("refused", process, ready, reasons=self.guards.failed)
            if healthy and self.guards.is_up:
                missing = self.guards.missing()
                if missing:
                    return self._ended("refused", process, ready, reasons=missing)
                ready, deadline = True, None
                self._ready.set()
                notify("READY=1")
                self.on_ready(time.monotonic() - started)

    def _ended(self, end: End, process: subprocess.Popen[bytes], ready: bool, **why: Any) -> Outcome:
        notify("STOPPING=1")
        # Requests are finished only if there can be some.
        left = self._end(process, self.stop_seconds if ready else min(self.stop_seconds, 10.0))
        return Outcome(end, ready, process.wait(), left=left, **why)

    def _end(self, process: subprocess.Popen[bytes], patience: float) -> int:
        """End the server and its group; return how many processes are left."""
        if process.poll() is None and patience:
            process.terminate()
            self._until_exit_or_signal(patience)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + _REAP
        while (left := _group(process.pid)) and time.monotonic() < deadline:
            with suppress(ChildProcessError):
                # As the first process of a container we inherit what the server leaves.
                os.waitpid(-process.pid, os.WNOHANG)
            time.sleep(0.05)
        return left

    def _until_exit_or_signal(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        while (rest := deadline - time.monotonic()) > 0:
            with suppress(queue.Empty):
                # A second signal means: at once.
                if self._events.get(timeout=rest)[0] in ("exit", "signal"):
                    return


def _in_background(target: Callable[..., None], argument: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=(argument,), daemon=True)
    thread.start()
    return thread


@contextmanager
def _signals(events: queue.SimpleQueue[tuple[str, int]]) -> Iterator[None]:
    """Turn the signals that end a program into events."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    # `nohup` ignores the hang-up before we begin, and that is to last.
    numbers += [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    # A simple queue may be used in a handler, whatever the interrupted code was doing.
    before = {number: signal.signal(number, lambda n, frame: events.put(("signal", n))) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _group(leader: int) -> int:
    """Return the number of processes of a group; 0 when it is gone."""
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return 0
    except PermissionError:
        return 1
    return sum(_is_member(name, leader) for name in os.listdir("/proc") if name.isdecimal())


def _is_member(name: str, leader: int) -> bool:
    try:
        with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[2] == str(leader) and fields[0] != "Z"


def notify(state: str) -> None:
    """Tell systemd the state of the service, if it asked for that (``Type=notify``)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
        out.sendto(state.encode(), address)
