"""The suite about pictures against SGLang's own HTTP server, with our chat encoding and our processor.

What passes here has been through every route and class of SGLang up to the scheduler; the clients are the
official ones. Answers follow from all tokens and from the hashes of pictures by a rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4convert.smoke.checks import Outcome, Scene, Terms
from dsv4convert.smoke.server import open_server
from dsv4convert.smoke.suite import run_suite
from tests.sglang.front import front

TERMS = Terms(suite="vision", pictures=(1, 2, 8, 12), random_weights=True, number=7)
#: Checks that need more than a front: a model that was trained, or a golden file.
SKIPPED = {"vision.colour", "vision.order", "vision.shape", "vision.reading", "tokens.ids", "tokens.text"}


@pytest.fixture(scope="module")
def outcomes(shelf: Path) -> Iterator[dict[str, Outcome]]:
    """Run the suite once."""
    with (
        front(shelf / "vision-int8", limit=12) as url,
        open_server(url, "", 60.0) as server,
        Scene.of(server, TERMS) as scene,
    ):
        found = run_suite(scene)
    assert found.lost is None
    yield {outcome.name: outcome for outcome in found.outcomes}


def test_every_check_passes(outcomes: dict[str, Outcome]) -> None:
    findings = [f for outcome in outcomes.values() for f in outcome.findings]
    assert findings == []
    assert {name for name, outcome in outcomes.items() if outcome.state != "passed"} == SKIPPED


def test_pictures_of_function_results_reach_the_model_through_responses(outcomes: dict[str, Outcome]) -> None:
    facts = outcomes["vision.responses-tools"].facts
    assert "refused" not in facts and facts["prompt_tokens"] == facts["laid_out"]


def test_limit_is_that_of_the_server(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["vision.limit"].facts == {"limit": 12}
