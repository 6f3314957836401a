"""`convert --consume`: what is deleted, when, and what a crash at any moment leaves."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4convert import closing, consume
from dsv4convert import convert as module
from dsv4convert import journal as journal_module
from dsv4convert.convert import convert
from dsv4convert.errors import EnvironmentFault, Refused
from dsv4convert.limits import Limits
from tests.conftest import Ran
from tests.samples import make_sample, tree
from tests.toy import Toy

Cli = Callable[..., Ran]
SHARDS = 8


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sample(tmp_path_factory.mktemp("consume"), "short")


@pytest.fixture(scope="module")
def wanted(pristine: Path) -> dict[str, bytes]:
    """Return the tree that a conversion without `consume` gives."""
    convert(pristine, pristine.parent / "wanted")
    return tree(pristine.parent / "wanted")


@pytest.fixture
def source(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    yield Path(shutil.copytree(pristine, tmp_path / "models" / "source"))


def left(source: Path) -> list[str]:
    return sorted(p.name for p in source.glob("*.safetensors"))


def others(root: Path) -> dict[str, bytes]:
    return {n: b for n, b in tree(root).items() if not n.endswith(".safetensors")}


@pytest.mark.parametrize("jobs", [1, 2])
def test_consume_leaves_the_same_output_and_all_other_files(
    source: Path, tmp_path: Path, wanted: dict[str, bytes], jobs: int
) -> None:
    before = others(source)
    result = convert(source, tmp_path / "out", jobs=jobs, consume=True)
    assert len(result.consumed) == SHARDS == len(set(result.consumed))
    assert left(source) == [] and others(source) == before
    assert tree(tmp_path / "out") == wanted


def test_consume_is_off_by_default(source: Path, tmp_path: Path) -> None:
    before = tree(source)
    assert convert(source, tmp_path / "out").consumed == ()
    assert tree(source) == before
    # Afterwards there is nothing to convert, so nothing is deleted either.
    assert convert(source, tmp_path / "out", consume=True).consumed == ()
    assert tree(source) == before


# ---- refusals: nothing may be deleted


def _hard_link(root: Path) -> None:
    os.link(next(root.glob("*.safetensors")), root.parent / "twin")


def _link_of_a_side_file(root: Path) -> None:
    (root / "LICENSE").rename(root / "license.txt")
    (root / "LICENSE").symlink_to("license.txt")


def _links_to_shards(root: Path) -> None:
    for path in sorted(root.glob("*.safetensors")):
        path.rename(path.with_suffix(".real"))
        path.symlink_to(path.with_suffix(".real").name)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "hard-link": (_hard_link, "src.consume"),
    "side-link": (_link_of_a_side_file, "src.consume"),
    "shard-links": (_links_to_shards, "src.consume"),
    "blobs": (lambda root: (root.parent.parent / "blobs").mkdir(), "src.consume"),
    "truncated": (lambda root: os.truncate(next(root.glob("*.safetensors")), 9000), "shard.truncated"),
    "no-config": (lambda root: (root / "config.json").unlink(), "config.missing"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_consume_refuses_what_is_not_its_own(cli: Cli, source: Path, tmp_path: Path, kind: str) -> None:
    harm, code = REFUSED[kind]
    harm(source)
    before = tree(source)
    seen = cli("convert", source, tmp_path / "out", "--jobs", 1, "--consume", "--json")
    assert seen.exit_code == 3
    assert {f["code"] for f in seen.json()["findings"]} >= {code}
    assert tree(source) == before


def test_consume_refuses_snapshot_and_link_to_source(source: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / ("a" * 40)
    snapshot.parent.mkdir()
    shutil.copytree(source, snapshot)
    (tmp_path / "link").symlink_to(source)
    for path in (snapshot, tmp_path / "link", f"{tmp_path / 'link'}/"):
        before = tree(Path(path))
        with pytest.raises(Refused) as caught:
            convert(path, tmp_path / "out", consume=True)
        assert {f.code for f in caught.value.findings} == {"src.consume"}
        assert tree(Path(path)) == before


def test_consume_refuses_a_conversion_as_source(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "mxfp4", experts="mxfp4")
    before = tree(tmp_path / "mxfp4")
    with pytest.raises(Refused) as caught:
        convert(tmp_path / "mxfp4", tmp_path / "out", consume=True)
    assert [f.code for f in caught.value.findings] == ["src.not-official"]
    assert tree(tmp_path / "mxfp4") == before


def test_consume_does_not_go_with_parts(cli: Cli, source: Path, tmp_path: Path) -> None:
    seen = cli("convert", source, tmp_path / "out", "--consume", "--shards", "0/2")
    assert seen.exit_code == 2 and "--shards" in seen.err and len(left(source)) == SHARDS
    # Any other option that is wrong by itself is usage, too.
    assert cli("convert", source, tmp_path / "out", "--shards", "2/2").exit_code == 2
    with pytest.raises(ValueError, match="consume"):
        convert(source, tmp_path / "out", part=(0, 2), consume=True)


@pytest.mark.parametrize("limits", [Limits(), Limits(min_exact=1.0)], ids=["nan", "limit"])
def test_consume_deletes_nothing_when_a_late_shard_would_refuse(
    source: Path, tmp_path: Path, limits: Limits
) -> None:
    if limits == Limits():
        # The last shard in order: without looking ahead seven would be gone by then.
        kit = Toy(source)
        name = next(
            n for n, s in kit.weight_map.items() if s == left(source)[-1] and n.endswith("wq_a.scale")
        )
        kit.poke(name, 0, b"\xff")
    before = tree(source)
    with pytest.raises(Refused) as caught:
        convert(source, tmp_path / "out", consume=True, limits=limits)
    assert {f.code for f in caught.value.findings} == {
        "value.scale-nan" if limits == Limits() else "value.exact-share"
    }
    assert tree(source) == before


def test_consume_judges_finished_shards_before_deleting(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", part=(0, 1))
    with pytest.raises(Refused):
        convert(source, tmp_path / "out", consume=True, limits=Limits(min_exact=1.0))
    assert len(left(source)) == SHARDS


def test_consume_refuses_while_another_run_consumes(source: Path, tmp_path: Path) -> None:
    fd = os.open(source, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(Refused) as caught:
        convert(source, tmp_path / "out", consume=True)
    os.close(fd)
    assert [f.code for f in caught.value.findings] == ["src.consume"] and len(left(source)) == SHARDS
    assert len(convert(source, tmp_path / "out", consume=True).consumed) == SHARDS


def test_consume_keeps_the_source_of_an_output_that_does_not_read_back(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = consume.keep_stand_in
    proved = consume.is_proved

    def damage(path: Path, shard: Any, record: Any) -> bool:
        if path.name.startswith("model-00003"):
            with open(path, "r+b") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)[0]
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last ^ 1]))
        return proved(path, shard, record)

    monkeypatch.setattr(consume, "is_proved", damage)
    with pytest.raises(EnvironmentFault) as caught:
        convert(source, tmp_path / "out", consume=True)
    assert caught.value.findings[0].where.startswith("model-00003")
    assert [n[:11] for n in left(source)] == [f"model-0000{i}" for i in range(3, 9)]
    assert real is consume.keep_stand_in


def test_consume_keeps_a_source_shard_that_was_replaced(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = consume.keep_stand_in

    def replace(journal: Any, shard: Any) -> None:
        real(journal, shard)
        os.utime(source / shard.name, ns=(1, 1))

    monkeypatch.setattr(consume, "keep_stand_in", replace)
    with pytest.raises(Refused) as caught:
        convert(source, tmp_path / "out", consume=True)
    assert [f.code for f in caught.value.findings] == ["src.changed"] and len(left(source)) == SHARDS


# ---- crashes: stop at every step, continue, get the same bytes


class Crash(BaseException):
    """The process is gone."""


def _crash_at(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, call: int, *, after: bool) -> None:
    real, calls = getattr(place, name), []

    def stop(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call and not after:
            raise Crash
        result = real(*args, **kwargs)
        if len(calls) == call:
            raise Crash
        return result

    monkeypatch.setattr(place, name, stop)


CRASHES: dict[str, tuple[Any, str, int, bool, int]] = {
    # place, function, which call, before or after it, shards left
    "first-stand-in-missing": (consume, "keep_stand_in", 1, False, 8),
    "first-stand-in-written": (consume, "keep_stand_in", 1, True, 8),
    "third-shard-not-proved": (consume, "is_proved", 3, False, 6),
    "third-shard-proved": (consume, "is_proved", 3, True, 6),
    "fourth-stand-in-written": (consume, "keep_stand_in", 4, True, 5),
    "last-stand-in-written": (consume, "keep_stand_in", 8, True, 1),
    "fifth-shard-not-recorded": (module.Journal, "record", 5, False, 4),
    "fifth-shard-recorded": (module.Journal, "record", 5, True, 4),
    "all-gone-not-closed": (module, "close", 1, False, 0),
    "closing": (closing, "encode_index", 1, False, 0),
    "closed-journal-whole": (module.Journal, "finish", 1, False, 0),
    "closed-journal-half": (journal_module.shutil, "rmtree", 1, False, 0),
}


@pytest.mark.parametrize("again", [True, False], ids=["consume", "without"])
@pytest.mark.parametrize("moment", CRASHES)
def test_consume_continues_after_a_crash(
    source: Path, tmp_path: Path, wanted: dict[str, bytes], moment: str, again: bool, cli: Cli
) -> None:
    place, name, call, after, count = CRASHES[moment]
    with pytest.MonkeyPatch.context() as patch:
        _crash_at(patch, place, name, call, after=after)
        with pytest.raises(Crash):
            convert(source, tmp_path / "out", consume=True)
    assert len(left(source)) == count
    if moment == "closed-journal-half":
        # Complete, and no longer a conversion that could be planned again: `finalize` clears the rest away.
        assert cli("finalize", tmp_path / "out").exit_code == 0
    else:
        result = convert(source, tmp_path / "out", consume=again)
        assert result.manifest is not None
        assert len(left(source)) == (0 if again else count)
    assert tree(tmp_path / "out") == wanted


def test_consume_killed_between_shards_continues(
    source: Path, tmp_path: Path, wanted: dict[str, bytes]
) -> None:
    script = Path(__file__).with_name("held.py")
    marker = tmp_path / "marker"
    arguments = [
        left(source)[4],
        marker,
        "hold",
        "convert",
        source,
        tmp_path / "out",
        "--consume",
        "--jobs",
        "1",
    ]
    # The pass that looks at values runs the same transform: the second time it is held.
    env = {**os.environ, "PYTHONPATH": str(script.parent.parent), "HELD_AT": "2"}
    process = subprocess.Popen([sys.executable, str(script), *map(str, arguments)], env=env)
    try:
        end = time.monotonic() + 60
        while not marker.exists() and time.monotonic() < end:
            time.sleep(0.05)
        assert marker.exists()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(left(source)) == 4
    assert len(convert(source, tmp_path / "out", consume=True).consumed) == 4
    assert tree(tmp_path / "out") == wanted


def half(source: Path, out: Path) -> None:
    """Convert and consume four of eight shards."""
    with pytest.MonkeyPatch.context() as patch:
        _crash_at(patch, consume, "is_proved", 5, after=False)
        with pytest.raises(Crash):
            convert(source, out, consume=True)


def test_consume_believes_a_moved_output_by_its_bytes(
    source: Path, tmp_path: Path, wanted: dict[str, bytes]
) -> None:
    half(source, tmp_path / "out")
    os.utime(tmp_path / "out" / "model-00002-of-00008.safetensors", ns=(1, 1))
    convert(source, tmp_path / "out", consume=True)
    assert tree(tmp_path / "out") == wanted


@pytest.mark.parametrize("harm", ["byte", "gone"])
def test_consume_refuses_to_lose_an_output_whose_source_is_gone(
    source: Path, tmp_path: Path, harm: str
) -> None:
    half(source, tmp_path / "out")
    path = tmp_path / "out" / "model-00002-of-00008.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x55") if harm == "byte" else path.unlink()
    before = tree(tmp_path / "out"), tree(source)
    for again in (True, False):
        with pytest.raises(Refused) as caught:
            convert(source, tmp_path / "out", consume=again)
        assert [(f.code, f.where) for f in caught.value.findings] == [("src.consumed", path.name)]
    assert (tree(tmp_path / "out"), tree(source)) == before


def test_consume_refuses_another_layout_and_another_path(source: Path, tmp_path: Path) -> None:
    half(source, tmp_path / "out")
    with pytest.raises(Refused) as caught:
        convert(source, tmp_path / "out", experts="mxfp4", consume=True)
    assert [f.code for f in caught.value.findings] == ["dst.other-plan"]
    moved = source.rename(source.parent / "moved")
    with pytest.raises(Refused) as caught:
        convert(moved, tmp_path / "out", consume=True)
    assert [f.code for f in caught.value.findings] == ["src.consumed"]
    assert len(left(moved)) == 4
    # Into an empty directory nothing is known about the shards that are gone.
    with pytest.raises(Refused) as caught:
        convert(moved, tmp_path / "elsewhere")
    assert {f.code for f in caught.value.findings} == {"shard.missing"}


def test_consume_needs_less_room_than_a_conversion(source: Path, tmp_path: Path) -> None:
    from dsv4convert.checkpoint import open_checkpoint
    from dsv4convert.plan import plan

    checkpoint = open_checkpoint(source)
    made = plan(checkpoint)
    consumer = consume.Consumer(checkpoint, made, module.Journal(tmp_path / "out"))
    balance = peak = 0
    for shard in made.shards:
        peak = max(peak, balance + shard.file_bytes)
        balance += shard.file_bytes - checkpoint.shards[shard.name].size
    largest = max(s.file_bytes for s in made.shards)
    assert consumer.room(made.shards, 1) == peak < made.file_bytes
    assert consumer.room(made.shards, 3) == peak + 2 * largest


def test_consume_says_what_it_did(cli: Cli, source: Path, tmp_path: Path) -> None:
    seen = cli("convert", source, tmp_path / "out", "--jobs", 1, "--consume")
    assert seen.exit_code == 0 and f"consumed   {SHARDS} source shards deleted" in seen.out
    assert "--reference" not in seen.out.splitlines()[-1]
    assert cli("converted", tmp_path / "out", "--read-data", "--jobs", 1, "--strict").exit_code == 0
