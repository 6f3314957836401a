"""What a shell or a script meets: usage errors as JSON, limits, destinations judged, better sentences."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from dsv4convert import api
from dsv4convert.synth import Recipe
from tests.conftest import Ran
from tests.samples import INDEX, read_json

Sample = Callable[[str], Path]
Cli = Callable[..., Ran]
SCHEMAS = Path(__file__).resolve().parent.parent / "docs" / "schemas"


def codes(ran: Ran) -> list[str]:
    """Return the codes of the findings of a command run with ``--json``."""
    return [f["code"] for f in ran.json()["findings"]]


# ---- usage


@pytest.mark.parametrize(
    ("arguments", "where", "said"),
    [
        (("original", "x", "--no-such"), "dsv4convert original", "--no-such"),
        (("original",), "dsv4convert original", "Missing argument 'SRC'."),
        (("plan", "x", "--tp", "0"), "dsv4convert plan", "Invalid value for '--tp'"),
        (("convert", "a", "b", "--consume", "--shards", "0/2"), "dsv4convert", "--consume does not go with"),
        (("nothing",), "dsv4convert", "No such command 'nothing'."),
    ],
    ids=["option", "argument", "value", "combination", "command"],
)
def test_usage_error_under_json_is_json_and_a_sentence(
    cli: Cli, arguments: tuple[str, ...], where: str, said: str
) -> None:
    ran = cli(*arguments, "--json")
    assert ran.exit_code == 2 and said in ran.err
    schema = Draft202012Validator(read_json(SCHEMAS / "error.schema.json"))
    assert [e.message for e in schema.iter_errors(ran.json())] == []
    (found,) = ran.json()["findings"]
    assert (found["code"], ran.json()["exit_status"]) == ("cli.usage", 2)
    assert found["where"].startswith(where) and said in found["problem"]
    plain = cli(*arguments)
    assert (plain.exit_code, plain.out) == (2, "") and said in plain.err


def test_help_is_help_under_json_too(cli: Cli) -> None:
    assert cli("original", "--json", "--help").out.startswith("Usage:")


# ---- signals


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no hang-ups on this system")
def test_hang_up_that_nohup_ignores_stays_ignored() -> None:
    code = "import signal; from dsv4convert.cli.shell import _on_signals; _on_signals();"
    code += "print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)"

    def nohup() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def terminal() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    for before, expected in ((nohup, "True"), (terminal, "False")):
        line = [sys.executable, "-c", code]
        done = subprocess.run(line, capture_output=True, text=True, preexec_fn=before, timeout=60, check=True)
        assert done.stdout.strip() == expected


# ---- limits of the machine


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread"), OSError(12, "no")])
def test_memory_error_anywhere_is_a_sentence(
    cli: Cli, sample: Sample, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("dsv4convert.survey.survey", fail)
    ran = cli("inspect", sample("short"), "--json")
    assert (ran.exit_code, codes(ran)) == (4, ["env.memory"])
    assert "`ulimit -v`" in ran.json()["findings"][0]["hint"]


def test_too_many_files_names_the_limit(cli: Cli, sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(24, "Too many open files", "/a/model.safetensors")

    monkeypatch.setattr("dsv4convert.survey.survey", fail)
    ran = cli("inspect", sample("short"))
    assert ran.exit_code == 4 and "[env.files]" in ran.err
    assert "`/a/model.safetensors`" in ran.err and "ulimit -n" in ran.err


# ---- destinations


def test_plan_judges_the_destination(cli: Cli, sample: Sample, tmp_path: Path) -> None:
    source = sample("short")

    def judged(dst: Path) -> tuple[int, list[str], bool]:
        before = sorted(p.name for p in dst.rglob("*")) if dst.is_dir() else None
        ran = cli("plan", source, "--dst", dst, "--json")
        assert before == (sorted(p.name for p in dst.rglob("*")) if dst.is_dir() else None)
        return ran.exit_code, codes(ran), ran.json()["write_bytes_per_second"] is not None

    assert judged(tmp_path / "new") == (0, [], True)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.txt").write_text("x")
    assert judged(tmp_path / "used") == (1, ["dst.not-empty"], False)
    assert judged(source) == (1, ["dst.inside-source"], False)
    assert judged(source / "inside") == (1, ["dst.inside-source"], False)
    api.convert(source, tmp_path / "begun", part=(0, 2))
    assert judged(tmp_path / "begun") == (0, [], True)
    api.convert(source, tmp_path / "done")
    assert judged(tmp_path / "done") == (0, [], True)
    api.convert(source, tmp_path / "other", experts="mxfp4")
    assert judged(tmp_path / "other") == (1, ["dst.not-empty"], False)
    api.convert(source, tmp_path / "part", experts="mxfp4", part=(0, 2))
    assert judged(tmp_path / "part") == (1, ["dst.other-plan"], False)


def test_fresh_volume_counts_as_empty(cli: Cli, sample: Sample, tmp_path: Path) -> None:
    for name in ("volume", "synth"):
        (tmp_path / name / "lost+found").mkdir(parents=True)
    assert cli("convert", sample("short"), tmp_path / "volume", "--jobs", 1).exit_code == 0
    ran = cli("converted", tmp_path / "volume", "--json", "--strict")
    assert (ran.exit_code, codes(ran)) == (0, [])
    assert cli("synth", tmp_path / "synth", "--layers", 3, "--experts", 2).exit_code == 0
    assert cli("original", tmp_path / "synth", "--strict").exit_code == 0
    assert cli("synth", tmp_path / "synth").exit_code == 3


def test_experts_are_as_wide_as_asked_for(cli: Cli, tmp_path: Path) -> None:
    """A multiple of 32 is whole groups of MXFP4 along K, and need not be whole groups of 128."""
    sizes = ("--layers", 3, "--experts", 2, "--intermediate", 160)
    assert cli("synth", tmp_path / "wide", *sizes).exit_code == 0
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["moe_intermediate_size"] == 160
    assert cli("original", tmp_path / "wide", "--strict").exit_code == 0
    for size in (-32, 33):
        with pytest.raises(ValueError, match=f"expected a multiple of 32, found {size}"):
            Recipe("deepseek-v4-flash-0731", "tiny", intermediate=size)


def test_destination_through_a_directory_that_is_not_there_leaves_none(
    cli: Cli, sample: Sample, tmp_path: Path
) -> None:
    assert cli("convert", sample("short"), tmp_path / "a" / ".." / "out", "--jobs", 1).exit_code == 0
    assert cli("synth", tmp_path / "b" / ".." / "new", "--layers", 3, "--experts", 2).exit_code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "out"]


def test_destination_that_is_a_dot_has_a_name(
    cli: Cli, sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "thesis.txt").write_text("x")
    monkeypatch.chdir(tmp_path / "here")
    for arguments in (("convert", sample("short"), "."), ("synth", "."), ("finalize", ".")):
        ran = cli(*arguments, "--json")
        assert ran.exit_code == 3 and ran.json()["findings"][0]["where"] == "here"


def test_synth_that_cannot_write_says_so(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    ran = cli("synth", tmp_path / "file" / "below", "--json")
    assert (ran.exit_code, codes(ran)) == (4, ["io.write"])

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    ran = cli("synth", tmp_path / "new", "--json")
    assert (ran.exit_code, codes(ran)) == (4, ["dst.not-writable"])


# ---- sentences


def test_inspect_counts_one_error_as_one(cli: Cli, sample: Sample, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(sample("short"), tmp_path / "model")
    (tmp_path / "model" / INDEX).unlink()
    ran = cli("inspect", tmp_path / "model")
    assert ran.exit_code == 1 and "1 error; `dsv4convert original` shows it" in ran.err


def test_inspect_says_that_nothing_matches(cli: Cli, sample: Sample) -> None:
    ran = cli("inspect", sample("short"), "--tensors", "nothing*")
    assert (ran.exit_code, ran.out, ran.err) == (0, "", "no tensor has a name like `nothing*`\n")
    ran = cli("inspect", sample("short"), "--tensors", "norm.*")
    assert ran.err == "" and ran.out.count("\n") == 1


def test_reference_leaves_no_remark_about_its_absence(cli: Cli, sample: Sample, tmp_path: Path) -> None:
    api.convert(sample("short"), tmp_path / "out")
    for data in ((), ("--read-data", 1), ("--read-data",)):
        ran = cli("converted", tmp_path / "out", "--reference", sample("short"), "--json", *data)
        left = [line for line in ran.json()["not_checked"] if line.startswith("manifest")]
        assert left == ["manifest: `tool`, `run`, single figures"]
    alone = cli("converted", tmp_path / "out", "--json").json()["not_checked"]
    assert any("without a reference plan digest" in line for line in alone)


def test_card_that_weights_fill_gets_a_hint_that_helps(cli: Cli, tmp_path: Path) -> None:
    assert cli("synth", tmp_path / "full", "--scale", "full", "-q").exit_code == 0
    found = cli("plan", tmp_path / "full", "--tp", 1, "--json").json()["findings"][0]
    assert found["code"] == "serve.memory" and "raise `--tp`" in found["hint"]
    assert "lower `--context`" not in found["hint"]
