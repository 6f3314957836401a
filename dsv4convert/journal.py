"""The state of an unfinished destination: what was planned, which shards are done.

A destination under construction holds a directory `.dsv4convert` with the resume key of the plan, one record
per finished shard and the temporary files. A record is written after its shard has its final name, and
believed only while the shard still is the file it describes. `finish` removes the directory; a complete
checkpoint has none.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsv4convert.errors import EnvironmentFault, Finding, Refused, finding
from dsv4convert.files import VOLUME
from dsv4convert.plan import Plan, ShardPlan
from dsv4convert.writer import write_bytes, write_fault

DIRECTORY = ".dsv4convert"
INDEX = "model.safetensors.index.json"
MANIFEST = "dsv4convert.json"


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """What was written for one shard.

    Attributes:
        shard: File name.
        file_bytes: Its size.
        digest: `sink.shard_digest` of it.
        tensors: Tensor name -> XXH3-128 of the stored bytes, in data order.
        figures: Weight name without suffix -> exactness figures.
        rounded: Findings accepted by ``--allow-rounding``, as dicts.
        mtime_ns: Modification time of the finished file, to notice a later change.
        inode: Its inode.
    """

    shard: str
    file_bytes: int
    digest: str
    tensors: Mapping[str, str]
    figures: Mapping[str, Mapping[str, Any]]
    rounded: tuple[Mapping[str, str], ...]
    mtime_ns: int
    inode: int


class Journal:
    """The `.dsv4convert` directory of a destination.

    Args:
        root: The destination.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / DIRECTORY

    def start(self, plan: Plan, source: Path) -> None:
        """Create the journal, or join the one of the same plan.

        Raises:
            Refused: the destination is in use by something else, or by another plan.
            EnvironmentFault: it cannot be written.
        """
        if self.admit(plan) is None:
            self.begin(plan, source)
        self._sweep()

    def admit(self, plan: Plan) -> dict[str, Any] | None:
        """Return what was planned here if this plan continues it; None if nothing was.

        Raises:
            Refused: the destination is in use by something else, or by another plan.
        """
        known = self.read()
        if known is None:
            self._refuse_occupied(plan)
        elif known["resume_key"] != plan.resume_key:
            same_decisions = known["digest"] == plan.digest
            if same_decisions:
                problem = "was begun with other source files: size, time or inode of a shard changed since"
                raise Refused(finding("dst.other-plan", self.root.name, problem))
            problem = "holds shards of another plan"
            expected, found = f"plan `{plan.digest[:12]}`", f"`{str(known['digest'])[:12]}`"
            raise Refused(finding("dst.other-plan", self.root.name, problem, expected=expected, found=found))
        return known

    def begin(self, plan: Plan, source: Path) -> None:
        """Create the journal of a plan, whatever else lies in the destination.

        Raises:
            EnvironmentFault: it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_fault(error, self.root) from error
        state = {
            "resume_key": plan.resume_key,
            "digest": plan.digest,
            "layout": plan.layout.value,
            "source": os.fspath(source),
        }
        write_bytes(self.path / "plan.json", self.path, json.dumps(state, indent=1).encode())

    @contextmanager
    def held(self, *, shared: bool) -> Iterator[None]:
        """Keep other runs out of the destination; jobs of an array share it among themselves.

        Raises:
            EnvironmentFault: another run is at work here.
        """
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            problem = "another conversion is at work in this destination"
            hint = "wait for it, then run the same command again"
            raise EnvironmentFault(finding("dst.unfinished", self.root.name, problem, hint=hint)) from None
        except OSError:
            pass  # No locks on this file system; what both write is the same.
        try:
            yield
        finally:
            os.close(fd)

    def read(self) -> dict[str, Any] | None:
        """Return what was planned here, or None if no conversion was begun.

        Raises:
            Refused: the journal is damaged.
        """
        try:
            state = json.loads((self.path / "plan.json").read_bytes())
            if all(isinstance(state[key], str) for key in ("resume_key", "digest", "layout", "source")):
                return dict(state)
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            return None  # The destination itself is a file; `start` says so.
        except (OSError, ValueError, TypeError, KeyError):
            pass
        problem = f"`{DIRECTORY}/plan.json` cannot be read"
        raise Refused(finding("dst.other-plan", self.root.name, problem))

    def _refuse_occupied(self, plan: Plan) -> None:
        try:
            names = sorted(os.listdir(self.root))
        except FileNotFoundError:
            return
        except NotADirectoryError:
            raise Refused(
                finding("dst.not-empty", self.root.name, "the destination is not a directory")
            ) from None
        except OSError as error:
            raise write_fault(error, self.root) from error
        # A journal directory without plan.json is what a crash in the very first moment leaves.
        others = [n for n in names if n not in (DIRECTORY, VOLUME)]
        if others and self._finished() != plan.digest:
            problem = "the destination is not empty and no conversion was begun in it"
            if MANIFEST in others:
                problem = "the destination holds a finished conversion of another plan or source"
            raise Refused(finding("dst.not-empty", self.root.name, problem, found=f"`{others[0]}`"))

    def _finished(self) -> object:
        """Return the digest of the plan that was carried out here, if a manifest and an index say so."""
        try:
            manifest = json.loads((self.root / MANIFEST).read_bytes())
            return manifest["plan"]["digest"] if (self.root / INDEX).is_file() else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _sweep(self) -> None:
        """Remove temporary files of dead processes; a live writer of this machine keeps its own."""
        here = f".{os.uname().nodename}."
        for path in self.path.glob("*.tmp"):
            host, _, pid = path.name.removesuffix(".tmp").rpartition(".")
            if f"{host}.".endswith(here) and pid.isdecimal() and not _is_alive(int(pid)):
                with suppress(OSError):
                    path.unlink()

    def record(self, record: ShardRecord) -> None:
        """Note a shard as done."""
        data = json.dumps(asdict(record)).encode()
        write_bytes(self._record_path(record.shard), self.path, data)

    def _record_path(self, shard: str) -> Path:
        return self.path / f"{shard}.done.json"

    def recorded(self, name: str) -> ShardRecord | None:
        """Return the record of a shard, whatever became of the file."""
        try:
            return ShardRecord(**json.loads(self._record_path(name).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def done(self, shard: ShardPlan) -> ShardRecord | None:
        """Return the record of a shard if the file it describes is still there, unchanged."""
        record = self.recorded(shard.name)
        if record is None:
            return None
        try:
            status = os.stat(self.root / shard.name)
            header = _head(self.root / shard.name, len(shard.header))
        except OSError:
            return None
        unchanged = (status.st_size, status.st_mtime_ns) == (record.file_bytes, record.mtime_ns)
        planned = record.file_bytes == shard.file_bytes and header == shard.header
        return record if unchanged and planned else None

    def finish(self) -> None:
        """Remove the journal of a complete checkpoint."""
        # First what makes it a journal: half of one could not be continued.
        with suppress(OSError):
            (self.path / "plan.json").unlink()
        shutil.rmtree(self.path, ignore_errors=True)


def _head(path: Path, count: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(count)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def refuse_overlap(source: Path, root: Path) -> None:
    """Refuse a destination that is the source, or where one lies inside the other.

    Raises:
        Refused: so it is.
    """
    target = root.resolve()
    if target == source or source in target.parents or target in source.parents:
        problem, found = "source and destination overlap", os.fspath(target)
        raise Refused(finding("dst.inside-source", target.name, problem, found=found))


def destination_findings(root: Path, source: Path, plan: Plan) -> tuple[Finding, ...]:
    """Return why `convert` would refuse this destination; nothing is changed there."""
    try:
        refuse_overlap(source, root)
        Journal(root.resolve()).admit(plan)
    except Refused as refused:
        return refused.findings
    return ()


def require_space(root: Path, needed: int) -> None:
    """Refuse to begin what will not fit.

    Raises:
        EnvironmentFault: the file system of `root` has less than `needed` bytes free.
    """
    place = root
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        problem = "the destination file system is too small"
        expected, found = f"{needed:,} bytes free", f"{free:,}"
        raise EnvironmentFault(finding("dst.no-space", root.name, problem, expected=expected, found=found))
