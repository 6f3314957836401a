"""The writing half of the conversion pipeline: one thread that hashes and writes what another produced.

While the producer reads and transforms the next strip, the sink's thread hashes and writes the last one, so
a conversion costs about the slower of the two. Every tensor gets an XXH3-128 of its stored bytes as they
pass; nothing is read back.
"""

from __future__ import annotations

import errno
import hashlib
import os
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

import xxhash

_UNSUPPORTED: Final = frozenset(
    {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM, errno.ETXTBSY}
)

Task = Callable[[], None]


class Sink:
    """Buffers go out empty with `take`, come back filled with `write`, and reach the file in order.

    Not more than `buffers` strips are in flight, which bounds the memory. An error of the writing thread is
    raised in the producer by the next call.

    Args:
        fd: Writable file descriptor; every write names its offset.
        buffers: Number of strips in flight.
        size: Bytes of each.
    """

    def __init__(self, fd: int, buffers: int, size: int) -> None:
        self._fd = fd
        self._pool: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        for _ in range(buffers):
            self._pool.put(bytearray(size))
        # Copies hold no buffer, so the queue has a limit of its own.
        self._tasks: queue.Queue[Task | None] = queue.Queue(maxsize=2 * buffers)
        self._hashes: dict[str, xxhash.xxh3_128] = {}
        self._error: BaseException | None = None
        self._copy = _KernelCopy(fd)
        self._thread = threading.Thread(target=self._run, name="sink", daemon=True)
        self._thread.start()

    def take(self) -> bytearray:
        """Return a free buffer; waits until the writer has finished with one."""
        self._raise_error()
        return self._pool.get()

    def write(self, tensor: str, buffer: bytearray, count: int, offset: int) -> None:
        """Hash and write the first `count` bytes of a buffer from `take`, then make it free again."""

        def task() -> None:
            try:
                if not self._error:
                    self._store(tensor, memoryview(buffer)[:count], offset)
            finally:
                self._pool.put(buffer)

        self._submit(task)

    def write_small(self, tensor: str, data: bytes, offset: int) -> None:
        """Hash and write bytes that the caller does not touch again."""
        self._submit(lambda: None if self._error else self._store(tensor, memoryview(data), offset))

    def copy(self, source_fd: int, source_offset: int, offset: int, count: int) -> None:
        """Copy bytes from another file without passing them through this process; not hashed."""
        self._submit(lambda: None if self._error else self._copy(source_fd, source_offset, offset, count))

    def hash(self, tensor: str, data: memoryview) -> None:
        """Hash bytes of a tensor that is copied; for the producer's thread, in order."""
        self._hashes.setdefault(tensor, xxhash.xxh3_128()).update(data)

    def finish(self) -> dict[str, str]:
        """Wait until everything is written.

        Returns:
            Tensor name -> XXH3-128 of its stored bytes, 32 hex digits.

        Raises:
            OSError: a write failed.
        """
        self._stop()
        self._raise_error()
        return {name: digest.hexdigest() for name, digest in self._hashes.items()}

    def abort(self) -> None:
        """Drop what is not written yet and end the thread."""
        self._error = self._error or InterruptedError("aborted")
        self._stop()

    def _stop(self) -> None:
        if self._thread.is_alive():
            self._tasks.put(None)
            self._thread.join()

    def _submit(self, task: Task) -> None:
        self._raise_error()
        self._tasks.put(task)

    def _raise_error(self) -> None:
        if self._error:
            raise self._error

    def _store(self, tensor: str, view: memoryview, offset: int) -> None:
        self._hashes.setdefault(tensor, xxhash.xxh3_128()).update(view)
        while view:
            count = os.pwrite(self._fd, view, offset)
            view, offset = view[count:], offset + count

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except BaseException as error:
                # Later tasks only give their buffers back, so that the producer never waits for ever.
                self._error = self._error or error


class Discard(Sink):
    """Takes everything and keeps nothing, for a pass that only looks at values."""

    def __init__(self, buffers: int, size: int) -> None:
        super().__init__(-1, buffers, size)

    def copy(self, source_fd: int, source_offset: int, offset: int, count: int) -> None:
        """Copy nothing."""

    def hash(self, tensor: str, data: memoryview) -> None:
        """Hash nothing."""

    def _store(self, tensor: str, view: memoryview, offset: int) -> None:
        return


class _KernelCopy:
    """Copy between files inside the kernel, by the best call this pair of file systems supports."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._methods: list[Callable[[int, int, int, int], int]] = [
            self._range,
            self._sendfile,
            self._through,
        ]

    def __call__(self, source_fd: int, source_offset: int, offset: int, count: int) -> None:
        while count:
            done = self._some(source_fd, source_offset, offset, count)
            source_offset, offset, count = source_offset + done, offset + done, count - done

    def _some(self, source_fd: int, source_offset: int, offset: int, count: int) -> int:
        while len(self._methods) > 1:
            with suppress(_Unsupported):
                return self._try(source_fd, source_offset, offset, count)
            del self._methods[0]
        return self._methods[0](source_fd, source_offset, offset, count)

    def _try(self, source_fd: int, source_offset: int, offset: int, count: int) -> int:
        try:
            done = self._methods[0](source_fd, source_offset, offset, count)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                raise _Unsupported from error
            raise
        # Some file systems answer zero instead of an error.
        if not done:
            raise _Unsupported
        return done

    def _range(self, source_fd: int, source_offset: int, offset: int, count: int) -> int:
        if not hasattr(os, "copy_file_range"):
            raise _Unsupported
        return os.copy_file_range(source_fd, self._fd, count, source_offset, offset)

    def _sendfile(self, source_fd: int, source_offset: int, offset: int, count: int) -> int:
        os.lseek(self._fd, offset, os.SEEK_SET)
        return os.sendfile(self._fd, source_fd, source_offset, count)

    def _through(self, source_fd: int, source_offset: int, offset: int, count: int) -> int:
        data = os.pread(source_fd, min(count, 1 << 20), source_offset)
        if not data:
            raise OSError(errno.EIO, "the source ends too early")
        return os.pwrite(self._fd, data, offset)


class _Unsupported(Exception):
    """This way of copying does not work between these two files."""


def shard_digest(header: bytes, tensors: Mapping[str, str]) -> str:
    """Return the digest of a shard from its parts.

    XXH3-128 over the header bytes (length, JSON, padding) followed by the 16 raw digest bytes of every
    tensor in data order. Tensors can be written in any order and verified one by one, and still a single
    number covers the file.

    Args:
        header: First bytes of the file up to the tensor data.
        tensors: Tensor name -> hex XXH3-128, in data order.
    """
    digest = xxhash.xxh3_128(header)
    for value in tensors.values():
        digest.update(bytes.fromhex(value))
    return digest.hexdigest()


def file_sha256(fd: int) -> str:
    """Return the SHA-256 of a whole open file; for small files."""
    digest = hashlib.sha256()
    offset = 0
    while chunk := os.pread(fd, 1 << 20, offset):
        digest.update(chunk)
        offset += len(chunk)
    return digest.hexdigest()
