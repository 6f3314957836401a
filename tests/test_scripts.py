"""The scripts: what they carry, what they start, and what they change."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from dsv4convert.cli.serve import serve
from tests.conftest import Ran

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


# ---- stage_serving


def stage(path: Path) -> Path:
    """Make a stage of one part from a wheel with a file that is carried and one that is not."""
    import stage_serving

    wheel = path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as content:
        content.writestr("sgl_kernel/__init__.py", "carried")
        content.writestr("sgl_kernel/flash_ops.abi3.so", "left")
    stage_serving._unzip(wheel, path / "tree")
    made = path / "stage"
    made.mkdir()
    archive = made / "server.tar.xz"
    stage_serving._archive(path / "tree", archive)
    row = {"archive": {"sha256": stage_serving._sha256(archive)}}
    (made / "staged.json").write_text(json.dumps({"parts": {"server": row}}))
    return made


def test_a_part_arrives_without_what_is_left_out(tmp_path: Path) -> None:
    import stage_serving

    stage_serving.unpack(stage(tmp_path), tmp_path / "work", [])
    kernel = tmp_path / "work" / "server" / "sgl_kernel"
    assert [p.name for p in kernel.iterdir()] == ["__init__.py"]
    assert (kernel / "__init__.py").read_text() == "carried"


def test_a_part_that_changed_on_the_way_is_refused(tmp_path: Path) -> None:
    import stage_serving

    made = stage(tmp_path)
    with (made / "server.tar.xz").open("ab") as archive:
        archive.write(b"\0")
    with pytest.raises(SystemExit, match=r"server\.tar\.xz: is not the archive of staged\.json"):
        stage_serving.unpack(made, tmp_path / "work", [])
    assert not (tmp_path / "work").exists()


def test_parts_are_what_the_constraints_pin() -> None:
    import stage_serving

    pinned = {path.stem.removeprefix("staged-") for path in SCRIPTS.parent.glob("constraints/staged-*.txt")}
    assert set(stage_serving.PARTS) == pinned


# ---- validate_serving


def test_every_run_is_one_that_serve_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import validate_serving

    monkeypatch.chdir(tmp_path)
    names = [run.name for run in validate_serving.RUNS]
    assert len(set(names)) == len(names)
    for run in validate_serving.RUNS:
        (tmp_path / run.layout).mkdir(exist_ok=True)
        words = validate_serving._words(run, 31000, tmp_path / "log")
        context = serve.make_context("serve", words[1:])
        assert (context.params["tp"], context.params["dspark"]) == (run.tp, run.draft)
        assert ("--disable-cuda-graph" in context.params["extra"]) is not run.graph
    with pytest.raises(click.UsageError):
        serve.make_context("serve", [*words[1 : words.index("--")], "--unknown"])


def test_prompts_are_as_long_as_they_say_and_hold_no_marker() -> None:
    import serving_checkpoints

    for length in (40, 760, 3000):
        prompt = [int(word) for word in serving_checkpoints.ids(length).split(",")]
        # 6 markers and 256 bytes come first in the vocabulary of 1024.
        assert len(prompt) == length and min(prompt) >= 262 and max(prompt) < 1024


def test_checkpoints_are_made_and_probed_by_commands_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import serving_checkpoints

    from dsv4convert.cli import main

    said: dict[str, list[str]] = {}

    def command(log: str, *words: object) -> int:
        name, *rest = map(str, words)
        if name in ("synth", "convert"):
            (tmp_path / rest[name == "convert"]).mkdir()
        # The commands run in the directory of the checkpoints.
        monkeypatch.chdir(tmp_path)
        assert main.commands[name].make_context(name, [*rest]) is not None
        said[log] = rest
        return 0

    changed: list[Path] = []
    monkeypatch.setattr(serving_checkpoints.subprocess, "run", lambda words, **_: changed.append(words[-1]))
    folder = serving_checkpoints.prepare(command, tmp_path, serving_checkpoints.CHECKPOINTS, None)
    assert changed == [tmp_path / "foreseeable"]
    assert sum(log.startswith("synth-") for log in said) == 3
    assert sum(log.startswith("convert-") for log in said) == 4
    assert said["probe-vision-three"].count("--image") == 3
    for layout, golden in (("vision", "three"), ("int8", "chat")):
        words = serving_checkpoints.golden_words(layout, golden, folder)
        assert words[1] == said[f"probe-{layout}-{golden}"][-1]
    # With golden files of another time only checkpoints are made, and those are there.
    said.clear()
    assert serving_checkpoints.prepare(command, tmp_path, ["int8"], tmp_path) == tmp_path
    assert not said


# ---- foreseeable


def test_the_draft_of_a_foreseeable_checkpoint_is_right(tmp_path: Path, cli: Callable[..., Ran]) -> None:
    lengths = {}
    for name in ("random", "foreseeable"):
        root = tmp_path / name
        assert cli("synth", root, "-q").exit_code == 0
        if name == "foreseeable":
            change(root)
            assert cli("original", root, "-q").exit_code == 0
        golden = tmp_path / f"{name}.json"
        asked = cli("probe", root, "--ids", "300,400", "--tokens", "8", "--draft", "--golden", golden)
        assert asked.exit_code == 0
        lengths[name] = json.loads(golden.read_text())["draft"]["length"]
    assert lengths["foreseeable"] == 6.0
    assert lengths["random"] < 2


def change(root: Path) -> None:
    import foreseeable

    before, sys.argv = sys.argv, ["foreseeable", str(root)]
    try:
        foreseeable.main()
    finally:
        sys.argv = before
