"""Whatever ends a conversion, the same command continues it and the result is the same."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4convert.convert import convert
from dsv4convert.errors import EnvironmentFault, Refused
from dsv4convert.journal import Journal, ShardRecord
from dsv4convert.validate import verify
from dsv4convert.workers import run_all
from tests.samples import INDEX, MANIFEST, tree
from tests.work import double, misbehave

ROOT = Path(__file__).parent.parent
HELD = Path(__file__).with_name("held.py")
SHARDS = 8
THIRD = "model-00003-of-00008.safetensors"
TIMEOUT = 120

Sample = Callable[[str], Path]


@pytest.fixture(scope="session")
def whole(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the tree of an uninterrupted conversion of the sample `short`."""
    target = tmp_path_factory.mktemp("whole") / "out"
    convert(sample("short"), target)
    return tree(target)


def shards(root: Path) -> list[str]:
    return sorted(p.name for p in root.glob("*.safetensors"))


def unfinished(root: Path) -> None:
    """Fail unless a directory is what an interrupted conversion may leave: whole shards and a journal."""
    assert not (root / INDEX).exists() and not (root / MANIFEST).exists()
    report = verify(root)
    assert [f.code for f in report.findings] == ["dst.unfinished"]
    outside = [p for p in root.rglob("*.tmp") if p.parent != root / ".dsv4convert"]
    assert outside == [], "a temporary file lies beside the shards"


# ---- stopped between and inside shards


