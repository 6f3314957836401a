"""Shards on their way to disk: header bytes, data order, temporary sibling, fsync, rename.

What is written is the stock safetensors file: compact JSON, tensors ordered by dtype (widest rank first)
and then by name, header padded with spaces to a multiple of 8, data without gaps. Nothing appears under
its final name before every byte of it is on disk.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from dsv4convert.errors import EnvironmentFault, finding
from dsv4convert.formats.spec import DTYPE_BITS, Shape, nbytes

#: Version of everything this module and the transforms decide about output bytes.
WRITER_VERSION = "1"

_quote = json.encoder.encode_basestring
_RANK = {dtype: rank for rank, dtype in enumerate(DTYPE_BITS)}

Entry = tuple[str, str, Shape]  # name, dtype, stored shape


def in_data_order(entries: Iterable[Entry]) -> list[Entry]:
    """Return entries in the order in which the stock serializer stores them."""
    by_dtype: dict[str, list[Entry]] = {}
    for entry in entries:
        by_dtype.setdefault(entry[1], []).append(entry)
    # Names are unique, so entries of one dtype sort by name alone.
    return [
        e for dtype in sorted(by_dtype, key=_RANK.__getitem__, reverse=True) for e in sorted(by_dtype[dtype])
    ]


def encode_header(entries: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the first bytes of a shard: length, JSON header and padding.

    Args:
        entries: Tensors in data order.
        metadata: Content of ``__metadata__``; left out when empty or None.

    Returns:
        The 8-byte little-endian header length and the header; tensor data follows directly.
    """
    rows = [f'"__metadata__":{_compact(dict(metadata))}'] if metadata else []
    # Written out by hand, and each (dtype, shape) once: the generic encoder takes half of the time of a plan.
    kinds: dict[tuple[str, Shape], tuple[int, str]] = {}
    offset = 0
    for name, dtype, shape in entries:
        kind = kinds.get((dtype, shape))
        if kind is None:
            sides = ",".join(map(str, shape))
            text = f'{{"dtype":"{dtype}","shape":[{sides}],"data_offsets":['
            kind = kinds[dtype, shape] = nbytes(dtype, shape), text
        end = offset + kind[0]
        rows.append(f"{_quote(name)}:{kind[1]}{offset},{end}]}}")
        offset = end
    header = ("{" + ",".join(rows) + "}").encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def write_fault(error: OSError, path: Path, needed: int = 0) -> EnvironmentFault:
    """Turn a failed write into an error that names the file and says what to do."""
    if error.errno == errno.EFBIG:
        problem, found = "the file size limit was reached", "see `ulimit -f`"
        return EnvironmentFault(finding("dst.no-space", path.name, problem, found=found))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        need = f"{needed:,} bytes for this file" if needed else "room for this file"
        return EnvironmentFault(
            finding(
                "dst.no-space", path.name, "no space left while writing", expected=need, found=_free(path)
            )
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return EnvironmentFault(finding("dst.not-writable", path.name, error.strerror or "not permitted"))
    return EnvironmentFault(finding("io.write", path.name, f"writing failed: {error.strerror or error}"))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn failed writes below `path` into errors that name it.

    Raises:
        EnvironmentFault: a write failed.
    """
    try:
        yield
    except OSError as error:
        raise write_fault(error, path) from error


def _free(path: Path) -> str:
    try:
        status = os.statvfs(path.parent)
    except OSError:
        return "an unknown amount"
    return f"{status.f_bavail * status.f_frsize:,} bytes free"


class PendingFile:
    """A file that gets its final name only when it is complete and on disk.

    Used as a context manager: leaving it normally publishes the file, leaving it by an exception removes
    the temporary sibling. Two processes writing the same file do not disturb each other.

    Args:
        final: The name the file will have.
        scratch: Directory for the temporary sibling, on the same file system.
        size: Size in bytes, for the sentence that says how much room was needed.

    Raises:
        EnvironmentFault: the file cannot be created or published.
    """

    def __init__(self, final: Path, scratch: Path, size: int = 0) -> None:
        self.final = final
        self.size = size
        self.path = scratch / f"{final.name}.{socket.gethostname()}.{os.getpid()}.tmp"
        self.fd = -1

    def __enter__(self) -> PendingFile:
        try:
            # Mode 0666 lets the umask decide, unlike tempfile and safetensors, which write 0600.
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise write_fault(error, self.path) from error
        return self

    def write(self, data: bytes) -> None:
        """Append bytes, all of them."""
        view = memoryview(data)
        while view:
            view = view[os.write(self.fd, view) :]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self._publish()
            except BaseException as fault:  # An interrupt, too: most of the time passes in fsync.
                self._discard()
                if isinstance(fault, OSError):
                    raise write_fault(fault, self.final, self.size) from fault
                raise
            return
        self._discard()
        if isinstance(error, OSError):
            raise write_fault(error, self.final, self.size) from error

    def _publish(self) -> None:
        os.fsync(self.fd)
        os.close(self.fd)
        self.fd = -1
        os.replace(self.path, self.final)
        sync_directory(self.final.parent)

    def _discard(self) -> None:
        if self.fd >= 0:
            with suppress(OSError):
                os.close(self.fd)
            self.fd = -1
        with suppress(OSError):
            self.path.unlink()


def write_bytes(final: Path, scratch: Path, data: bytes) -> None:
    """Write a small file atomically.

    Raises:
        EnvironmentFault: it cannot be written.
    """
    with PendingFile(final, scratch, len(data)) as pending:
        pending.write(data)


def sync_directory(path: Path) -> None:
    """Make a rename durable; file systems that cannot sync a directory are left alone."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def measure_write_speed(directory: Path, size: int = 256 << 20) -> float:
    """Write and sync a temporary file and return bytes per second; the file is removed at once.

    Args:
        directory: Where to write; the nearest existing parent is used.
        size: Bytes to write.

    Raises:
        EnvironmentFault: nothing can be written there.
    """
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    path = place / f".dsv4convert-speed.{os.getpid()}.tmp"
    block = memoryview(os.urandom(4 << 20))
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            started = time.perf_counter()
            for _ in range(size // len(block)):
                os.write(fd, block)
            os.fsync(fd)
            return size / (time.perf_counter() - started)
        finally:
            os.close(fd)
            path.unlink()
    except OSError as error:
        raise write_fault(error, path, size) from error
