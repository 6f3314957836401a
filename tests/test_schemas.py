"""The committed JSON schemas describe what the commands print, no more and no less."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.conftest import Ran

SCHEMAS = Path(__file__).resolve().parent.parent / "docs" / "schemas"
Sample = Callable[[str], Path]
Cli = Callable[..., Ran]


def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads((SCHEMAS / f"{name}.schema.json").read_bytes()))


def require(name: str, value: Any) -> None:
    found = [f"{e.json_path}: {e.message[:200]}" for e in validator(name).iter_errors(value)]
    assert found == []


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.samples import make_sample

    return make_sample(tmp_path_factory.mktemp("schemas"), "short")


@pytest.mark.parametrize("path", sorted(SCHEMAS.glob("*.json")), ids=lambda p: p.name.partition(".")[0])
def test_schema_is_one(path: Path) -> None:
    schema = json.loads(path.read_bytes())
    Draft202012Validator.check_schema(schema)
    assert schema["additionalProperties"] is False and schema["title"] and schema["description"]


def test_schema_of_what_reads_headers(cli: Cli, source: Path, tmp_path: Path) -> None:
    for arguments in ((), ("--tensors", "norm*")):
        require("inspect", cli("inspect", source, "--json", *arguments).json())
    for arguments in ((), ("--steps", "--experts", "mxfp4"), ("--tp", 3, "--dst", tmp_path / "out")):
        require("plan", cli("plan", source, "--json", *arguments).json())
    budget = ("--tp", 1, "--context", 64, "--concurrency", 2)
    require("plan", cli("plan", source, "--json", *budget).json())
    require("report", cli("original", source, "--json").json())
    require("report", cli("original", source, "--json", "--checksums", "auto", "--read-data", 100).json())
    require("report", cli("original", source, "--json", "--expect", "shards=1").json())


def test_schema_of_a_conversion_and_of_its_report(cli: Cli, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    require("convert", cli("convert", source, out, "--json", "--shards", "0/2").json())
    require("convert", cli("convert", source, out, "--json", "--jobs", 1).json())
    require("convert", cli("convert", source, out, "--json", "--jobs", 1).json())
    require("convert", cli("finalize", out, "--json").json())
    require("manifest", json.loads((out / "dsv4convert.json").read_bytes()))
    for arguments in ((), ("--reference", source, "--read-data", 10)):
        require("report", cli("converted", out, "--json", "--jobs", 1, *arguments).json())
    kept = tmp_path / "kept"
    require("convert", cli("convert", source, kept, "--json", "--jobs", 1, "--experts", "mxfp4").json())
    require("manifest", json.loads((kept / "dsv4convert.json").read_bytes()))


def test_schema_of_errors(cli: Cli, source: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    for arguments in (("original", tmp_path / "nowhere"), ("convert", source, tmp_path / "full")):
        seen = cli(*arguments, "--json")
        assert seen.exit_code == 3
        require("error", seen.json())


@pytest.mark.parametrize("name", ["report", "plan", "convert", "error", "inspect"])
def test_schema_refuses_an_unknown_key(name: str, cli: Cli, source: Path, tmp_path: Path) -> None:
    lines: dict[str, tuple[object, ...]] = {
        "report": ("original", source),
        "plan": ("plan", source),
        "inspect": ("inspect", source),
        "convert": ("convert", source, tmp_path / "out", "--jobs", 1),
        "error": ("original", tmp_path / "nowhere"),
    }
    value = cli(*lines[name], "--json").json()
    require(name, value)
    assert not validator(name).is_valid({**value, "new": 1})
    assert not validator(name).is_valid({k: v for k, v in value.items() if k != "ok"})