@pytest.mark.parametrize("noted", [True, False], ids=["after-the-record", "before-the-record"])
@pytest.mark.parametrize("count", range(1, SHARDS + 1))
def test_run_stopped_at_any_shard_is_continued_to_the_same_bytes(
    sample: Sample,
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    noted: bool,
) -> None:
    """Also in the moment between rename and record, where a whole shard is there and not noted."""
    real, calls = Journal.record, []

    def record(self: Journal, done: ShardRecord) -> None:
        calls.append(done.shard)
        if len(calls) < count or noted:
            real(self, done)
        if len(calls) == count:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "record", record)
        with pytest.raises(KeyboardInterrupt):
            convert(sample("short"), tmp_path / "out")
    assert len(shards(tmp_path / "out")) == count
    unfinished(tmp_path / "out")
    result = convert(sample("short"), tmp_path / "out")
    kept = count if noted else count - 1
    assert (result.reused, result.written) == (kept, SHARDS - kept)
    assert tree(tmp_path / "out") == whole


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", MANIFEST, INDEX])
def test_run_stopped_while_closing_is_continued_to_the_same_bytes(
    sample: Sample, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        if Path(target).name == name:
            raise KeyboardInterrupt
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            convert(sample("short"), tmp_path / "out")
    assert not (tmp_path / "out" / INDEX).exists()
    result = convert(sample("short"), tmp_path / "out")
    assert (result.reused, result.written) == (SHARDS, 0)
    assert tree(tmp_path / "out") == whole


def test_run_stopped_between_index_and_clean_up_is_complete_at_the_next_run(
    sample: Sample, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(self: Journal) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "finish", finish)
        with pytest.raises(KeyboardInterrupt):
            convert(sample("short"), tmp_path / "out")
    assert convert(sample("short"), tmp_path / "out").written == 0
    assert tree(tmp_path / "out") == whole


# ---- real processes


def _hear_signals() -> None:
    """What starts tests in the background (`&`, `nohup`) has signals ignored, and that is inherited."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


class Held:
    """A real conversion that waits in the middle of shard 3, and what to do to it."""

    def __init__(self, source: Path, root: Path, jobs: int) -> None:
        self.out, self.marker = root / "out", root / "marker"
        arguments = ["convert", str(source), str(self.out), "--jobs", str(jobs), "-q"]
        self.process = subprocess.Popen(
            [sys.executable, str(HELD), THIRD, str(self.marker), "hold", *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_hear_signals,
        )

    def wait_until_held(self) -> int:
        """Return the id of the process that holds the shard."""
        end = time.monotonic() + TIMEOUT
        while not self.marker.exists():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < end, "the shard was never reached"
            time.sleep(0.02)
        return int(self.marker.read_text())

    def result(self) -> tuple[int, str]:
        """Return exit status and standard error; fail if the process hangs."""
        _, err = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode, err


@pytest.fixture
def held(sample: Sample, tmp_path: Path) -> Iterator[Callable[[int], Held]]:
    """Return ``held(jobs)``: start a conversion of the sample `short` that stops in shard 3."""
    started: list[Held] = []

    def start(jobs: int) -> Held:
        started.append(Held(sample("short"), tmp_path, jobs))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()


def gone(pid: int) -> bool:
    """Wait for a process to end; False if it does not."""
    for _ in range(500):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        status = Path(f"/proc/{pid}/stat")
        if status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_signal_in_the_middle_of_a_shard_ends_the_run_cleanly(
    held: Callable[[int], Held],
    sample: Sample,
    whole: dict[str, bytes],
    number: int,
    status: int,
    jobs: int,
) -> None:
    run = held(jobs)
    worker = run.wait_until_held()
    run.process.send_signal(number)
    code, err = run.result()
    assert code == status, err
    assert err == "interrupted: nothing is lost; run the same command again to continue\n"
    assert gone(worker), "a worker outlived its parent"
    assert [p for p in run.out.rglob("*") if p.name.startswith(THIRD)] == []
    unfinished(run.out)
    assert convert(sample("short"), run.out).reused >= 1
    assert tree(run.out) == whole


@pytest.mark.slow
def test_kill_in_the_middle_of_a_shard_leaves_no_shard_and_is_continued(
    held: Callable[[int], Held], sample: Sample, whole: dict[str, bytes]
) -> None:
    run = held(1)
    run.wait_until_held()
    run.process.kill()
    code, _ = run.result()
    assert code == -signal.SIGKILL
    assert shards(run.out) == ["model-00001-of-00008.safetensors", "model-00002-of-00008.safetensors"]
    (left,) = run.out.rglob("*.tmp")
    assert left.parent.name == ".dsv4convert" and left.name.startswith(THIRD)
    unfinished(run.out)
    result = convert(sample("short"), run.out)
    assert (result.reused, result.written) == (2, SHARDS - 2)
    assert tree(run.out) == whole


@pytest.mark.slow
def test_kill_of_a_worker_is_an_error_with_a_sentence_and_no_hang(
    held: Callable[[int], Held], sample: Sample, whole: dict[str, bytes]
) -> None:
    run = held(2)
    worker = run.wait_until_held()
    assert worker != run.process.pid
    os.kill(worker, signal.SIGKILL)
    code, err = run.result()
    assert code == 4, err
    assert err.startswith(f"error: `{THIRD}`: ") and "[worker.killed]" in err
    assert "found exit code -9" in err
    unfinished(run.out)
    assert convert(sample("short"), run.out).reused >= 1
    assert tree(run.out) == whole


@pytest.mark.slow
def test_kill_of_the_parent_ends_its_workers_and_is_continued(
    held: Callable[[int], Held], sample: Sample, whole: dict[str, bytes]
) -> None:
    """An orphan would go on and publish its shard under the feet of the next run."""
    run = held(2)
    worker = run.wait_until_held()
    run.process.kill()
    assert run.process.wait(TIMEOUT) == -signal.SIGKILL
    assert gone(worker), "a worker outlived its parent"
    assert "Traceback" not in run.result()[1]
    assert [p for p in run.out.rglob("*") if p.name.startswith(THIRD)] == []
    unfinished(run.out)
    assert convert(sample("short"), run.out).manifest is not None
    assert tree(run.out) == whole


def test_shard_that_another_process_replaces_meanwhile_fails_the_run(
    sample: Sample, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its record the shard counts as missing, and a run that misses shards must not end well."""
    real = Journal.record

    def record(self: Journal, done: ShardRecord) -> None:
        real(self, done)
        os.utime(self.root / "model-00001-of-00008.safetensors", ns=(1, 1))

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "record", record)
        with pytest.raises(EnvironmentFault) as caught:
            convert(sample("short"), tmp_path / "out")
    (found,) = caught.value.findings
    assert (found.code, found.where) == ("dst.unfinished", "model-00001-of-00008.safetensors")
    unfinished(tmp_path / "out")
    assert convert(sample("short"), tmp_path / "out").reused == SHARDS - 1
    assert tree(tmp_path / "out") == whole


# ---- a full disk


def test_destination_too_small_for_the_plan_is_refused_before_a_byte_is_written(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(EnvironmentFault) as caught:
        convert(sample("short"), tmp_path / "out")
    assert [f.code for f in caught.value.findings] == ["dst.no-space"]
    assert not (tmp_path / "out").exists()


def _limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))


