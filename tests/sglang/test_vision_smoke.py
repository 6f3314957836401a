"""The suite about pictures against SGLang's own HTTP server, with our chat encoding and our processor.

What passes here has been through every route and class of SGLang up to the scheduler; the clients are the
official ones. Answers follow from all tokens and from the hashes of pictures by a rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4convert.probe import probe
from dsv4convert.smoke import pictures, tokens
from dsv4convert.smoke.checks import Outcome, Scene, Terms
from dsv4convert.smoke.server import open_server
from dsv4convert.smoke.shown import golden_length, read_shown
from dsv4convert.smoke.suite import run_suite
from dsv4convert.vision.layout import PLACEHOLDER
from tests.sglang.front import front

TERMS = Terms(suite="vision", pictures=(1, 2, 8, 12), random_weights=True, number=7)
#: Checks that need more than a front: a model that was trained, or a golden file.
SKIPPED = {"vision.colour", "vision.order", "vision.shape", "vision.reading", "tokens.ids", "tokens.text"}


@pytest.fixture(scope="module")
def scene(shelf: Path) -> Iterator[Scene]:
    with (
        front(shelf / "vision-int8", limit=12) as url,
        open_server(url, "", 60.0) as server,
        Scene.of(server, TERMS) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def outcomes(scene: Scene) -> dict[str, Outcome]:
    """Run the suite once."""
    found = run_suite(scene)
    assert found.lost is None
    return {outcome.name: outcome for outcome in found.outcomes}


def test_every_check_passes(outcomes: dict[str, Outcome]) -> None:
    findings = [f for outcome in outcomes.values() for f in outcome.findings]
    assert findings == []
    assert {name for name, outcome in outcomes.items() if outcome.state != "passed"} == SKIPPED


def test_pictures_of_function_results_reach_the_model_through_responses(outcomes: dict[str, Outcome]) -> None:
    facts = outcomes["vision.responses-tools"].facts
    assert "refused" not in facts and facts["prompt_tokens"] == facts["laid_out"]


def test_limit_is_that_of_the_server(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["vision.limit"].facts == {"limit": 12}


@pytest.mark.parametrize(
    "text",
    ["What is this?", f"One:\n\n{PLACEHOLDER}\n\nTwo:\n\n{PLACEHOLDER}\n\n{PLACEHOLDER}"],
    ids=["before", "between"],
)
def test_probe_and_server_lay_out_the_same_prompt(
    text: str, shelf: Path, scene: Scene, tmp_path: Path
) -> None:
    """By ids and as a chat; that the answers are others is the rule of the front."""
    files = []
    for picture in (pictures.plain("red"), pictures.shape("circle")):
        files.append(tmp_path / f"{picture.name}.png")
        files[-1].write_bytes(picture.data)
    shown = [*files, files[0]]
    golden = probe(shelf / "vision-int8", text, images=shown, chat=True, tokens=2).golden
    terms = replace(TERMS, golden=golden, shown=read_shown(shown, golden))
    results = {check.name: check.run() for check in tokens.checks(replace(scene, terms=terms))}
    assert not results["tokens.ids"].skipped
    codes = {f.code for name in ("tokens.ids", "tokens.text") for f in results[name].findings}
    assert codes == {"smoke.golden"}
    # Neither another number of tokens, `smoke.usage` and `smoke.template`, nor a refusal.
    assert golden_length(golden) > len(golden["prompt"]["ids"]) + 3 * 90
