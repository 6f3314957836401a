"""The writing thread: order, hashes, and errors that surface."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from dsv4convert.sink import Sink, shard_digest

SIZE = 1 << 16


@pytest.fixture
def out(tmp_path: Path) -> Iterator[int]:
    """Return the descriptor of an empty output file, `out`."""
    fd = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def within(seconds: float, action: Callable[[], Any]) -> Any:
    """Run something that may hang in a thread of its own; fail if it does."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(action())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert result, "still waiting: this would be a hang"
    return result[0]


def test_strips_of_several_tensors_reach_their_places_and_are_hashed(
    tmp_path: Path, out: int, rng: np.random.Generator
) -> None:
    """More strips than buffers, written to places in no order, hashed in the order they were given."""
    pieces = {name: [rng.bytes(SIZE - i) for i in range(7)] for name in ("a", "b")}
    sink = Sink(out, 2, SIZE)
    wanted = bytearray(14 * SIZE)
    for i in range(7):
        for slot, (name, parts) in enumerate(pieces.items()):
            buffer = sink.take()
            buffer[: len(parts[i])] = parts[i]
            place = (2 * (6 - i) + slot) * SIZE
            wanted[place : place + len(parts[i])] = parts[i]
            sink.write(name, buffer, len(parts[i]), place)
    os.ftruncate(out, 14 * SIZE)
    hashes = sink.finish()
    assert (tmp_path / "out").read_bytes() == bytes(wanted)
    assert hashes == {name: xxhash.xxh3_128_hexdigest(b"".join(parts)) for name, parts in pieces.items()}


def test_buffers_in_flight_are_bounded_and_come_back(out: int) -> None:
    sink = Sink(out, 2, 16)
    seen = set()
    for i in range(50):
        buffer = sink.take()
        seen.add(id(buffer))
        sink.write("t", buffer, 16, 16 * i)
    sink.finish()
    assert len(seen) == 2


def test_small_data_and_empty_tensors_are_written_and_hashed(tmp_path: Path, out: int) -> None:
    sink = Sink(out, 1, 16)
    sink.write_small("small", b"abc", 2)
    sink.write_small("empty", b"", 5)
    assert sink.finish() == {
        "small": xxhash.xxh3_128_hexdigest(b"abc"),
        "empty": "99aa06d3014798d86001c324468d497f",  # XXH3-128 of nothing
    }
    assert (tmp_path / "out").read_bytes() == b"\0\0abc"


def test_short_writes_are_continued(tmp_path: Path, out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, bytes(data[:7]), offset))
    sink = Sink(out, 1, 64)
    sink.write_small("t", bytes(range(60)), 0)
    sink.finish()
    assert (tmp_path / "out").read_bytes() == bytes(range(60))


def _raises(number: int) -> Callable[..., int]:
    def call(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


def test_bytes_hashed_by_the_caller_are_written_as_they_are(tmp_path: Path, out: int) -> None:
    sink = Sink(out, 1, 16)
    buffer = sink.take()
    buffer[:6] = b"abcdef"
    sink.hash("a", memoryview(buffer)[:2])
    sink.hash("b", memoryview(buffer)[2:6])
    sink.write(None, buffer, 6, 1)
    assert sink.finish() == {"a": xxhash.xxh3_128_hexdigest(b"ab"), "b": xxhash.xxh3_128_hexdigest(b"cdef")}
    assert (tmp_path / "out").read_bytes() == b"\0abcdef"


# ---- errors


def test_error_of_the_writing_thread_surfaces_in_the_producer_and_never_hangs(
    out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", _raises(errno.ENOSPC))

    def produce() -> None:
        sink = Sink(out, 2, 16)
        for i in range(1000):
            sink.write("t", sink.take(), 16, 16 * i)
        sink.finish()

    error = within(20, produce)
    assert isinstance(error, OSError) and error.errno == errno.ENOSPC


@pytest.mark.parametrize("call", ["take", "write_small", "finish"])
def test_error_surfaces_in_the_next_call_whichever_it_is(
    out: int, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(os, "pwrite", _raises(errno.EIO))
    sink = Sink(out, 1, 16)
    sink.write_small("t", b"x", 0)
    arguments: tuple[Any, ...] = {"write_small": ("u", b"y", 1)}.get(call, ())
    for _ in range(1000):  # Until the thread has met the error.
        error = within(20, lambda: getattr(sink, call)(*arguments))
        if isinstance(error, OSError):
            break
        time.sleep(0.001)
    assert isinstance(error, OSError) and error.errno == errno.EIO
    within(20, sink.abort)


def test_abort_ends_the_thread_and_drops_what_is_left(
    tmp_path: Path, out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, entered, real = threading.Event(), threading.Event(), os.pwrite

    def slow(fd: int, data: bytes, offset: int) -> int:
        entered.set()
        gate.wait(20)
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", slow)
    before = threading.active_count()
    sink = Sink(out, 2, 16)
    for i in range(4):
        sink.write_small("t", b"x", i)
    assert entered.wait(20)
    stopper = threading.Thread(target=sink.abort)
    stopper.start()
    while sink._error is None:
        time.sleep(0.001)
    gate.set()
    stopper.join(20)
    assert not stopper.is_alive()
    assert threading.active_count() == before
    assert (tmp_path / "out").read_bytes() == b"x"


# ---- digests of files


def test_shard_digest_is_one_number_over_header_and_tensor_hashes() -> None:
    parts = {"b": xxhash.xxh3_128_hexdigest(b"1"), "a": xxhash.xxh3_128_hexdigest(b"2")}
    wanted = xxhash.xxh3_128(b"HEADER" + b"".join(map(bytes.fromhex, parts.values()))).hexdigest()
    assert shard_digest(b"HEADER", parts) == wanted
    assert shard_digest(b"HEADER", dict(sorted(parts.items()))) != wanted, "data order counts"
