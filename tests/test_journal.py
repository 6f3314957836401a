"""The state of an unfinished destination: what is believed and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4convert.checkpoint import open_checkpoint
from dsv4convert.errors import EnvironmentFault, Refused
from dsv4convert.journal import Journal, ShardRecord, require_space
from dsv4convert.plan import Plan, plan

Sample = Callable[[str], Path]


@pytest.fixture
def made(sample: Sample) -> Plan:
    """Return a plan with several shards."""
    return plan(open_checkpoint(sample("short")))


@pytest.fixture
def journal(tmp_path: Path, made: Plan) -> Journal:
    """Return a started journal with the record of one shard, whose file is there."""
    journal = Journal(tmp_path / "out")
    journal.start(made, Path("/source"))
    shard = made.shards[0]
    path = journal.root / shard.name
    path.write_bytes(shard.header + bytes(shard.data_bytes))
    status = path.stat()
    journal.record(
        ShardRecord(
            shard=shard.name,
            file_bytes=shard.file_bytes,
            digest="d" * 32,
            tensors={"embed.weight": "0" * 32},
            figures={},
            rounded=({"code": "value.inexact", "tensor": "t", "found": "x"},),
            mtime_ns=status.st_mtime_ns,
            inode=status.st_ino,
        )
    )
    return journal


def test_record_of_an_unchanged_shard_is_believed(journal: Journal, made: Plan) -> None:
    found = journal.done(made.shards[0])
    assert found is not None
    assert (found.digest, dict(found.tensors)) == ("d" * 32, {"embed.weight": "0" * 32})
    assert found.rounded[0]["code"] == "value.inexact"
    assert journal.done(made.shards[1]) is None


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _truncate_and_hide(path: Path) -> None:
    before = path.stat()
    _truncate(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _grow(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"x")


def _touch(path: Path) -> None:
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))


def _poke_header(path: Path) -> None:
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(20)
        file.write(b"#")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


FAULTS: list[Callable[[Path], object]] = [_truncate, _truncate_and_hide, _grow, _touch, _poke_header]


@pytest.mark.parametrize("fault", [*FAULTS, Path.unlink], ids=lambda f: f.__name__.strip("_"))
def test_record_of_a_shard_that_changed_is_not_believed(
    journal: Journal, made: Plan, fault: Callable[[Path], object]
) -> None:
    fault(journal.root / made.shards[0].name)
    assert journal.done(made.shards[0]) is None


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"{}", b'{"shard": "x"}', b'{"unknown": 1}', b"\xff"]
)
def test_record_that_cannot_be_read_is_not_believed(journal: Journal, made: Plan, text: bytes) -> None:
    name = made.shards[0].name
    (journal.path / f"{name}.done.json").write_bytes(text)
    assert journal.done(made.shards[0]) is None


def test_record_of_another_plan_is_not_believed(journal: Journal, made: Plan) -> None:
    other = replace(made.shards[0], header=made.shards[0].header.replace(b"int8", b"mxf4"))
    assert journal.done(other) is None


def test_journal_of_the_same_plan_is_joined(journal: Journal, made: Plan) -> None:
    journal.start(made, Path("/elsewhere"))
    assert journal.done(made.shards[0]) is not None
    state = journal.read()
    assert state is not None and state["source"] == "/source"


def test_journal_of_another_plan_is_refused(journal: Journal, sample: Sample) -> None:
    other = plan(open_checkpoint(sample("short")), "mxfp4")
    with pytest.raises(Refused) as caught:
        journal.start(other, Path("/source"))
    (found,) = caught.value.findings
    assert (found.code, found.problem) == ("dst.other-plan", "holds shards of another plan")


def test_journal_of_replaced_source_files_is_refused_with_the_reason(journal: Journal, made: Plan) -> None:
    with pytest.raises(Refused) as caught:
        journal.start(replace(made, resume_key="other"), Path("/source"))
    (found,) = caught.value.findings
    assert (found.code, found.problem) == (
        "dst.other-plan",
        "was begun with other source files: size, time or inode of a shard changed since",
    )


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"digest": 1}', b"\xff\xfe"])
def test_journal_that_cannot_be_read_is_refused(journal: Journal, made: Plan, text: bytes) -> None:
    (journal.path / "plan.json").write_bytes(text)
    with pytest.raises(Refused) as caught:
        journal.start(made, Path("/source"))
    assert [f.code for f in caught.value.findings] == ["dst.other-plan"]


def test_destination_with_foreign_files_is_refused(tmp_path: Path, made: Plan) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(Refused) as caught:
        Journal(tmp_path).start(made, Path("/source"))
    assert [(f.code, f.found) for f in caught.value.findings] == [("dst.not-empty", "`precious.txt`")]
    assert [p.name for p in tmp_path.iterdir()] == ["precious.txt"]


def test_destination_that_is_a_file_is_refused(tmp_path: Path, made: Plan) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(Refused) as caught:
        Journal(tmp_path / "file").start(made, Path("/source"))
    (found,) = caught.value.findings
    assert (found.code, found.problem) == ("dst.not-empty", "the destination is not a directory")
    assert (tmp_path / "file").read_text() == "x"


def test_journal_directory_without_a_plan_is_what_a_crash_leaves_and_is_taken_over(
    tmp_path: Path, made: Plan
) -> None:
    (tmp_path / ".dsv4convert").mkdir()
    Journal(tmp_path).start(made, Path("/source"))
    assert json.loads((tmp_path / ".dsv4convert" / "plan.json").read_bytes())["digest"] == made.digest


def test_temporary_files_of_dead_processes_are_swept_and_others_kept(journal: Journal, made: Plan) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    host = os.uname().nodename
    dead = journal.path / f"a.safetensors.{host}.{child.pid}.tmp"
    kept = [
        journal.path / f"a.safetensors.{host}.{os.getpid()}.tmp",
        journal.path / f"a.safetensors.other-{host}.{child.pid}.tmp",
        journal.path / f"a.safetensors.{host}.not-a-pid.tmp",
    ]
    for path in (dead, *kept):
        path.write_bytes(b"x")
    journal.start(made, Path("/source"))
    assert sorted(journal.path.glob("*.tmp")) == sorted(kept)


def test_finish_leaves_the_shards_only(journal: Journal, made: Plan) -> None:
    journal.finish()
    assert [p.name for p in journal.root.iterdir()] == [made.shards[0].name]
    assert journal.read() is None


def test_space_that_is_not_there_is_a_fault_with_both_numbers(tmp_path: Path) -> None:
    require_space(tmp_path / "not" / "yet", 1)
    with pytest.raises(EnvironmentFault) as caught:
        require_space(tmp_path / "not" / "yet", 1 << 60)
    (found,) = caught.value.findings
    assert (found.code, found.expected) == ("dst.no-space", f"{1 << 60:,} bytes free")
    assert not (tmp_path / "not").exists()
