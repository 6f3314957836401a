"""`convert --consume`: delete each source shard once what was made of it is proved to be on disk.

The order is what makes it safe. Before the first deletion the whole source has passed the structural check
and every value has been looked at, so no later shard can refuse. A shard is deleted only when all outputs
that need it have been read back and have the hashes of what was computed, its stand-in is in the journal,
and it still is the very file that was planned. Nothing but shards of the index is ever deleted.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final

import xxhash

from dsv4convert.checkpoint import Checkpoint
from dsv4convert.errors import EnvironmentFault, Finding, Refused, errors_of, finding
from dsv4convert.header import Shard, ShardReader
from dsv4convert.journal import Journal, ShardRecord
from dsv4convert.limits import Limits, judge
from dsv4convert.plan import Plan, ShardPlan
from dsv4convert.sink import Discard, shard_digest
from dsv4convert.standin import keep_stand_in, stand_ins
from dsv4convert.transform import STRIP, Transformer
from dsv4convert.validate.structure import check_original
from dsv4convert.workers import run_all
from dsv4convert.writer import write_bytes, write_fault

Progress = Callable[[int], None]
_EXAMINED: Final = "examined.json"


def require_consumable(source: str | os.PathLike[str], checkpoint: Checkpoint) -> None:
    """Refuse a source of which nothing may be deleted.

    Args:
        source: The path as it was given.
        checkpoint: What lies there.

    Raises:
        Refused: the structural check fails, or a file may belong to somebody else too.
    """
    faults = list(errors_of(check_original(checkpoint).findings))
    faults += _foreign_findings(source, checkpoint.root)
    if faults:
        raise Refused(faults)


def _foreign_findings(source: str | os.PathLike[str], root: Path) -> Iterator[Finding]:
    if os.path.islink(os.path.normpath(source)):
        yield finding("src.consume", root.name, "the source is given by a symbolic link")
    if root.parent.name == "snapshots" or (root.parent.parent / "blobs").is_dir():
        yield finding("src.consume", root.name, "the source is a snapshot of a Hugging Face cache")
    if not os.access(root, os.W_OK | os.X_OK):
        yield finding("src.consume", root.name, "nothing can be deleted here: the directory is not writable")
    for folder, folders, names in os.walk(root):
        for name in (*folders, *names):
            path = Path(folder, name)
            status = path.lstat()
            where = os.path.relpath(path, root)
            if stat.S_ISLNK(status.st_mode):
                yield finding("src.consume", where, "is a symbolic link")
            elif stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
                problem = "has other names elsewhere (hard links)"
                yield finding("src.consume", where, problem, expected="1 link", found=f"{status.st_nlink}")


def source_is_gone(shard: ShardPlan, gone: Mapping[str, Shard]) -> bool:
    """Tell whether a shard can no longer be made, because a source of it was deleted."""
    return any(source.shard in gone for step in shard.steps for source in step.sources)


def believe_again(journal: Journal, shard: ShardPlan) -> None:
    """Accept a finished shard whose times changed, if its bytes are those recorded; it cannot be made again.

    Raises:
        Refused: they are not.
    """
    record = journal.recorded(shard.name)
    if record is None or not is_proved(journal.root / shard.name, shard, record):
        problem = "is not what was recorded, and the source it was made from has been consumed"
        raise Refused(finding("src.consumed", shard.name, problem))
    status = os.stat(journal.root / shard.name)
    journal.record(replace(record, mtime_ns=status.st_mtime_ns, inode=status.st_ino))


def is_proved(path: Path, shard: ShardPlan, record: ShardRecord) -> bool:
    """Read a finished shard back, from the disk if the system allows it, and compare all hashes."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        # What is only in the page cache proves nothing about the disk.
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        header = _read(fd, 0, len(shard.header))
        if os.fstat(fd).st_size != shard.file_bytes or header != shard.header:
            return False
        found = {step.name: _hash(fd, step.start, step.end) for step in shard.steps}
    except OSError:
        return False
    finally:
        os.close(fd)
    return found == dict(record.tensors) and shard_digest(header, found) == record.digest


def _hash(fd: int, start: int, end: int) -> str:
    digest = xxhash.xxh3_128()
    for offset in range(start, end, STRIP):
        digest.update(_read(fd, offset, min(STRIP, end - offset)))
    return digest.hexdigest()


def _read(fd: int, offset: int, count: int) -> bytes:
    parts = []
    while count and (part := os.pread(fd, count, offset)):
        parts.append(part)
        offset, count = offset + len(part), count - len(part)
    return b"".join(parts)


@dataclass(frozen=True, slots=True)
class _Task:
    """What a worker needs to look at the values of one shard."""

    shard: ShardPlan
    sources: Mapping[str, Shard]
    limits: Limits


def _examine(task: _Task, progress: Progress) -> list[Finding]:
    """Do everything that `convert` would do with a shard, except writing; return why it would refuse."""
    with ShardReader(task.sources) as reader:
        sink = Discard(2, STRIP)
        try:
            outcome = Transformer(reader, sink, progress).run(task.shard.steps)
            sink.finish()
        finally:
            sink.abort()
    try:
        judge(outcome, task.limits)
    except Refused as refused:
        return list(refused.findings)
    return []


