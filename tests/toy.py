"""Toy checkpoints: made once per session, copied for each test, and a handle that breaks a copy in one place.

A handle speaks of shards by number and of tensors by name; every change keeps the rest of the file sound, so
that what a check reports is the fault that was meant and nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from dsv4convert.convert import convert
from dsv4convert.synth import Recipe, synthesize
from tests.shardfile import Row, rows, write_raw, write_shard

CONFIG: Final = "config.json"
INDEX: Final = "model.safetensors.index.json"
MANIFEST: Final = "dsv4convert.json"

_FLASH = "deepseek-v4-flash-0731"
#: Name of a toy -> what to synthesize. One shard per layer: 3 trunk layers and 3 draft stages make 8 shards.
_OFFICIAL: Mapping[str, Recipe] = {
    "0731": Recipe(_FLASH, "tiny", layers=3, experts=4),
    "other-seed": Recipe(_FLASH, "tiny", layers=3, experts=4, seed=1),
    "ragged": Recipe(_FLASH, "tiny", layers=3, experts=2, ragged=True),
    "preview": Recipe("deepseek-v4-flash", "tiny", layers=3, experts=2),
    "vision": Recipe("deepseek-v4-flash-vision-exp", "tiny", layers=3, experts=2),
    "v4.1": Recipe("deepseek-v4.1-flash", "tiny", layers=3, experts=2),
    "release": Recipe(_FLASH, "full"),
}
#: Name of a converted toy -> the official one it comes from, and its layout.
_CONVERTED: Mapping[str, tuple[str, str]] = {
    "int8": ("0731", "int8"),
    "mxfp4": ("0731", "mxfp4"),
    "ragged-int8": ("ragged", "int8"),
}


class Toy:
    """A checkpoint directory and the ways to break it.

    Attributes:
        root: The directory.
        ref: For a converted toy the official one it was made from, not to be changed.
        out: Where a conversion of it goes.
    """

    def __init__(self, root: Path, ref: Path | None = None) -> None:
        self.root = root
        self.ref = ref or root
        self.out = root.parent / "out"

    def S(self, number: int) -> Path:
        """Return the path of a shard, counted from 1."""
        return sorted(self.root.glob("model-*.safetensors"))[number - 1]

    @property
    def weight_map(self) -> dict[str, str]:
        """Tensor name -> shard name, as the index says."""
        mapping: dict[str, str] = self.read(INDEX)["weight_map"]
        return mapping

    def where(self, name: str) -> Path:
        """Return the path of the shard that the index names for a tensor."""
        return self.root / self.weight_map[name]

    def read(self, name: str) -> Any:
        """Return a parsed JSON file."""
        return json.loads((self.root / name).read_bytes())

    def put(self, name: str, content: bytes | str) -> None:
        """Write a file of the directory."""
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_bytes(content.encode() if isinstance(content, str) else content)

    def json(self, name: str, change: Callable[[Any], object]) -> None:
        """Change a JSON file in place."""
        value = self.read(name)
        change(value)
        self.put(name, json.dumps(value, indent=2))

    def cfg(self, change: Callable[[Any], object]) -> None:
        """Change ``config.json``."""
        self.json(CONFIG, change)

    def idx(self, change: Callable[[Any], object]) -> None:
        """Change the index."""
        self.json(INDEX, change)

    def row(self, name: str) -> Row:
        """Return name, dtype, shape and bytes of a tensor."""
        return next(r for r in rows(self.where(name)) if r[0] == name)

    def poke(self, name: str, offset: int, data: bytes) -> None:
        """Overwrite stored bytes of a tensor; the size of the file stays."""
        path = self.where(name)
        base, header = _head(path)
        start, end = header[name]["data_offsets"]
        assert start + offset + len(data) <= end, "the bytes leave the tensor"
        with open(path, "r+b") as file:
            file.seek(base + start + offset)
            file.write(data)

    def flip(self, name: str, offset: int = 0, mask: int = 0x01) -> None:
        """Flip bits of one stored byte of a tensor."""
        self.poke(name, offset, bytes([self.row(name)[3][offset] ^ mask]))

    def edit(self, name: str, change: Callable[[Row], list[Row]]) -> None:
        """Replace one row of a shard by others (none, one or several); the index is left as it is."""
        self.rewrite(self.where(name), lambda r: change(r) if r[0] == name else [r])

    def rewrite(self, path: Path, change: Callable[[Row], list[Row]]) -> None:
        """Map every row of a shard to a list of rows; metadata is kept."""
        metadata = _head(path)[1].get("__metadata__")
        write_shard(path, [new for old in rows(path) for new in change(old)], metadata)

    def remap(self, change: Callable[[Row], list[Row]]) -> None:
        """Map every row of every shard and write an index that fits."""
        for path in sorted(self.root.glob("model-*.safetensors")):
            self.rewrite(path, change)
        self.reindex()

    def reindex(self) -> None:
        """Write the index that fits the shards."""
        weight_map, total = {}, 0
        for path in sorted(self.root.glob("model-*.safetensors")):
            for name, _, _, data in rows(path):
                weight_map[name] = path.name
                total += len(data)
        self.put(INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))

    def drop(self, *names: str) -> None:
        """Remove tensors from their shards and from the index."""
        for path in {self.where(name) for name in names}:
            self.rewrite(path, lambda r: [] if r[0] in names else [r])
        self.reindex()

    def move(self, name: str, target: Path) -> None:
        """Move a tensor into another shard; the index follows."""
        row = self.row(name)
        self.edit(name, lambda r: [])
        metadata = _head(target)[1].get("__metadata__")
        write_shard(target, [*rows(target), row], metadata)
        self.reindex()

    def rawhdr(self, number: int, header: Mapping[str, Any], data: bytes) -> None:
        """Replace a shard by one with a literal header."""
        write_raw(self.S(number), header, data)

    def flatten(self) -> None:
        """Give all experts one scale, so that only what a test pokes afterwards has to be rounded."""
        for path in sorted(self.root.glob("model-*.safetensors")):
            self.rewrite(path, lambda r: [(*r[:3], b"\x79" * len(r[3])) if _is_expert_scale(r[0]) else r])

    def tensors(self) -> dict[str, Row]:
        """Return every tensor of every shard by name."""
        return {r[0]: r for path in sorted(self.root.glob("*.safetensors")) for r in rows(path)}

    def result(self) -> Toy:
        """Return a handle on the conversion of this toy."""
        return Toy(self.out, self.root)


def _is_expert_scale(name: str) -> bool:
    return ".ffn.experts." in name and name.endswith(".scale")


def _head(path: Path) -> tuple[int, dict[str, Any]]:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return 8 + length, json.loads(file.read(length))


class Toybox:
    """Makes each toy once and hands out copies.

    Args:
        shelf: Directory for the originals.
    """

    def __init__(self, shelf: Path) -> None:
        self._shelf = shelf

    def original(self, name: str) -> Path:
        """Return the directory of a toy that nobody may change."""
        path = self._shelf / name
        if not path.exists():
            if name in _CONVERTED:
                source, layout = _CONVERTED[name]
                convert(self.original(source), path, experts=layout)
            else:
                synthesize(path, _OFFICIAL[name])
        return path

    def copy(self, name: str, place: Path) -> Toy:
        """Copy a toy to ``place/name``; shards of a true-size release stay links to the sparse originals."""
        source, target = self.original(name), place / name
        shutil.copytree(source, target, copy_function=os.link if name == "release" else shutil.copyfile)
        if name == "release":
            # The config is what tests change; it must not be the original's.
            shutil.copyfile(source / CONFIG, place / CONFIG)
            os.replace(place / CONFIG, target / CONFIG)
        return Toy(target, self.original(_CONVERTED[name][0]) if name in _CONVERTED else None)
