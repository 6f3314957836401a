"""The writing thread: order, hashes, copies without copy_file_range, and errors that surface."""

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

from dsv4convert.sink import Sink, file_sha256, shard_digest

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


# ---- copies


def _raises(number: int) -> Callable[..., int]:
    def call(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


WAYS: dict[str, dict[str, Any]] = {
    "copy_file_range": {},
    "sendfile": {"copy_file_range": _raises(errno.EXDEV)},
    "range-says-zero": {"copy_file_range": lambda *a: 0},
    "range-unknown": {"copy_file_range": _raises(errno.ENOSYS)},
    "through": {"copy_file_range": _raises(errno.EXDEV), "sendfile": _raises(errno.EINVAL)},
    "through-after-zero": {"copy_file_range": lambda *a: 0, "sendfile": lambda *a: 0},
}


def copied(tmp_path: Path, out: int, count: int = 3 << 20) -> bytes:
    """Copy a piece of a file into the middle of another one; return the other one."""
    (tmp_path / "in").write_bytes(np.arange(count // 4 + 100, dtype="<u4").tobytes())
    source = os.open(tmp_path / "in", os.O_RDONLY)
    try:
        sink = Sink(out, 1, 16)
        sink.write_small("head", b"HEAD", 0)
        sink.copy(source, 8, 4, count)
        sink.write_small("tail", b"TAIL", 4 + count)
        sink.finish()
    finally:
        os.close(source)
    return (tmp_path / "out").read_bytes()


@pytest.mark.parametrize("way", WAYS)
def test_copy_gives_the_same_bytes_whatever_the_file_system_supports(
    tmp_path: Path, out: int, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    for name, call in WAYS[way].items():
        monkeypatch.setattr(os, name, call)
    data = copied(tmp_path, out)
    assert data == b"HEAD" + (tmp_path / "in").read_bytes()[8 : 8 + (3 << 20)] + b"TAIL"


def test_copy_without_copy_file_range_in_the_library_gives_the_same_bytes(
    tmp_path: Path, out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "copy_file_range")
    assert copied(tmp_path, out)[4:-4] == (tmp_path / "in").read_bytes()[8 : 8 + (3 << 20)]


def test_copy_that_fails_half_way_continues_in_the_next_way(
    tmp_path: Path, out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.copy_file_range, []

    def once(source: int, target: int, count: int, start: int, offset: int) -> int:
        calls.append(count)
        if len(calls) > 1:
            raise OSError(errno.EXDEV, "other file system")
        return real(source, target, min(count, 12_345), start, offset)

    monkeypatch.setattr(os, "copy_file_range", once)
    assert copied(tmp_path, out)[4:-4] == (tmp_path / "in").read_bytes()[8 : 8 + (3 << 20)]
    assert len(calls) == 2


@pytest.mark.parametrize("way", ["copy_file_range", "sendfile", "through"])
def test_copy_beyond_the_end_of_the_source_is_an_error(
    tmp_path: Path, out: int, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    for name, call in WAYS[way].items():
        monkeypatch.setattr(os, name, call)
    (tmp_path / "in").write_bytes(b"short")
    source = os.open(tmp_path / "in", os.O_RDONLY)
    try:
        sink = Sink(out, 1, 16)
        sink.copy(source, 0, 0, 10)
        error = within(20, sink.finish)
    finally:
        os.close(source)
    assert isinstance(error, OSError) and error.errno == errno.EIO


def test_hash_of_copied_tensors_is_taken_from_the_producer(out: int) -> None:
    sink = Sink(out, 1, 16)
    sink.hash("t", memoryview(b"ab"))
    sink.hash("t", memoryview(b"c"))
    assert sink.finish() == {"t": xxhash.xxh3_128_hexdigest(b"abc")}


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


@pytest.mark.parametrize("call", ["take", "write_small", "copy", "finish"])
def test_error_surfaces_in_the_next_call_whichever_it_is(
    out: int, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(os, "pwrite", _raises(errno.EIO))
    sink = Sink(out, 1, 16)
    sink.write_small("t", b"x", 0)
    arguments: tuple[Any, ...] = {"write_small": ("u", b"y", 1), "copy": (out, 0, 0, 1)}.get(call, ())
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


def test_sha256_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    with open(tmp_path / "a", "rb") as file:
        found = file_sha256(file.fileno())
    assert found == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
