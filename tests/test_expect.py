"""`--expect`: numbers of a checkpoint against those a script was written for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Ran

Sample = Callable[[str], Path]
Cli = Callable[..., Ran]
KEYS = ["shards", "tensors", "data_bytes", "expert_weights", "mtp_tensors", "layout", "release"]


def numbers(report: Ran) -> str:
    """Return the report's own numbers in the form that `--expect` takes."""
    facts = report.json()["facts"]
    return ",".join(f"{key}={'none' if facts[key] is None else facts[key]}" for key in KEYS)


def test_expect_passes_on_its_own_numbers(cli: Cli, sample: Sample, tmp_path: Path) -> None:
    source, out = sample("short"), tmp_path / "out"
    assert cli("convert", source, out, "--jobs", 1).exit_code == 0
    for command, path in (("original", source), ("converted", out)):
        right = numbers(cli(command, path, "--json"))
        seen = cli(command, path, "--json", "--expect", right)
        assert seen.exit_code == 0 and seen.json()["findings"] == []
        assert seen.json()["checked"][-1] == f"expected numbers: {', '.join(KEYS)}"


@pytest.mark.parametrize("key", KEYS)
def test_expect_reports_each_wrong_number_by_itself(cli: Cli, sample: Sample, key: str) -> None:
    wrong = "int8" if key in ("layout", "release") else "7"
    seen = cli("original", sample("short"), "--json", "--expect", f"{key}={wrong}", "--expect", "shards=7")
    assert seen.exit_code == 1 and seen.json()["ok"] is False
    facts = {k: "none" if v is None else str(v) for k, v in seen.json()["facts"].items()}
    found = [(f["code"], f["where"], f["expected"], f["found"]) for f in seen.json()["findings"]]
    wanted = {key: wrong, "shards": "7"}
    assert found == [("expect.mismatch", k, v, facts[k]) for k, v in wanted.items()]


def test_expect_keeps_the_other_findings(cli: Cli, sample: Sample) -> None:
    seen = cli("converted", sample("short"), "--json", "--expect", "layout=int8")
    assert {f["code"] for f in seen.json()["findings"]} == {
        "expect.mismatch",
        "dst.not-converted",
        "manifest.missing",
    }
    assert seen.json()["findings"][-1]["severity"] == "warning"


@pytest.mark.parametrize(
    "text",
    [
        "foo=1",
        "shards",
        "shards=",
        "shards=x",
        "shards=-1",
        "shards=1.0",
        "shards=²",
        "shards=1,shards=2",
        "",
    ],
)
def test_expect_that_says_nothing_is_usage(cli: Cli, sample: Sample, text: str) -> None:
    seen = cli("original", sample("short"), "--expect", text)
    assert seen.exit_code == 2 and seen.out == ""
    if "=" not in text or text.startswith("foo"):
        assert all(key in seen.err for key in KEYS)


def test_expect_may_repeat_itself(cli: Cli, sample: Sample) -> None:
    seen = cli("original", sample("short"), "--json", "--expect", "layout=official, layout=official")
    assert seen.exit_code == 0


def test_numbers_of_the_workflow_are_those_of_the_release(cli: Cli, tmp_path: Path) -> None:
    import yaml

    text = (Path(__file__).parent.parent / "docs" / "github-workflow.yml").read_text()
    workflow = yaml.safe_load(text)
    assert set(workflow["jobs"]) == {"check"}
    uses = re.findall(r"uses: (\S+)@(\S+) # v\d+\.\d+\.\d+$", text, re.M)
    assert len(uses) == text.count("uses:") == 3 and all(re.fullmatch("[0-9a-f]{40}", sha) for _, sha in uses)
    full = tmp_path / "full"
    assert cli("synth", full, "--scale", "full", "-q").exit_code == 0
    assert cli("original", full, "--strict", "--expect", workflow["env"]["SRC_NUMBERS"]).exit_code == 0
    plan = cli("plan", full, "--json").json()
    wanted = dict(pair.split("=") for pair in workflow["env"]["DST_NUMBERS"].split(","))
    assert {key: str(plan[key]) for key in wanted} == wanted
