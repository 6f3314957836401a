"""One shard: open the file, prove that its safetensors header is sound, return what it declares.

The parser is our own and stricter than the stock one: it refuses repeated keys, foreign entry keys and
names that cannot be written as text, and it names the tensor and the numbers. Unknown dtypes do not
disable the other checks. Nothing here knows the index, the model or the terminal, and no tensor data is read.

Beside the parser lives `ShardReader`, the one way to the stored bytes.

Source: safetensors 0.8 format description (length as u64, JSON, data without holes).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, NoReturn

from dsv4convert.errors import Dsv4Error, EnvironmentFault, Finding, finding
from dsv4convert.files import (
    check_disguise,
    fail,
    listed,
    open_regular,
    parse_json,
    printable,
    quoted,
    read_start,
)
from dsv4convert.formats.spec import DTYPE_BITS

#: The limit of the stock reader; a longer header could not be served, so it is refused here.
MAX_HEADER_BYTES: Final = 100_000_000
#: Numbers of elements and bits beyond this do not fit the integers of the runtimes.
MAX_COUNT: Final = 2**63

_LENGTH_BYTES = 8
_FAST_END = MAX_COUNT // 8  # a tensor that ends before has fewer than MAX_COUNT bits
_HEAD_BYTES = 512
_KEYS = ("dtype", "shape", "data_offsets")
_DTYPES = {dtype: (dtype, bits) for dtype, bits in DTYPE_BITS.items()}  # parsed string -> shared string, bits


class TensorInfo(NamedTuple):
    """One tensor as its shard declares it.

    Attributes:
        name: Tensor name.
        dtype: safetensors dtype string.
        shape: Stored shape.
        shard: File name of the shard, without path.
        start: Absolute offset of the first byte in the shard file.
        end: Absolute offset after the last byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Stored size in bytes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard file with a sound header.

    Attributes:
        name: File name, without path.
        path: Real path of the file, links resolved.
        size: File size in bytes.
        data_start: Absolute offset of the first data byte.
        header_sha256: SHA-256 of the JSON header with its padding, hex.
        metadata: ``__metadata__`` of the header; empty if absent.
        tensors: Tensors in data order.
        mtime_ns: Modification time when the header was read.
        inode: Inode number when the header was read.
    """

    name: str
    path: Path
    size: int
    data_start: int
    header_sha256: str
    metadata: Mapping[str, str]
    tensors: tuple[TensorInfo, ...]
    mtime_ns: int
    inode: int


_Row = tuple[int, int, str, str, list[int], int | None]  # start, end, name, dtype, shape, bits per element


def read_header(path: str | os.PathLike[str], name: str) -> tuple[Shard | None, tuple[Finding, ...]]:
    """Read and check the header of one shard.

    Args:
        path: Where the shard lies; links are followed.
        name: Its file name, used in messages and in `TensorInfo.shard`.

    Returns:
        The shard and its findings. A sound shard has none. The shard is also returned, with findings,
        if the header is sound but the file is too short or too long or uses an unknown dtype; otherwise
        it is None. Findings: ``file.*``, ``shard.*``, ``io.read``; one fault gives one finding.
    """
    try:
        fd, status = open_regular(path, name)
        try:
            raw = _header_bytes(fd, status.st_size, name)
        finally:
            os.close(fd)
    except Dsv4Error as fault:
        return None, fault.findings
    real = Path(os.path.realpath(path))
    return parse_header(raw, name, real, status.st_size, status.st_mtime_ns, status.st_ino)


def parse_header(
    raw: bytes, name: str, path: Path, size: int, mtime_ns: int, inode: int
) -> tuple[Shard | None, tuple[Finding, ...]]:
    """Check the JSON header of a shard; the other facts are taken as they are. See `read_header`."""
    try:
        metadata, rows = _parse(raw, name)
    except Dsv4Error as fault:
        return None, fault.findings
    rows.sort(key=itemgetter(0, 1))
    findings = _dtype_findings(rows, name)
    if (layout := _layout_fault(rows, name)) is not None:
        return None, (*findings, layout)
    base = _LENGTH_BYTES + len(raw)
    findings += _size_findings(size, base + (rows[-1][1] if rows else 0), name)
    tensors = tuple(
        TensorInfo(tensor, dtype, tuple(shape), name, base + start, base + end)
        for start, end, tensor, dtype, shape, _ in rows
    )
    digest = hashlib.sha256(raw).hexdigest()
    return Shard(name, path, size, base, digest, metadata, tensors, mtime_ns, inode), findings


def _header_bytes(fd: int, size: int, name: str) -> bytes:
    """Return the JSON header, after everything that can be said without parsing it."""
    head = read_start(fd, min(_HEAD_BYTES, size), name)
    if len(head) < _LENGTH_BYTES:
        what = "is too short to hold a header" if head else "is empty"
        fail("shard.truncated", name, what, "at least 8 bytes", f"{len(head)} bytes")
    check_disguise(head, name)
    length = int.from_bytes(head[:_LENGTH_BYTES], "little")
    if not 0 < length <= MAX_HEADER_BYTES:
        _no_header(head, length, name)
    end = _LENGTH_BYTES + length
    raw = read_start(fd, length, name, _LENGTH_BYTES) if size >= end else b""
    if len(raw) < length:
        fail(
            "shard.truncated",
            name,
            "file ends inside its header",
            f"at least {end:,} bytes",
            f"{size:,} bytes",
        )
    return raw


def _no_header(head: bytes, length: int, name: str) -> NoReturn:
    """Say what a file without a possible header length looks like."""
    if not head.strip(b"\0"):
        problem = "begins with zero bytes: its space was reserved but its content never written"
        fail("shard.header", name, problem, found=f"{len(head)} zero bytes")
    if head[:_LENGTH_BYTES].decode("latin-1").isprintable():
        fail("shard.header", name, "begins with text, not with a header length", found=quoted(head))
    expected = f"a header length of 1 to {MAX_HEADER_BYTES:,} bytes"
    fail("shard.header", name, "has an impossible header length", expected, f"{length:,} bytes")


def _parse(raw: bytes, name: str) -> tuple[dict[str, str], list[_Row]]:
    """Return the metadata and the entries of a header, each checked by itself."""
    if raw[:1] != b"{":
        fail("shard.header", name, "header does not begin with `{`", found=quoted(raw))
    header, _ = parse_json(raw, name, "shard.header", find_repeats=False)
    strings = 1 if "__metadata__" in header else 0
    metadata = header.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        fail("shard.header", name, "`__metadata__` of the header is not an object of strings")
    if "" in header:
        fail("shard.header", name, "header holds a tensor with an empty name")
    rows = [_row(tensor, entry, name) for tensor, entry in header.items()]
    # A repeated key was dropped by the parser, but its quotes are still in the text: a name, three keys
    # and a dtype per entry account for all of them unless something was dropped or a quote is escaped.
    strings += 2 * len(metadata) + 5 * len(rows)
    if b"\\" in raw or raw.count(b'"') != 2 * strings:
        _, repeated = parse_json(raw, name, "shard.header")
        if repeated:
            fail("shard.duplicate-key", name, f"header repeats the key {listed(repeated, len(repeated))}")
        _check_text([*header, *metadata, *metadata.values()], name)
    return metadata, rows


def _check_text(texts: Iterable[str], name: str) -> None:
    """Refuse what only an escape can bring into JSON text."""
    for text in texts:
        if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
            fail(
                "shard.header",
                name,
                "header holds text with NUL or lone surrogates",
                found=f"`{printable(text)}`",
            )


def _row(tensor: str, entry: Any, shard: str) -> _Row:
    """Check types and keys of one header entry."""
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        _bad_entry(tensor, entry, shard)
    if not (type(dtype) is str and type(shape) is list and type(start) is int and type(end) is int):
        _bad_entry(tensor, entry, shard)
    for size in shape:
        if type(size) is not int or size < 0:
            _bad_entry(tensor, entry, shard)
    if start < 0 or end < 0 or len(entry) != 3:
        _bad_entry(tensor, entry, shard)
    dtype, bits = _DTYPES.get(dtype) or (dtype, None)
    return start, end, tensor, dtype, shape, bits


def _bad_entry(tensor: str, entry: Any, shard: str) -> NoReturn:
    label = f"`{printable(tensor)}`"
    if not isinstance(entry, dict) or sorted(entry) != sorted(_KEYS):
        found = listed(entry, len(entry)) if isinstance(entry, dict) else type(entry).__name__
        expected = "exactly `dtype`, `shape`, `data_offsets`"
        fail("shard.header", shard, f"header entry of {label} has the wrong keys", expected, found or "none")
    expected = "a string, a list of non-negative integers and two non-negative integers"
    values = ", ".join(f"`{k}` {printable(entry[k], 60)}" for k in _KEYS)
    fail("shard.header", shard, f"header entry of {label} has wrong values", expected, values)


def _dtype_findings(rows: list[_Row], shard: str) -> tuple[Finding, ...]:
    """Return one finding per unknown dtype."""
    unknown: dict[str, list[str]] = {}
    for row in rows:
        if row[5] is None:
            unknown.setdefault(row[3], []).append(row[2])
    return tuple(
        finding(
            "shard.dtype",
            printable(shard),
            f"unknown dtype `{printable(dtype)}` of {listed(names, len(names))}",
        )
        for dtype, names in unknown.items()
    )


def _layout_fault(rows: list[_Row], shard: str) -> Finding | None:
    """Return the first fault of the data layout; later ones would be its consequences."""
    position, before = 0, ""
    for start, end, tensor, dtype, shape, bits in rows:
        count = prod(shape)
        if bits and count and start == position <= end < _FAST_END and count * bits == (end - start) * 8:
            position, before = end, tensor
            continue
        problem, expected = _row_problem(start, end, position, before, dtype, shape, bits)
        if problem:
            where, found = printable(shard), f"[{start:,}, {end:,}]"
            return finding(
                "shard.offsets", where, f"`{printable(tensor)}` {problem}", expected=expected, found=found
            )
        position, before = end, tensor
    return None


def _row_problem(
    start: int, end: int, position: int, before: str, dtype: str, shape: list[int], bits: int | None
) -> tuple[str, str]:
    """Return what is wrong with one range and what would be right; two empty strings if nothing is."""
    if start > position:
        return f"leaves a gap of {start - position:,} bytes in the data", f"a start of {position:,}"
    if start < position:
        return f"overlaps `{printable(before)}`", f"a start of {position:,}"
    if end < start:
        return "ends before it starts", f"an end of at least {start:,}"
    count = 1
    for size in shape:
        count *= size
        if max(count, size) * (bits or 1) >= MAX_COUNT:
            return f"has an impossible shape {printable(shape, 100)}", "fewer than 2^63 bits"
    if bits is None or count * bits == (end - start) * 8:
        return "", ""
    label = f"{dtype} {printable(shape, 100)}"
    if count * bits % 8:
        return f"does not fill whole bytes: {label}", "a multiple of 8 bits"
    return f"has the wrong size for {label}", f"{count * bits // 8:,} bytes"


def _size_findings(size: int, needed: int, shard: str) -> tuple[Finding, ...]:
    """Compare the file size with the end of the data."""
    if size == needed:
        return ()
    code, problem = ("shard.truncated", "shorter") if size < needed else ("shard.trailing-bytes", "longer")
    problem = f"file is {problem} than its header declares by {abs(needed - size):,} bytes"
    return (finding(code, printable(shard), problem, expected=f"{needed:,} bytes", found=f"{size:,} bytes"),)


class ShardReader:
    """Exact positioned reads from shards; opens each file once, never maps memory.

    Not tied to a thread: concurrent `pread_into` calls on shards that are already open are safe.
    """

    def __init__(self, shards: Mapping[str, Shard]) -> None:
        self._shards = shards
        self._fds: dict[str, int] = {}

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every file."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def fileno(self, shard: str) -> int:
        """Return the file descriptor of a shard; it stays owned by the reader.

        Raises:
            KeyError: no such shard.
            EnvironmentFault: the file cannot be opened any more.
        """
        if shard not in self._fds:
            try:
                self._fds[shard] = open_regular(self._shards[shard].path, shard)[0]
            except Dsv4Error as fault:
                raise EnvironmentFault(fault.findings) from None
        return self._fds[shard]

    def pread_into(self, source: TensorInfo | str, start: int, view: memoryview) -> None:
        """Fill `view` with stored bytes.

        Args:
            source: A tensor, or the name of a shard.
            start: First byte, counted from the start of the tensor or of the shard file.
            view: Writable, contiguous, of single bytes.

        Raises:
            KeyError: no such shard.
            ValueError: the range leaves the tensor.
            EnvironmentFault: ``io.read``, with file and offset.
        """
        if isinstance(source, TensorInfo):
            if start < 0 or start + len(view) > source.nbytes:
                raise ValueError(f"bytes {start}..{start + len(view)} leave `{source.name}`")
            start += source.start
        shard = source.shard if isinstance(source, TensorInfo) else source
        fd, done = self.fileno(shard), 0
        while done < len(view):
            try:
                count = os.preadv(fd, [view[done:]], start + done)
                reason = "the file ends here"
            except OSError as error:
                count, reason = 0, error.strerror or "input/output error"
            if not count:
                problem = f"reading failed at byte {start + done:,}: {reason}"
                raise EnvironmentFault(finding("io.read", printable(shard), problem))
            done += count