@pytest.mark.slow
def test_write_that_the_system_refuses_is_no_space_and_is_continued(
    sample: Sample, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """A limit on file sizes: shard 1 fits, shard 2 does not. Works without any privilege."""
    command = [sys.executable, "-m", "dsv4convert", "convert", str(sample("short")), str(tmp_path / "out")]
    run = subprocess.run(
        [*command, "--jobs", "1", "-q"],
        preexec_fn=_limit_files,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=TIMEOUT,
    )
    assert run.returncode == 4, run.stderr
    wanted = "error: `model-00002-of-00008.safetensors`: the file size limit was reached"
    assert run.stderr.startswith(wanted) and "[dst.no-space]" in run.stderr
    assert list((tmp_path / "out").rglob("*.tmp")) == []
    unfinished(tmp_path / "out")
    convert(sample("short"), tmp_path / "out")
    assert tree(tmp_path / "out") == whole


# Arguments: mount point, size, then for `held.py`: shard, filler, source, output; last where the copy goes.
_ON_SMALL_DISK = """
set -e
mount -t tmpfs -o size="$2" none "$1"
set +e
"$0" "$3" "$4" "$5" fill convert "$6" "$7" --jobs 1 -q; echo "first $?"
ls "$7"; ls -A "$7/.dsv4convert" | grep -c tmp
rm "$5"
"$0" -m dsv4convert convert "$6" "$7" --jobs 1; echo "second $?"
cp -r "$7" "$8"
"""


def _can_mount() -> bool:
    probe = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        return subprocess.run(probe, capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@pytest.mark.slow
def test_disk_that_fills_up_in_the_middle_stops_the_run_and_room_continues_it(
    sample: Sample, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """A small file system of our own, filled while shard 3 is written. Where none can be mounted, the limit
    on file sizes above has shown the same path.
    """
    if not _can_mount():
        return
    disk = tmp_path / "disk"
    disk.mkdir()
    paths = [disk / "filler", sample("short"), disk / "out", tmp_path / "copy"]
    arguments = [str(disk), "32m", str(HELD), THIRD, *map(str, paths)]
    run = subprocess.run(
        ["unshare", "-rm", "sh", "-c", _ON_SMALL_DISK, sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=TIMEOUT,
    )
    lines = run.stdout.splitlines()
    wanted = ["first 4", "model-00001-of-00008.safetensors", "model-00002-of-00008.safetensors", "0"]
    assert lines[:4] == wanted, run.stdout + run.stderr
    assert run.stderr.startswith(f"error: `{THIRD}`: no space left while writing")
    assert "second 0" in lines
    assert tree(tmp_path / "copy") == whole


# ---- what the next run must not believe


def interrupted(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert the first three shards and stop."""
    real, calls = Journal.record, []

    def record(self: Journal, done: ShardRecord) -> None:
        real(self, done)
        calls.append(done.shard)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "record", record)
        with pytest.raises(KeyboardInterrupt):
            convert(source, target)


def test_next_run_with_another_layout_is_refused(
    sample: Sample,
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: Callable[..., Any],
) -> None:
    interrupted(sample("short"), tmp_path / "out", monkeypatch)
    run = cli("convert", sample("short"), tmp_path / "out", "--experts", "mxfp4", "--jobs", 1, "--json")
    assert run.exit_code == 3
    assert [f["code"] for f in run.json()["findings"]] == ["dst.other-plan"]
    assert len(shards(tmp_path / "out")) == 3
    assert convert(sample("short"), tmp_path / "out").reused == 3
    assert tree(tmp_path / "out") == whole


def test_next_run_redoes_a_finished_shard_that_lost_a_byte(
    sample: Sample, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(sample("short"), tmp_path / "out", monkeypatch)
    victim = tmp_path / "out" / "model-00002-of-00008.safetensors"
    os.truncate(victim, victim.stat().st_size - 1)
    assert convert(sample("short"), tmp_path / "out").reused == 2
    assert tree(tmp_path / "out") == whole


def test_next_run_with_a_changed_source_byte_is_refused(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    shutil.copytree(sample("short"), source)
    interrupted(source, tmp_path / "out", monkeypatch)
    with open(source / THIRD, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"#")
    with pytest.raises(Refused) as caught:
        convert(source, tmp_path / "out")
    (found,) = caught.value.findings
    assert (found.code, found.problem) == (
        "dst.other-plan",
        "was begun with other source files: size, time or inode of a shard changed since",
    )
    unfinished(tmp_path / "out")


# ---- worker processes by themselves


@pytest.mark.slow
def test_many_pools_in_a_row_finish_and_lose_nothing() -> None:
    """Start and end are where pools hang; thirty of them, four processes each, more tasks than workers."""
    for _ in range(30):
        results: list[int] = []
        emitted: list[int] = []
        begun = time.monotonic()
        run_all(double, [(str(i), i) for i in range(9)], 4, results.append, emitted.append)
        assert sorted(results) == [2 * i for i in range(9)]
        assert sorted(emitted) == list(range(9))
        assert time.monotonic() - begun < TIMEOUT


def test_worker_that_exits_without_a_result_is_named() -> None:
    with pytest.raises(EnvironmentFault) as caught:
        run_all(misbehave, [("a", "sleep"), ("b", "exit")], 2, print, print)
    (found,) = caught.value.findings
    assert (found.code, found.where, found.found) == ("worker.killed", "b", "exit code 7")


def test_exception_of_a_worker_is_raised_and_ends_the_others() -> None:
    with pytest.raises(ValueError, match="as told"):
        run_all(misbehave, [("a", "sleep"), ("b", "raise")], 2, print, print)


def test_exception_of_the_callback_ends_the_workers() -> None:
    def stop(result: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(misbehave, [("a", "sleep"), ("b", "fine")], 2, stop, print)
