"""The documented Python interface, used as its own documentation says."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4convert import api

Sample = Callable[[str], Path]


def test_documented_calls_work_as_written(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the example of the module's docstring, with one job so that it stays cheap."""
    lines = re.findall(r"^    (.*)$", inspect.getdoc(api) or "", re.MULTILINE)
    example = "\n".join(lines)
    assert "api.convert(" in example and "jobs=4" in example
    os.symlink(sample("short"), tmp_path / "DeepSeek-V4-Flash-0731")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    exec(example.replace("jobs=4", "jobs=1"), scope)
    assert isinstance(scope["report"], api.Report) and scope["report"].ok()
    assert isinstance(scope["plan"], api.Plan)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert capsys.readouterr() == ("", "")


def test_open_plan_convert_and_verify_agree_on_the_totals(sample: Sample, tmp_path: Path) -> None:
    checkpoint = api.open(sample("short"))
    plan = api.plan(checkpoint, api.Layout.MXFP4)
    result = api.convert(checkpoint, tmp_path / "out", experts="mxfp4")
    report = api.verify(tmp_path / "out", reference=sample("short"), read_data=100)
    assert plan.digest == result.plan.digest == api.plan(sample("short"), "mxfp4").digest
    assert (result.written, result.reused, result.missing) == (8, 0, ())
    assert report.findings == ()
    assert [line.partition(":")[0] for line in report.not_checked] == ["manifest"]
    facts = report.facts
    assert (facts["tensors"], facts["data_bytes"]) == (plan.tensors, plan.data_bytes)
    assert facts["file_bytes"] == plan.file_bytes
    assert facts["expert_weights"] == plan.expert_weights
    assert facts["mtp_tensors"] == plan.mtp_tensors


def test_parts_are_closed_by_finalize(sample: Sample, tmp_path: Path) -> None:
    for index in range(2):
        assert api.convert(sample("short"), tmp_path / "out", part=(index, 2)).manifest is None
    closed = api.finalize(tmp_path / "out")
    assert closed is not None and closed.manifest is not None
    assert api.verify(tmp_path / "out", read_data=100).ok()


def test_errors_carry_findings_and_nothing_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(api.Refused) as caught:
        api.plan(tmp_path / "gone")
    assert isinstance(caught.value, api.Dsv4Error)
    (found,) = caught.value.findings
    assert isinstance(found, api.Finding) and found.code == "dir.not-found"
    assert capsys.readouterr() == ("", "")


def test_every_public_name_is_there() -> None:
    assert len(set(api.__all__)) == len(api.__all__)
    assert [name for name in api.__all__ if not hasattr(api, name)] == []


@pytest.mark.parametrize("part", [(2, 2), (-1, 2), (0, 0)])
def test_part_that_does_not_exist_is_a_value_error(
    sample: Sample, tmp_path: Path, part: tuple[int, int]
) -> None:
    """`range` would silently convert nothing, or the wrong shards."""
    with pytest.raises(ValueError, match="part"):
        api.convert(sample("short"), tmp_path / "out", part=part)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("jobs", [0, -1])
def test_number_of_jobs_below_one_is_a_value_error(sample: Sample, tmp_path: Path, jobs: int) -> None:
    with pytest.raises(ValueError, match="jobs"):
        api.convert(sample("short"), tmp_path / "out", jobs=jobs)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("synth", "x", "--ragged", "--scale", "full"),
        ("synth", "x", "--intermediate", "64", "--scale", "full"),
        ("synth", "x", "--intermediate", "100"),
        ("convert", "x", "y", "--shards", "4/4"),
    ],
)
def test_options_that_do_not_go_together_are_a_usage_error(
    cli: Callable[..., Any], arguments: tuple[str, ...]
) -> None:
    assert cli(*arguments).exit_code == 2
