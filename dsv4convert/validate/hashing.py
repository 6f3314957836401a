"""Hash many large files on all cores, and remember what is done across interruptions.

Threads suffice: `hashlib` lets go of the interpreter while it works. What was hashed is remembered in the
user's cache directory, never in the directory that is checked, and counts for a file only as long as its
size, times and inode stay the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from dsv4convert.errors import Dsv4Error, EnvironmentFault, Finding, finding
from dsv4convert.files import identity, open_regular, printable
from dsv4convert.validate.hashlists import GIT_BLOB, SHA256

Progress = Callable[[int], None]

_CHUNK: Final = 4 << 20
#: A file that changed less than this before it was hashed could change again without a new time stamp.
_SETTLED_NS: Final = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Target:
    """One file to hash: relative name, real path, size, and the algorithms wanted."""

    name: str
    path: Path
    size: int
    algorithms: frozenset[str]


@dataclass(frozen=True, slots=True)
class Hashed:
    """The hashes of a file by algorithm, and whether an earlier run made them."""

    name: str
    digests: Mapping[str, str]
    reused: bool = False


class Memory:
    """Hashes of earlier runs of one directory: a file of JSON lines, appended to file by file.

    Args:
        root: Real path of the directory that is checked.
        folder: Where the memory lies; None for ``$XDG_CACHE_HOME/dsv4convert/hashes``.
    """

    def __init__(self, root: Path, folder: Path | None = None) -> None:
        key = hashlib.sha256(os.fsencode(root)).hexdigest()[:32]
        self.path = (folder or _cache_folder()) / f"{key}.jsonl"
        self._rows: dict[str, dict[str, Any]] = {}
        # A memory that is damaged, of another version or unreadable is as good as none.
        with suppress(OSError, ValueError, RecursionError):
            for line in self.path.read_bytes().splitlines():
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("name"), str):
                    self._rows[row["name"]] = row

    def get(self, target: Target) -> Hashed | None:
        """Return the hashes of a file that has not changed since, if all that are wanted are known."""
        row = self._rows.get(target.name)
        try:
            known = row is not None and row.get("stat") == identity(os.stat(target.path))
        except OSError:
            return None
        digests = row.get("digests") if row and known else None
        if not isinstance(digests, dict) or not all(
            isinstance(digests.get(a), str) for a in target.algorithms
        ):
            return None
        return Hashed(target.name, digests, reused=True)

    def put(self, name: str, status: os.stat_result, digests: Mapping[str, str]) -> None:
        """Remember the hashes of a file; a memory that cannot be written is given up silently."""
        if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) < _SETTLED_NS:
            return
        row = {"name": name, "stat": identity(status), "digests": dict(digests)}
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a", encoding="ascii") as file:
                file.write(json.dumps(row) + "\n")


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says that a relative path is to be ignored.
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache")) / "dsv4convert" / "hashes"


class _Stopped(Exception):
    """The run is over; this thread's work is not wanted any more."""


class _Run:
    """State that the threads of one run share."""

    def __init__(self, targets: Iterable[Target]) -> None:
        # The largest first: a long file that starts last would leave the other cores idle.
        self.waiting = deque(sorted(targets, key=lambda t: -t.size))
        self.events: SimpleQueue[int | BaseException | tuple[Target, os.stat_result, dict[str, str]] | None]
        self.events = SimpleQueue()
        self.stop = threading.Event()

    def work(self) -> None:
        """Hash files until none is left; every event goes through the queue."""
        buffer = memoryview(bytearray(_CHUNK))
        try:
            while not self.stop.is_set():
                target = self.waiting.popleft()
                try:
                    self.events.put((target, *self._hash(target, buffer)))
                except EnvironmentFault as fault:  # The other files are still worth hashing.
                    self.events.put(fault)
        except IndexError:
            pass  # Nothing is left.
        except _Stopped:
            pass
        except BaseException as error:
            self.events.put(error)
        self.events.put(None)

    def _hash(self, target: Target, buffer: memoryview) -> tuple[os.stat_result, dict[str, str]]:
        try:
            fd, before = open_regular(target.path, target.name)
        except Dsv4Error as error:
            raise EnvironmentFault(error.findings) from None
        try:
            states = {a: _begin(a, before.st_size) for a in sorted(target.algorithms)}
            self._feed(fd, target.name, buffer, list(states.values()))
            if identity(os.fstat(fd)) != identity(before):
                problem = "changed while it was read"
                raise EnvironmentFault(finding("content.changed", printable(target.name), problem))
        finally:
            os.close(fd)
        return before, {a: s.hexdigest() for a, s in states.items()}

    def _feed(self, fd: int, name: str, buffer: memoryview, states: list[Any]) -> None:
        with suppress(OSError):  # Advice only.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        offset = 0
        while not self.stop.is_set():
            try:
                count = os.preadv(fd, [buffer], offset)
            except OSError as error:
                problem = f"reading failed at byte {offset:,}: {error.strerror}"
                raise EnvironmentFault(finding("io.read", printable(name), problem)) from None
            if not count:
                return
            for state in states:
                state.update(buffer[:count])
            offset += count
            self.events.put(count)
        raise _Stopped


def _begin(algorithm: str, size: int) -> Any:
    if algorithm == GIT_BLOB:
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    return hashlib.new(SHA256)


def hash_files(
    targets: Iterable[Target],
    jobs: int,
    memory: Memory | None,
    on_result: Callable[[Hashed], None],
    progress: Progress,
) -> None:
    """Hash files in parallel, largest first.

    Args:
        targets: What to hash.
        jobs: Number of threads.
        memory: Hashes of earlier runs to use and to add to; None to read everything.
        on_result: Called in this thread with each file's hashes, in order of completion.
        progress: Called in this thread with numbers of bytes, those of reused hashes included.

    Raises:
        EnvironmentFault: ``io.read``, ``file.unreadable`` or ``content.changed``; what was hashed before is
            remembered.
    """
    fresh: list[Target] = []
    for target in targets:
        known = memory.get(target) if memory else None
        if known:
            on_result(known)
            progress(target.size)
        else:
            fresh.append(target)
    run = _Run(fresh)
    threads = [threading.Thread(target=run.work, daemon=True) for _ in range(min(jobs, len(fresh)))]
    for thread in threads:
        thread.start()
    try:
        _collect(run, len(threads), memory, on_result, progress)
    finally:
        run.stop.set()
        for thread in threads:
            thread.join()


def _collect(
    run: _Run,
    alive: int,
    memory: Memory | None,
    on_result: Callable[[Hashed], None],
    progress: Progress,
) -> None:
    faults: list[Finding] = []
    while alive:
        event = run.events.get()
        if event is None:
            alive -= 1
        elif isinstance(event, int):
            progress(event)
        elif isinstance(event, EnvironmentFault):
            faults += event.findings
        elif isinstance(event, BaseException):
            raise event
        else:
            target, status, digests = event
            if memory:
                memory.put(target.name, status, digests)
            on_result(Hashed(target.name, digests))
    if faults:
        raise EnvironmentFault(faults)
