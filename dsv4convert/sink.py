"""The writing half of the conversion pipeline: one thread that hashes and writes what another produced.

While the producer reads and transforms the next strip, the sink's thread hashes and writes the last one, so
a conversion costs about the slower of the two. Every tensor gets an XXH3-128 of its stored bytes as they
pass; nothing is read back.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping

import xxhash

Task = Callable[[], None]
Buffer = bytearray | memoryview


class Sink:
    """Buffers go out empty with `take`, come back filled with `write`, and reach the file in order.

    Not more than `buffers` strips are in flight, which bounds the memory. An error of the writing thread is
    raised in the producer by the next call.

    Args:
        fd: Writable file descriptor; every write names its offset.
        buffers: Number of strips in flight.
        size: Bytes of each.
        allocate: Makes a buffer of a size.
    """

    def __init__(
        self, fd: int, buffers: int, size: int, allocate: Callable[[int], Buffer] = bytearray
    ) -> None:
        self._fd = fd
        self._pool: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        for _ in range(buffers):
            self._pool.put(allocate(size))
        self._tasks: queue.Queue[Task | None] = queue.Queue(maxsize=2 * buffers)
        self._hashes: dict[str, xxhash.xxh3_128] = {}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="sink", daemon=True)
        self._thread.start()

    def take(self) -> Buffer:
        """Return a free buffer; waits until the writer has finished with one.

        The caller may hand a larger one to `write` in its place.
        """
        self._raise_error()
        return self._pool.get()

    def write(
        self,
        tensor: str | None,
        buffer: Buffer,
        count: int,
        offset: int,
        finish: Callable[[memoryview], None] | None = None,
    ) -> None:
        """Write the first `count` bytes of a buffer from `take`, then make it free again.

        The writing thread also hashes them as bytes of `tensor`, unless that is None because the caller has
        done so with `hash`. `finish` changes the bytes first, in the writing thread: it takes a share of the
        work when the caller is the slower one.
        """

        def task() -> None:
            try:
                if not self._error:
                    view = memoryview(buffer)[:count]
                    if finish:
                        finish(view)
                    self._store(tensor, view, offset)
            finally:
                self._pool.put(buffer)

        self._submit(task)

    def write_small(self, tensor: str, data: bytes, offset: int) -> None:
        """Hash and write bytes that the caller does not touch again."""
        self._submit(lambda: None if self._error else self._store(tensor, memoryview(data), offset))

    def hash(self, tensor: str, data: memoryview) -> None:
        """Hash bytes of a tensor in the caller's thread, in the order in which they are stored."""
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

    def _store(self, tensor: str | None, view: memoryview, offset: int) -> None:
        if tensor is not None:
            self.hash(tensor, view)
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

    def hash(self, tensor: str, data: memoryview) -> None:
        """Hash nothing."""

    def _store(self, tensor: str | None, view: memoryview, offset: int) -> None:
        return


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