def _was_examined(path: Path, names: Sequence[str], limits: Limits) -> bool:
    try:
        state = json.loads(path.read_bytes())
        return bool(state["limits"] == asdict(limits) and set(names) <= set(state["shards"]))
    except (OSError, ValueError, KeyError, TypeError):
        return False


class Consumer:
    """Deletes the source shards of one conversion as they become superfluous.

    Used as a context manager: while it is open no other run may consume the same source.

    Args:
        checkpoint: The source; `require_consumable` has passed.
        plan: The plan.
        journal: The journal of the destination, started.
    """

    def __init__(self, checkpoint: Checkpoint, plan: Plan, journal: Journal) -> None:
        self._checkpoint, self._journal = checkpoint, journal
        self._plans = {shard.name: shard for shard in plan.shards}
        self._users: dict[str, set[str]] = {name: set() for name in checkpoint.shards}
        used: set[str] = set()
        for shard in plan.shards:
            for source in (s for step in shard.steps for s in step.sources):
                self._users[source.shard].add(shard.name)
                used.add(source.name)
        # A tensor that no step reads would vanish; its shard stays.
        for tensor in checkpoint.tensors.values():
            if tensor.name not in used:
                self._users.pop(tensor.shard, None)
        self._gone = {n for n in stand_ins(journal) if not os.path.lexists(checkpoint.root / n)}
        self._proved: set[str] = set()
        self._fd = -1
        #: Names of the shards that this run deleted.
        self.deleted: list[str] = []

    def __enter__(self) -> Consumer:
        self._fd = os.open(self._checkpoint.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            problem = "another run is consuming this source"
            raise Refused(finding("src.consume", self._checkpoint.root.name, problem)) from None
        except OSError:
            pass  # No locks on this file system.
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def room(self, todo: Sequence[ShardPlan], jobs: int) -> int:
        """Return how many bytes the file system of both must have free at the worst moment."""
        left = {name: users & {s.name for s in todo} for name, users in self._users.items()}
        balance = peak = 0
        for shard in todo:
            balance += shard.file_bytes
            peak = max(peak, balance)
            for name, users in left.items():
                if shard.name in users:
                    users.discard(shard.name)
                    balance -= 0 if users else self._checkpoint.shards[name].size
        # Other workers write their shards meanwhile.
        return peak + (jobs - 1) * max((s.file_bytes for s in todo), default=0)

    def examine(self, todo: Sequence[ShardPlan], limits: Limits, jobs: int, progress: Progress) -> None:
        """Look at every value that is still to be converted, before anything is deleted.

        Raises:
            Refused: values that must not or may not be converted; nothing was deleted by this run.
        """
        path = self._journal.path / _EXAMINED
        names = [shard.name for shard in todo]
        if _was_examined(path, names, limits):
            return
        slim = {name: replace(shard, tensors=()) for name, shard in self._checkpoint.shards.items()}
        tasks = []
        for shard in todo:
            read = {source.shard for step in shard.steps for source in step.sources}
            tasks.append((shard.name, _Task(shard, {n: slim[n] for n in read}, limits)))
        findings: list[Finding] = []
        if jobs == 1 or len(tasks) == 1:
            for _, task in tasks:
                findings += _examine(task, progress)
        else:
            run_all(_examine, tasks, jobs, findings.extend, progress)
        if findings:
            raise Refused(findings)
        state = {"limits": asdict(limits), "shards": names}
        write_bytes(path, self._journal.path, json.dumps(state).encode())

    def offer(self, record: ShardRecord) -> None:
        """Prove a finished shard, then delete every source shard that nothing needs any more.

        Raises:
            EnvironmentFault: the shard does not read back; nothing was deleted for it.
            Refused: a source shard is not the file that was planned.
        """
        shard = self._plans[record.shard]
        if all(n in self._gone for n, users in self._users.items() if shard.name in users):
            return  # Proved by an earlier run.
        if not is_proved(self._journal.root / shard.name, shard, record):
            problem = "does not read back as it was written; its source was not deleted"
            raise EnvironmentFault(finding("io.write", shard.name, problem))
        self._proved.add(shard.name)
        for name, users in self._users.items():
            if name not in self._gone and shard.name in users and users <= self._proved:
                self._delete(name)

    def _delete(self, name: str) -> None:
        planned = self._checkpoint.shards[name]
        keep_stand_in(self._journal, planned)
        try:
            status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            found = status.st_size, status.st_mtime_ns, status.st_ino
            same = found == (planned.size, planned.mtime_ns, planned.inode)
            if not (same and stat.S_ISREG(status.st_mode) and status.st_nlink == 1):
                problem = "is not the file that was planned; it was not deleted"
                raise Refused(finding("src.changed", name, problem))
            os.unlink(name, dir_fd=self._fd)
            os.fsync(self._fd)
        except OSError as error:
            raise write_fault(error, self._checkpoint.root / name) from error
        self._gone.add(name)
        self.deleted.append(name)
