"""Files that appear under their name only when they are whole."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4convert.errors import EnvironmentFault
from dsv4convert.writer import PendingFile, measure_write_speed, sync_directory, write_bytes, write_fault


@pytest.fixture
def umask() -> Iterator[None]:
    """Restore the umask after the test."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def codes(fault: EnvironmentFault) -> list[str]:
    return [f.code for f in fault.findings]


def test_file_appears_under_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with PendingFile(tmp_path / "a.bin", scratch, 5) as pending:
        os.write(pending.fd, b"whole")
        assert not (tmp_path / "a.bin").exists()
        assert pending.path.name == f"a.bin.{socket.gethostname()}.{os.getpid()}.tmp"
        assert pending.path.parent == scratch
    assert (tmp_path / "a.bin").read_bytes() == b"whole"
    assert list(scratch.iterdir()) == []


def test_file_is_synced_before_it_is_renamed_and_its_directory_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(fd: int) -> None:
        calls.append("sync directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "sync file")
        fsync(fd)

    def noted_replace(source: Path, target: Path) -> None:
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    write_bytes(tmp_path / "a", tmp_path, b"x")
    assert calls == ["sync file", "rename", "sync directory"]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(143)])
def test_file_that_is_given_up_leaves_nothing_and_keeps_the_old_one(
    tmp_path: Path, error: BaseException
) -> None:
    (tmp_path / "a.bin").write_bytes(b"old")
    with pytest.raises(type(error)), PendingFile(tmp_path / "a.bin", tmp_path) as pending:
        os.write(pending.fd, b"new")
        raise error
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"a.bin": b"old"}


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
@pytest.mark.usefixtures("umask")
def test_mode_of_a_file_follows_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    os.umask(mask)
    write_bytes(tmp_path / "a", tmp_path, b"x")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == mode


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "dst.no-space"),
        (errno.EDQUOT, "dst.no-space"),
        (errno.EFBIG, "dst.no-space"),
        (errno.EACCES, "dst.not-writable"),
        (errno.EROFS, "dst.not-writable"),
        (errno.EIO, "io.write"),
    ],
)
def test_failed_write_becomes_a_finding_that_names_the_file(tmp_path: Path, number: int, code: str) -> None:
    with (
        pytest.raises(EnvironmentFault) as caught,
        PendingFile(tmp_path / "model.safetensors", tmp_path, 1_234_567),
    ):
        raise OSError(number, os.strerror(number))
    (found,) = caught.value.findings
    assert (found.code, found.where) == (code, "model.safetensors")
    if number in (errno.ENOSPC, errno.EDQUOT):
        assert found.expected == "1,234,567 bytes for this file"
        assert found.found.endswith("bytes free")
    assert list(tmp_path.iterdir()) == []


def test_failed_sync_removes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delayed allocation reports a full disk only here."""

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvironmentFault) as caught:
        write_bytes(tmp_path / "a", tmp_path, b"x")
    assert codes(caught.value) == ["dst.no-space"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
def test_interrupt_during_the_sync_removes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Most of the time of a write passes in fsync, so this is where a signal arrives."""

    def interrupted(fd: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(type(error)):
        write_bytes(tmp_path / "a", tmp_path, b"x")
    assert list(tmp_path.iterdir()) == []


def test_failed_rename_removes_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(EnvironmentFault) as caught:
        write_bytes(tmp_path / "a", tmp_path, b"x")
    assert codes(caught.value) == ["io.write"]
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_file_in_a_directory_that_is_gone_is_an_environment_fault(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        write_bytes(tmp_path / "a", tmp_path / "gone", b"x")
    assert codes(caught.value) == ["io.write"]


def test_fault_of_a_directory_that_is_gone_says_so_without_a_number(tmp_path: Path) -> None:
    fault = write_fault(OSError(errno.ENOSPC, "full"), tmp_path / "gone" / "a")
    assert fault.findings[0].found == "an unknown amount"
    assert fault.findings[0].expected == "room for this file"


def test_directory_that_cannot_be_synced_is_left_alone(tmp_path: Path) -> None:
    sync_directory(tmp_path / "gone")


def test_measured_speed_is_a_number_and_leaves_nothing(tmp_path: Path) -> None:
    assert measure_write_speed(tmp_path / "not" / "yet", size=4 << 20) > 0
    assert list(tmp_path.iterdir()) == []
