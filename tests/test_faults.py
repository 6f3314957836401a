"""Every fault of the table gives one finding and its exit status; everything legal beside it passes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults import FAULTS, HTML, NEIGHBOURS, Fault, Neighbour, S, link_farm, prune
from tests.toy import CONFIG, INDEX, MANIFEST, Toy, Toybox

Run = Callable[..., Any]


@pytest.fixture(scope="session")
def toybox(tmp_path_factory: pytest.TempPathFactory) -> Toybox:
    """Return the toys of this session."""
    return Toybox(tmp_path_factory.mktemp("toys"))


@pytest.fixture
def copy(toybox: Toybox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Toy]]:
    """Return what makes a copy of a toy in a directory of this test; the copy goes when the test is over."""
    # Surviving a power cut is not what these tests look at, and it is most of their time.
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    yield lambda name: toybox.copy(name, tmp_path / "work")
    shutil.rmtree(tmp_path, ignore_errors=True)


def command(line: str, k: Toy, toybox: Toybox) -> list[str]:
    """Return the arguments of a command line of the table."""
    paths = {"src": k.root, "ref": k.ref, "out": k.out, "parent": k.root.parent}
    if "{other}" in line:
        paths["other"] = toybox.original("ragged")
    arguments = [part.format(**paths) for part in line.split()]
    if arguments[0] in ("convert", "converted", "original"):
        arguments += ["--jobs", "1"]  # more would start processes
    return arguments


def errors(report: dict[str, Any]) -> list[dict[str, str]]:
    return [f for f in report["findings"] if f["severity"] == "error"]


def warnings(report: dict[str, Any]) -> set[str]:
    return {f["code"] for f in report.get("findings", ()) if f["severity"] == "warning"}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.id)
def test_faults_broken_checkpoint_gives_its_one_finding(
    fault: Fault, copy: Callable[[str], Toy], toybox: Toybox, cli: Run
) -> None:
    k = copy(fault.base)
    fault.harm(k)
    before = {p: p.stat().st_mtime_ns for p in k.root.rglob("*") if p.is_file()}
    occupied = k.out.exists()
    for line, status in fault.runs.items():
        if not occupied:
            shutil.rmtree(
                k.out, ignore_errors=True
            )  # a refused conversion may be resumed, by the same plan only
        arguments = command(line, k, toybox)
        seen = cli(*arguments, "--json")
        assert seen.exit_code == status, (line, seen.out, seen.err)
        report = seen.json()
        assert report["ok"] is False
        paths = {"src": k.root, "parent": k.root.parent.name}
        expected = sorted((fault.code, where.format(**paths)) for where in fault.where)
        assert sorted((f["code"], f["where"]) for f in errors(report)) == expected, line
        assert warnings(report) <= fault.warnings, line

        told = cli(*arguments)
        assert told.exit_code == status
        text = told.out + told.err
        assert "Traceback" not in text and "internal error" not in text
        for f in errors(report):
            assert f["problem"] in text and f["hint"] in text
            assert f["problem"][0] not in "ABCDEFGHIJKLNOPQRSTVWXYZ" and not f["problem"].endswith(".")
            assert not f["expected"] or f"expected {f['expected']}" in text
            assert not f["found"] or f"found {f['found']}" in text
    assert {p: p.stat().st_mtime_ns for p in before} == before, "a check or a refusal changed its input"
    for left in (k.out, k.root / "made"):
        assert not (left / INDEX).exists() and not (left / CONFIG).exists(), "a refusal left a checkpoint"


@pytest.mark.parametrize("case", NEIGHBOURS, ids=lambda n: n.id)
def test_faults_legal_neighbour_passes(
    case: Neighbour, copy: Callable[[str], Toy], toybox: Toybox, cli: Run
) -> None:
    k = copy(case.base)
    case.change(k)
    report: dict[str, Any] = {}
    for line in case.runs:
        seen = cli(*command(line, k, toybox), "--json")
        assert seen.exit_code == 0, (line, seen.out, seen.err)
        report = seen.json()
        assert report.get("ok", True) is True
    assert warnings(report) == case.warnings
    if case.warnings and case.runs[-1].startswith(("original", "converted")):
        assert cli(*command(case.runs[-1], k, toybox), "--strict").exit_code == 1
    if case.check:
        case.check(k)


def test_faults_every_id_has_a_legal_neighbour() -> None:
    def ids(rows: Any) -> set[str]:
        return {row.id.partition("-")[0] for row in rows}

    assert ids(FAULTS) <= ids(NEIGHBOURS)
    names = [row.id for row in (*FAULTS, *NEIGHBOURS)]
    assert len(names) - len(set(names)) <= len({"F17", "C07"}), "ids are unique within a table"


def test_faults_unknown_dtype_still_checks_offsets(copy: Callable[[str], Toy], cli: Run) -> None:
    # Two faults in one header: an unknown dtype must not switch off the bounds check.
    k = copy("0731")
    k.rawhdr(3, {"a": {"dtype": "F9", "shape": [8], "data_offsets": [1 << 40, (1 << 40) + 8]}}, bytes(8))
    seen = cli("original", k.root, "--json")
    assert seen.exit_code == 1
    assert {(f["code"], f["where"]) for f in errors(seen.json())} == {
        ("shard.dtype", S(3)),
        ("shard.offsets", S(3)),
    }


def test_faults_several_at_once_are_reported_together(copy: Callable[[str], Toy], cli: Run) -> None:
    k = copy("0731")
    k.S(2).write_bytes(HTML)
    k.S(5).unlink()
    k.cfg(lambda c: c.pop("dspark_markov_rank"))
    seen = cli("original", k.root, "--json")
    # `sorted` would compare by path; S(5) is the sixth shard once the fifth is gone.
    assert {f["code"] for f in errors(seen.json())} == {"file.html-page", "shard.missing", "config.dspark"}


def test_faults_pruned_tensors_names_both_numbers(copy: Callable[[str], Toy], cli: Run) -> None:
    k = copy("0731")
    prune(k)
    (fault,) = errors(cli("original", k.root, "--json").json())
    assert "2" in fault["expected"] and "4" in fault["found"]


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_faults_umask_decides_modes_of_the_output(copy: Callable[[str], Toy], cli: Run, mask: int) -> None:
    k = copy("0731")
    for path in k.root.rglob("*.json"):
        path.chmod(0o400)
    before = os.umask(mask)
    try:
        assert cli("convert", k.root, k.out, "--jobs", 1).exit_code == 0
    finally:
        os.umask(before)
    modes = {p.stat().st_mode & 0o777 for p in k.out.rglob("*") if p.is_file()}
    assert modes == {0o666 & ~mask}


def test_faults_unreadable_shard_is_a_permission_not_corruption(
    copy: Callable[[str], Toy], cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Modes do not stop root, so the system call itself refuses.
    k = copy("0731")
    real, shard = os.open, k.S(2)

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if os.fspath(path) == os.fspath(shard):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    for name, status in (("original", 1), ("convert", 3)):
        seen = cli(name, k.root, *([k.out] if name == "convert" else []), "--json")
        assert seen.exit_code == status
        assert [(f["code"], f["where"]) for f in errors(seen.json())] == [("file.unreadable", S(2))]


def test_faults_output_of_link_farm_holds_no_link_even_for_side_files(
    copy: Callable[[str], Toy], cli: Run
) -> None:
    k = copy("0731")
    link_farm(k)
    assert cli("convert", k.root, k.out, "--jobs", 1, "--experts", "mxfp4").exit_code == 0
    shutil.rmtree(k.root.parent / "blobs")
    # With the blobs gone the output must stand by itself.
    assert cli("converted", k.out, "--read-data", "--jobs", 1).exit_code == 0


def test_faults_flipped_padding_and_zeros_are_noticed(copy: Callable[[str], Toy], cli: Run) -> None:
    # 288 columns leave 96 columns of padding in the last group; kernels rely on them, and on +0, being zero.
    k = copy("ragged-int8")
    name = "layers.0.ffn.experts.0.w1"
    for part, offset, mask in ((".weight_codes", 191, 0x10), (".weight_shift2", 2, 0x80)):
        k.flip(name + part, offset, mask)
        seen = cli("converted", k.root, "--reference", k.ref, "--read-data", "--jobs", 1, "--json")
        assert [(f["code"], f["where"]) for f in errors(seen.json())] == [("reference.bytes", name)]
        k.flip(name + part, offset, mask)


def test_faults_other_weights_with_the_same_headers_are_noticed(
    copy: Callable[[str], Toy], toybox: Toybox, cli: Run
) -> None:
    k, other = copy("int8"), toybox.original("other-seed")
    seen = cli("converted", k.root, "--reference", other, "--json")
    # Headers alone cannot tell; then the report must not claim more than that.
    assert seen.exit_code == 0 and not any("is the source" in line for line in seen.json()["checked"])
    seen = cli("converted", k.root, "--reference", other, "--read-data", "--jobs", 1, "--json")
    assert seen.exit_code == 1
    assert {f["code"] for f in errors(seen.json())} == {"reference.bytes"}


def test_faults_directory_that_is_no_checkpoint_is_not_searched(tmp_path: Path, cli: Run) -> None:
    # A mistyped path may be a home directory or the root of a disk.
    deep = tmp_path / "home" / "projects"
    deep.mkdir(parents=True)
    (deep / "old.gguf").write_bytes(b"")
    (tmp_path / "home" / "notes.txt").write_text("x")
    seen = cli("original", tmp_path / "home", "--json")
    assert {(f["code"], f["where"]) for f in seen.json()["findings"] if f["severity"] == "error"} == {
        ("config.missing", CONFIG),
        ("dir.no-weights", "home"),
    }
    assert "old.gguf" not in seen.out


def test_faults_manifest_cannot_name_files_elsewhere(copy: Callable[[str], Toy], cli: Run) -> None:
    k = copy("int8")
    k.json(MANIFEST, lambda m: m["output"]["files_sha256"].update({"/etc/hostname": "0" * 64}))
    (fault,) = errors(cli("converted", k.root, "--json").json())
    # Nothing about a file outside, not even its hash, may be told.
    assert (fault["code"], fault["where"], fault["found"]) == ("manifest.mismatch", "/etc/hostname", "")


# Processes: what only a real one shows ------------------------------------------------------------------


def dsv4convert(*args: object, **env: str) -> subprocess.CompletedProcess[bytes]:
    """Run the command in a process of its own."""
    root = Path(__file__).parent.parent
    return subprocess.run(
        [sys.executable, "-m", "dsv4convert", *map(os.fspath, map(_path, args))],
        capture_output=True,
        cwd=root,
        env={**os.environ, **env},
        timeout=120,
        check=False,
    )


def _path(arg: object) -> Any:
    return arg if isinstance(arg, str | bytes | os.PathLike) else str(arg)


_LOCALES = {
    "C": {"LC_ALL": "C"},
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "no-utf8-at-all": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}


@pytest.mark.parametrize("locale", _LOCALES)
def test_faults_foreign_characters_print_under_any_locale(copy: Callable[[str], Toy], locale: str) -> None:
    env = _LOCALES[locale]
    k = copy("0731")
    target = k.root.parent / "模型 权重 v4"
    k.root.rename(target)
    broken = Toy(target)
    assert dsv4convert("plan", target, **env).returncode == 0
    broken.drop("norm.weight")
    broken.put("说明.bin", b"\x80")
    seen = dsv4convert("original", target, **env)
    assert seen.returncode == 1
    assert b"unit.missing-tensor" in seen.stderr and b"file.pickle" in seen.stderr
    assert b"Traceback" not in seen.stderr
    seen = dsv4convert("original", target, "--json", **env)
    assert seen.returncode == 1
    # Half a surrogate pair would make the report unreadable for other JSON parsers.
    assert json.dumps(json.loads(seen.stdout), ensure_ascii=False).encode()
    assert locale != "C" or json.loads(seen.stdout)["subject"] == "模型 权重 v4"


@pytest.mark.slow
def test_faults_undecodable_path_converts_and_verifies(copy: Callable[[str], Toy]) -> None:
    k = copy("0731")
    bad = os.fsencode(k.root.parent) + b"/bad\xff"
    os.makedirs(bad)
    source, target = bad + b"/m", bad + b"/out"
    os.rename(k.root, source)
    for args in (
        ("original", source),
        ("convert", source, target, "--jobs", "1"),
        ("converted", target, "--reference", source, "--read-data", "--jobs", "1", "--json"),
    ):
        seen = dsv4convert(*args)
        assert seen.returncode == 0, seen.stderr
    os.remove(source + b"/config.json")
    seen = dsv4convert("original", source)
    assert seen.returncode == 1 and b"config.missing" in seen.stderr


@pytest.mark.parametrize(
    ("args", "status"),
    [(("original", "--json"), 1), (("original",), 1), (("plan", "--json"), 1), (("inspect", "--json"), 1)],
    ids=lambda a: "-".join(a) if isinstance(a, tuple) else "",
)
def test_faults_exit_status_survives_a_closed_pipe(
    copy: Callable[[str], Toy], args: tuple[str, ...], status: int
) -> None:
    k = copy("0731")
    k.drop("norm.weight")
    # More findings than a pipe holds, so that the writer does meet the closed end.
    k.idx(
        lambda o: o["weight_map"].update({f"ghost.{i}.weight": "/" + "x" * 200 + str(i) for i in range(500)})
    )
    tool = f'"$0" -m dsv4convert {args[0]} "$1" {" ".join(args[1:])}'
    line = f"{tool} | head -c1 >/dev/null; exit ${{PIPESTATUS[0]}}"
    seen = subprocess.run(
        ["bash", "-c", line, sys.executable, str(k.root)],
        capture_output=True,
        cwd=Path(__file__).parent.parent,
        timeout=60,
        check=False,
    )
    assert seen.returncode == status, seen.stderr
    assert b"Traceback" not in seen.stderr and b"Exception ignored" not in seen.stderr


# Mutations ----------------------------------------------------------------------------------------------

_VALUES: tuple[Any, ...] = (
    None,
    [],
    {},
    -1,
    0,
    1e300,
    "x",
    "",
    1 << 70,
    -(1 << 70),
    True,
    [[]],
    {"a": {"b": [1]}},
)
_VALUES += ([1 << 70], [-1, "x"], "\ud800", [None] * 3, 1 << 31, 0.5)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value of a JSON document, its root included."""
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in pairs:
        yield from _places(child, (*path, key))


