"""A destination that was finished before: the same, another, damaged, and in use."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4convert import api
from dsv4convert.errors import EnvironmentFault, Refused
from dsv4convert.journal import DIRECTORY, INDEX, MANIFEST, Journal
from dsv4convert.synth import Recipe, synthesize

SHARD = "model-00003-of-00010.safetensors"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("finished") / "source"
    synthesize(target, Recipe("deepseek-v4-flash-0731", "tiny"))
    return target


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Path:
    target = tmp_path_factory.mktemp("finished") / "out"
    api.convert(source, target)
    return target


@pytest.fixture
def out(tmp_path: Path, whole: Path) -> Iterator[Path]:
    shutil.copytree(whole, tmp_path / "out")
    yield tmp_path / "out"


def contents(root: Path) -> dict[str, bytes]:
    files = {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}
    manifest = json.loads(files[MANIFEST])
    del manifest["run"]
    return {**files, MANIFEST: json.dumps(manifest).encode()}


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "shard-gone": lambda d: (d / SHARD).unlink(),
    "shard-truncated": lambda d: os.truncate(d / SHARD, (d / SHARD).stat().st_size - 1),
    "shard-other-header": lambda d: (d / SHARD).write_bytes(b"\0" * (d / SHARD).stat().st_size),
    "config-gone": lambda d: (d / "config.json").unlink(),
    "config-edited": lambda d: (d / "config.json").write_text("{}"),
    "side-file-gone": lambda d: (d / "tokenizer.json").unlink(),
    "index-gone": lambda d: (d / INDEX).unlink(),
    "index-edited": lambda d: (d / INDEX).write_text("{}"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_convert_into_a_damaged_finished_destination_mends_it(
    out: Path, whole: Path, source: Path, damage: str
) -> None:
    DAMAGE[damage](out)
    result = api.convert(source, out)
    assert contents(out) == contents(whole)
    assert result.manifest is not None and not (out / DIRECTORY).exists()
    assert result.written == int(damage.startswith("shard"))


def test_convert_into_a_whole_finished_destination_changes_nothing(out: Path, source: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    assert api.convert(source, out).written == 0
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before


def test_convert_of_another_source_with_the_same_headers_is_refused(out: Path, tmp_path: Path) -> None:
    synthesize(tmp_path / "other", Recipe("deepseek-v4-flash-0731", "tiny", seed=1))
    before = contents(out)
    with pytest.raises(Refused) as caught:
        api.convert(tmp_path / "other", out)
    (found,) = caught.value.findings
    assert found.code == "dst.other-plan" and "same headers" in found.problem
    assert contents(out) == before


def test_finalize_of_a_damaged_finished_destination_says_what_is_wrong(out: Path) -> None:
    assert api.finalize(out) is None
    (out / SHARD).unlink()
    with pytest.raises(Refused) as caught:
        api.finalize(out)
    (found,) = caught.value.findings
    assert (found.code, found.where) == ("shard.missing", SHARD)
    assert "the same `convert` command" in found.hint


def test_finalize_after_the_source_moved_names_the_option(source: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(source, tmp_path / "source"))
    for index in (0, 1):
        api.convert(moved, tmp_path / "out", part=(index, 2))
    moved.rename(tmp_path / "elsewhere")
    with pytest.raises(Refused) as caught:
        api.finalize(tmp_path / "out")
    assert "--source" in caught.value.findings[0].hint
    assert api.finalize(tmp_path / "out", tmp_path / "elsewhere") is not None


def test_second_run_in_the_same_destination_is_refused_and_an_array_is_not(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    api.convert(source, out, part=(0, 2))
    with Journal(out).held(shared=True):
        api.convert(source, out, part=(1, 2))
        with pytest.raises(EnvironmentFault) as caught:
            api.convert(source, out)
    assert "another conversion" in caught.value.findings[0].problem
    assert api.convert(source, out).manifest is not None


def test_lock_that_the_file_system_does_not_know_is_done_without(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(fd: int, operation: int) -> None:
        raise OSError(95, "not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert api.convert(source, tmp_path / "out").manifest is not None


def test_converted_that_has_nothing_to_compare_with_fails_when_data_was_to_be_read(out: Path) -> None:
    assert api.verify(out, read_data=100).ok()
    (out / MANIFEST).unlink()
    assert api.verify(out).ok()
    report = api.verify(out, read_data=100)
    assert [f.code for f in report.findings if f.severity == "error"] == ["content.unverified"]


@pytest.mark.parametrize("arguments", [("original", ""), ("convert", "x", ""), ("converted", "")])
def test_empty_path_is_a_usage_error(cli: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    assert cli(*arguments).exit_code == 2


def test_suggested_command_is_quoted_for_a_shell(
    cli: Callable[..., Any], source: Path, tmp_path: Path
) -> None:
    shown = cli("convert", source, tmp_path / "a b").out
    assert f"'{tmp_path}/a b'" in shown
