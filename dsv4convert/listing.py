"""What lies in a checkpoint directory, sorted by file name alone, and which of it can be copied.

Source: Hugging Face cache and ``--local-dir`` layouts, ModelScope downloads.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dsv4convert.errors import Dsv4Error, Finding, finding
from dsv4convert.files import check_disguise, listed, open_regular, printable, read_start

CONFIG: Final = "config.json"
INDEX: Final = "model.safetensors.index.json"
SUFFIX = ".safetensors"
_SKIPPED_DIRS = frozenset({".cache", ".git", "__pycache__"})
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")
_OTHER_WEIGHTS = (".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".npz", ".npy", ".tflite")
_PARTIAL = (".incomplete", ".aria2", ".part", ".crdownload")
_BOOKKEEPING = frozenset({".mdl", ".msc", ".mv"})  # left at the top by ModelScope downloads
#: Names of lists in the manner of `sha256sum`, which describe this directory and no copy of it.
CHECKSUM_LIST = re.compile(
    r"(?:sha256sums?|checksums?\.sha256)(?:\.txt)?|.+\.sha256(?:sums?)?", re.IGNORECASE
)
_BLOB = re.compile(r"[0-9a-fA-F]{40,}")


def _kind(rel: str) -> str:
    """Classify a file by its relative path alone."""
    name, low = rel.rpartition("/")[2], rel.lower()
    if rel in (CONFIG, INDEX):
        return rel
    if low.endswith(_PARTIAL) or "._____temp/" in rel:
        return "partial"
    if rel == "dsv4convert.json" or rel.startswith(".dsv4convert") or rel in _BOOKKEEPING:
        return "own"
    if name == rel and CHECKSUM_LIST.fullmatch(name):
        return "own"
    if rel == "hf_quant_config.json":
        return "quantization"
    if name.endswith(SUFFIX) and name == rel:
        return "shard"
    if low.endswith((SUFFIX, *_OTHER_WEIGHTS)) or f"{SUFFIX}." in name.lower():
        return "stray"
    return "pickle" if low.endswith(_PICKLES) else "side"


@dataclass
class Listing:
    """The files of one directory and the findings so far."""

    root: Path
    findings: list[Finding] = field(default_factory=list)
    files: dict[str, list[str]] = field(default_factory=dict)  # kind -> relative paths, sorted
    weight_map: dict[str, str] = field(default_factory=dict)

    def add(self, code: str, where: str, problem: str, **facts: str) -> None:
        """Note a finding."""
        self.findings.append(finding(code, printable(where), problem, **facts))

    def list_files(self) -> None:
        """Sort every file of the directory into `files`."""
        kinds = (CONFIG, INDEX, "shard", "stray", "pickle", "partial", "own", "quantization", "side")
        self.files = {kind: [] for kind in kinds}
        for rel in sorted(self._walk("")):
            self.files[_kind(rel)].append(rel)

    def _walk(self, base: str) -> Iterator[str]:
        """Yield files and links below `base`, and directories that bear the name of a model file.

        Only a checkpoint is searched further down: a mistyped path may be a whole home directory.
        """
        try:
            with os.scandir(self.root / base) as scan:
                entries = list(scan)
        except OSError as error:
            self.add("file.unreadable", f"{base}/", f"cannot be listed: {error.strerror}")
            return
        deeper = bool(base) or any(_kind(entry.name) in (CONFIG, INDEX, "shard") for entry in entries)
        for entry in entries:
            rel = f"{base}/{entry.name}" if base else entry.name
            if entry.name in _SKIPPED_DIRS:
                continue
            if entry.is_dir(follow_symlinks=False) and _kind(rel) not in (CONFIG, INDEX, "shard"):
                if deeper:
                    yield from self._walk(rel)
            else:
                yield rel

    def link_fault(self, rel: str) -> bool:
        """Report a link that is dangling or leaves the directory; return whether it did."""
        path = self.root / rel
        if not os.path.islink(path):
            return False
        target = Path(os.path.realpath(path))
        found = f"a link to `{printable(target)}`"
        if _is_dangling(path):
            self.add("file.dangling-link", rel, "is a symbolic link to a file that is not there", found=found)
            return True
        blob = _BLOB.fullmatch(target.name) and "blobs" in target.parts[:-1]
        if blob or target.is_relative_to(self.root):
            return False
        self.add("file.outside-link", rel, "is a symbolic link that leaves the model directory", found=found)
        return True

    def check_side_files(self) -> None:
        """Look at the first bytes of every file that would be copied; drop those that cannot be."""
        sound = []
        for rel in self.files["side"]:
            if self.link_fault(rel) or os.path.isdir(self.root / rel):
                continue
            try:
                fd, _ = open_regular(self.root / rel, rel)
                try:
                    check_disguise(read_start(fd, 256, rel), rel, markup=rel.endswith(".json"))
                finally:
                    os.close(fd)
                sound.append(rel)
            except Dsv4Error as fault:
                self.findings += fault.findings
        self.files["side"] = sound

    def report_leftovers(self) -> None:
        """Name everything that is no part of the checkpoint."""
        if self.files["quantization"]:
            self.add(
                "side.other-quantization", "hf_quant_config.json", "a second quantization config is present"
            )
        if self.files["shard"] or self.weight_map:
            for rel in self.files["pickle"]:
                self.add("file.pickle", rel, "is a pickle file; it is neither opened nor copied")
        for rel in self.files["stray"]:
            self.add("file.stray", rel, "is a weight file outside the checkpoint; it is not copied")
        partial = [*self.files["partial"], *_partial_downloads(self.root)]
        if partial:
            names = listed(partial, len(partial))
            self.add(
                "file.incomplete", partial[0], f"{len(partial):,} unfinished downloads are left: {names}"
            )


def _is_dangling(path: Path) -> bool:
    try:
        os.stat(path)
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
    return False


def walk_names(base: Path) -> Iterator[tuple[str, str]]:
    """Yield (folder, file name) below `base`, sorted; nothing if it cannot be listed."""
    for folder, folders, names in os.walk(base):
        folders.sort()
        yield from ((folder, name) for name in sorted(names))


def _partial_downloads(root: Path) -> list[str]:
    """Return unfinished pieces that a download client left in its own folders."""
    found = [
        os.path.join(os.path.relpath(d, root), n)
        for d, n in walk_names(root / ".cache")
        if n.endswith(_PARTIAL)
    ]
    if root.parent.name == "snapshots":  # the cache keeps pieces beside the blobs
        blobs = root.parent.parent / "blobs"
        found += [f"blobs/{name}" for _, name in walk_names(blobs) if name.endswith(_PARTIAL)]
    return found
