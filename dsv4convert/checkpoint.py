"""One checkpoint directory: config, index, shards, what lies beside them, and whether they agree.

`open_checkpoint` reads headers and small JSON files only and never stops at the first problem. One fault
gives one finding: what follows from a missing or broken shard is not reported again. No model knowledge:
names, dtypes and shapes are taken as they are.

Source: Hugging Face ``model.safetensors.index.json``, cache and ``--local-dir`` layouts.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4convert.errors import Dsv4Error, EnvironmentFault, Finding, Refused, finding
from dsv4convert.files import open_regular, printable, read_start
from dsv4convert.header import Shard, ShardReader, TensorInfo
from dsv4convert.listing import CONFIG, INDEX, walk_names
from dsv4convert.opening import Opening

__all__ = ["CONFIG", "INDEX", "Checkpoint", "Shard", "ShardReader", "TensorInfo", "open_checkpoint"]

_HASH = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint directory as it lies on disk.

    Attributes:
        root: Real path of the directory.
        config: Parsed ``config.json``, key order kept; empty if it cannot be read.
        config_bytes: The same file byte for byte.
        shards: Shards with a sound header by name, sorted: those of the index, or without a readable
            index all that lie there.
        tensors: Tensors of these shards by name, in shard and data order.
        weight_map: Tensor name -> shard name, entries with an impossible shard name left out.
        total_size: ``metadata.total_size`` of the index if it is an integer.
        side_files: Non-weight files to copy, relative posix paths, sorted.
        findings: Everything wrong, errors first.
        revision: Commit hash of the download, if the Hugging Face client left it.
    """

    root: Path
    config: Mapping[str, Any]
    config_bytes: bytes
    shards: Mapping[str, Shard]
    tensors: Mapping[str, TensorInfo]
    weight_map: Mapping[str, str]
    total_size: int | None
    side_files: tuple[str, ...]
    findings: tuple[Finding, ...]
    revision: str | None

    def reader(self) -> ShardReader:
        """Return a reader of the shards' bytes, to be used as a context manager."""
        return ShardReader(self.shards)

    def read(self, name: str) -> bytearray:
        """Return the stored bytes of one small tensor.

        Raises:
            KeyError: no such tensor.
            EnvironmentFault: reading failed.
        """
        tensor = self.tensors[name]
        data = bytearray(tensor.nbytes)
        with self.reader() as reader:
            reader.pread_into(tensor, 0, memoryview(data))
        return data


def open_checkpoint(path: str | os.PathLike[str], gone: Mapping[str, Shard] | None = None) -> Checkpoint:
    """Read a checkpoint directory without its tensor data.

    Args:
        path: The directory; may be a Hugging Face cache snapshot full of links.
        gone: Shards that a conversion deleted after it had used them; they count as present.

    Returns:
        The checkpoint with every finding about config, index, shards and side files. Check
        ``errors_of(checkpoint.findings)`` before relying on it.

    Raises:
        Refused: ``dir.not-found``; there is no directory.
        EnvironmentFault: ``file.unreadable``; the directory cannot be listed.
    """
    state = Opening(_root(path), gone=gone or {})
    with _collector_paused():
        state.list_files()
        config, config_bytes = state.load_config()
        state.load_index()
        state.read_shards()
        state.check_tensors()
        state.check_total_size()
        state.check_side_files()
        state.report_leftovers()
    return Checkpoint(
        root=state.root,
        config=config,
        config_bytes=config_bytes,
        shards=state.shards,
        tensors=state.tensors,
        weight_map=state.weight_map,
        total_size=state.total_size,
        side_files=tuple(state.files["side"]),
        findings=tuple(sorted(state.findings, key=lambda f: f.severity != "error")),
        revision=_revision(state.root, path),
    )


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep the cyclic collector from walking 10^5 tensors again and again: a third of the run time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _root(path: str | os.PathLike[str]) -> Path:
    shown = printable(os.fspath(path))
    if not os.path.isdir(path):
        problem = "is not a directory" if os.path.lexists(path) else "does not exist"
        raise Refused(finding("dir.not-found", shown, problem))
    try:
        os.scandir(path).close()
    except OSError as error:
        raise EnvironmentFault(
            finding("file.unreadable", shown, f"cannot be listed: {error.strerror}")
        ) from None
    return Path(os.path.realpath(path))


def _revision(root: Path, path: str | os.PathLike[str]) -> str | None:
    """Return the commit that the download client recorded, if there is exactly one."""
    for place in (root, Path(os.path.abspath(path))):
        if place.parent.name == "snapshots" and _HASH.fullmatch(place.name):
            return place.name
    commits = set()
    for folder, name in walk_names(root / ".cache" / "huggingface" / "download"):
        if name.endswith(".metadata"):
            commits.add(_first_line(os.path.join(folder, name), name))
    commit = commits.pop() if len(commits) == 1 else ""
    return commit if _HASH.fullmatch(commit) else None


def _first_line(path: str, name: str) -> str:
    try:
        fd, _ = open_regular(path, name)
        try:
            return read_start(fd, 256, name).partition(b"\n")[0].decode("ascii", "replace").strip()
        finally:
            os.close(fd)
    except Dsv4Error:
        return ""
