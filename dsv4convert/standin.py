"""What stays of a source shard that `convert --consume` deleted: header and identity, in the journal.

With these stand-ins the same source can be planned again, so an interrupted conversion continues although
some of its shards are gone. A stand-in is on disk before its shard is deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from dsv4convert.errors import EnvironmentFault, Refused, errors_of, finding
from dsv4convert.header import Shard, ShardReader, parse_header
from dsv4convert.journal import Journal
from dsv4convert.writer import write_bytes

_LENGTH_BYTES = 8


def keep_stand_in(journal: Journal, shard: Shard) -> None:
    """Write the stand-in of a shard that is about to be deleted, and read it back.

    Raises:
        Refused: the shard is not the one that was planned.
        EnvironmentFault: it cannot be read, written or read back.
    """
    raw = bytearray(shard.data_start - _LENGTH_BYTES)
    with ShardReader({shard.name: shard}) as reader:
        reader.pread_into(shard.name, _LENGTH_BYTES, memoryview(raw))
    if hashlib.sha256(raw).hexdigest() != shard.header_sha256:
        raise Refused(
            finding("src.changed", shard.name, "its header changed since the conversion was planned")
        )
    state = {
        "path": os.fspath(shard.path),
        "size": shard.size,
        "mtime_ns": shard.mtime_ns,
        "inode": shard.inode,
        "header": raw.decode(),
    }
    folder = _folder(journal)
    folder.mkdir(exist_ok=True)
    path = folder / f"{shard.name}.json"
    write_bytes(path, journal.path, json.dumps(state).encode())
    if _read(path) != shard:
        problem = "what was kept of a source shard does not read back; the shard was not deleted"
        raise EnvironmentFault(finding("io.write", path.name, problem))


def stand_ins(journal: Journal) -> Mapping[str, Shard]:
    """Return the shards that were deleted, or were about to be, by name.

    Raises:
        Refused: a stand-in is damaged.
    """
    folder = _folder(journal)
    shards = [_read(path) for path in sorted(folder.glob("*.json"))] if os.path.isdir(folder) else []
    return {shard.name: shard for shard in shards}


def _folder(journal: Journal) -> Path:
    return journal.path / "consumed"


def _read(path: Path) -> Shard:
    name = path.name.removesuffix(".json")
    try:
        state = json.loads(path.read_bytes())
        identity = Path(state["path"]), int(state["size"]), int(state["mtime_ns"]), int(state["inode"])
        shard, faults = parse_header(state["header"].encode(), name, *identity)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        shard, faults = None, ()
    if shard is None or errors_of(faults):
        problem = "what was kept of this consumed source shard cannot be read"
        raise Refused(finding("src.consumed", name, problem))
    return shard
