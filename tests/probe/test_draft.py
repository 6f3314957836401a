"""`probe --draft`: a fitted draft through the files of all layouts, whole and damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from dsv4convert import api
from dsv4convert.cli import main
from dsv4convert.errors import Refused
from dsv4convert.golden import encode_golden, read_golden
from dsv4convert.probe.forward import Run
from tests.probe.conftest import SHORT, change
from tests.reference import fit_draft, tiny

SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "schemas" / "golden.schema.json"
PROMPT = tiny.prompt(fit_draft.PROMPT).tolist()


def health(root: Path, **options: Any) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return the draft's section and the findings of a probe over the fitted sequence."""
    probed = api.probe(root, ids=PROMPT, tokens=fit_draft.SAID, draft=True, **options)
    return probed.golden["draft"], [(f.code, f.where) for f in probed.findings]


@pytest.mark.parametrize("layout", ["official", "mxfp4", "int8"])
def test_every_guess_is_right_in_every_layout(fitted: dict[str, Path], layout: str) -> None:
    draft, findings = health(fitted[layout])
    assert draft == {"depth": 5, "starts": 25, "length": 6.0, "shares": [1.0] * 5, "reference_error": None}
    assert findings == []


def test_a_conversion_is_bit_equal_to_its_source(fitted: dict[str, Path]) -> None:
    draft, findings = health(fitted["mxfp4"], reference=fitted["official"])
    assert (draft["length"], draft["reference_error"], findings) == (6.0, 0.0, [])


def test_main_proj_of_zeros_is_found_by_its_guesses_and_beside_the_reference(
    fitted: dict[str, Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(fitted["mxfp4"], tmp_path / "copy")

    def clear(data: bytearray) -> None:
        data[:] = bytes(len(data))

    change(copy, "mtp.0.main_proj.weight", clear)
    draft, findings = health(copy)
    assert draft["length"] < 4 and findings == []
    draft, findings = health(copy, reference=fitted["official"])
    assert draft["reference_error"] > 0.1 and findings == [("probe.differs", "mtp")]


def test_one_flipped_bit_in_the_last_stage_is_found_beside_the_reference(
    fitted: dict[str, Path], tmp_path: Path
) -> None:
    """Too little to cost a guess."""
    copy = shutil.copytree(fitted["mxfp4"], tmp_path / "copy")

    def flip(data: bytearray) -> None:
        data[0] ^= 0x40

    change(copy, "mtp.2.attn.wo_b.weight", flip)
    draft, findings = health(copy, reference=fitted["official"])
    assert draft["length"] == 6.0 and findings == [("probe.differs", "mtp")]


def test_a_preview_has_one_guess_a_step(sample: Callable[[str], Path], tmp_path: Path) -> None:
    root = tiny.make(tmp_path, "plain", "deepseek-v4-flash")
    probed = api.probe(root, ids=SHORT, tokens=6, draft=True)
    draft = probed.golden["draft"]
    assert (draft["depth"], draft["starts"]) == (1, 5)
    assert [f.code for f in probed.findings] == ["probe.draft-idle"] and probed.ok()


def test_too_few_tokens_are_refused_before_anything_runs(fitted: dict[str, Path]) -> None:
    with pytest.raises(Refused) as caught:
        api.probe(fitted["official"], ids=SHORT, tokens=5, draft=True)
    (found,) = caught.value.findings
    assert (found.code, found.expected) == ("probe.draft-short", "at least 6 tokens")


def test_the_fewest_tokens_give_one_start(fitted: dict[str, Path]) -> None:
    assert api.probe(fitted["official"], ids=SHORT, tokens=6, draft=True).golden["draft"]["starts"] == 1


def test_a_model_without_a_draft_is_refused(fitted: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """No release lacks one, so the model is made to say so."""
    monkeypatch.setattr(Run, "watch_draft", lambda run: 0)
    with pytest.raises(Refused) as caught:
        api.probe(fitted["official"], ids=SHORT, draft=True)
    assert [f.code for f in caught.value.findings] == ["probe.no-draft"]


def test_the_command_prints_it_and_the_golden_file_holds_it(fitted: dict[str, Path], tmp_path: Path) -> None:
    golden = tmp_path / "golden.json"
    ids = ",".join(map(str, PROMPT))
    run = CliRunner().invoke(
        main,
        ["probe", str(fitted["int8"]), "--ids", ids, "--tokens", "30", "--draft", "--golden", str(golden)],
    )
    assert run.exit_code == 0, run.output
    assert "5 guesses behind each of 25 tokens: 6.00 of 6 tokens a step expected" in run.stdout
    assert "right up to guess 1, 2, ...: 100%, 100%, 100%, 100%, 100%" in run.stdout
    found = read_golden(golden)
    jsonschema.validate(found, json.loads(SCHEMA.read_bytes()))
    assert found["draft"]["length"] == 6.0
    for key, wrong in (("depth", "5"), ("shares", None), ("length", "x")):
        golden.write_bytes(encode_golden(found | {"draft": found["draft"] | {key: wrong}}))
        with pytest.raises(Refused, match="`draft` is not there"):
            read_golden(golden)