def _mutate(document: Any, rng: np.random.Generator) -> Any:
    """Replace one to three values of a document, or remove them."""
    for _ in range(int(rng.integers(1, 4))):
        # Every depth gets the same share of the draws; nearly all values lie at the deepest.
        depths: dict[int, list[tuple[Any, ...]]] = {}
        for path in _places(document):
            depths.setdefault(len(path), []).append(path)
        pool = depths[int(rng.integers(len(depths)))]
        path = pool[int(rng.integers(len(pool)))]
        new = _VALUES[int(rng.integers(len(_VALUES)))]
        if not path:
            document = new if rng.random() < 0.2 else document
            continue
        parent = document
        for key in path[:-1]:
            parent = parent[key]
        if rng.random() < 0.15:
            del parent[path[-1]]
        else:
            parent[path[-1]] = json.loads(json.dumps(new))
    return document


@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("target", ["config", "index", "header", "manifest", "v4.1-config"])
def test_faults_mutated_json_never_ends_in_an_internal_error(
    copy: Callable[[str], Toy], cli: Run, target: str, part: int
) -> None:
    k = copy({"manifest": "int8", "v4.1-config": "v4.1"}.get(target, "0731"))
    name = {"index": INDEX, "manifest": MANIFEST}.get(target, CONFIG)
    rng = np.random.default_rng([part, *target.encode()])
    shard = k.S(int(rng.integers(len(list(k.root.glob("*.safetensors"))))) + 1)
    keep = shard.read_bytes() if target == "header" else (k.root / name).read_bytes()
    lines = [
        ["original", k.root],
        ["plan", k.root],
        ["convert", k.root, k.out, "--jobs", 1],
        ["converted", k.root],
    ]
    if target == "manifest":
        lines = [
            ["converted", k.root, "--read-data", "--jobs", 1],
            ["converted", k.root, "--reference", k.ref],
        ]
    for _ in range(4):
        if target == "header":
            end = 8 + int.from_bytes(keep[:8], "little")
            text = json.dumps(_mutate(json.loads(keep[8:end]), rng)).encode()
            shard.write_bytes(len(text).to_bytes(8, "little") + text + keep[end:])
        else:
            (k.root / name).write_text(json.dumps(_mutate(json.loads(keep), rng)))
        for line in lines:
            seen = cli(*line)
            assert seen.exit_code in (0, 1, 3, 4), (seen.err, (k.root / name).read_text()[:2000])
            assert "Traceback" not in seen.err
        shutil.rmtree(k.out, ignore_errors=True)
