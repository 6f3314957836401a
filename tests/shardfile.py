"""Build and read safetensors files by hand, without the package under test and without torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

Row = tuple[str, str, tuple[int, ...], bytes]

#: Bits per element, typed here a second time so that the tests do not judge a table by itself.
BITS = {"BOOL": 8, "F4": 4, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E5M2": 8, "I16": 16, "U16": 16}
BITS |= {"F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64}


def row(name: str, dtype: str = "BF16", shape: tuple[int, ...] = (2, 4), fill: int = 0) -> Row:
    """Return a row whose bytes fit its dtype and shape."""
    return name, dtype, shape, bytes([fill]) * (prod(shape) * BITS[dtype] // 8)


def header_of(rows: Iterable[Row]) -> dict[str, Any]:
    """Return the header entries of rows stored one after another."""
    entries, position = {}, 0
    for name, dtype, shape, data in rows:
        end = position + len(data)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    return entries


def write_raw(path: Path, header: Mapping[str, Any] | str | bytes, data: bytes = b"") -> None:
    """Write a shard from a literal header, padded to 8 bytes if it is given as an object."""
    if isinstance(header, Mapping):
        header = json.dumps(header, separators=(",", ":"))
        header += " " * (-len(header.encode()) % 8)
    raw = header.encode() if isinstance(header, str) else header
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def write_shard(path: Path, rows: Iterable[Row], metadata: Mapping[str, str] | None = None) -> None:
    """Write rows in the given order as a valid safetensors file."""
    rows = list(rows)
    head: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    write_raw(path, head | header_of(rows), b"".join(data for *_, data in rows))


def rows(path: Path) -> list[Row]:
    """Read every row of a valid safetensors file, in header order."""
    raw = path.read_bytes()
    base = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:base])
    header.pop("__metadata__", None)
    return [
        (name, e["dtype"], tuple(e["shape"]), raw[base + e["data_offsets"][0] : base + e["data_offsets"][1]])
        for name, e in header.items()
    ]
