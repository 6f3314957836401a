"""Damage to a draft shows in the number of accepted guesses, and only there: the trunk says the same.

The draft of this checkpoint was fitted (`fit_draft`) until every guess was right; each fault below happened
to someone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4convert.errors import Dsv4Error
from dsv4convert.probe.draft import DraftHealth, DraftWatch, accepted, depth, starts_of
from kernels_ref.model import Model
from tests.reference import fit_draft, tiny

MAIN = "mtp.0.main_proj.weight"
W1 = "mtp.2.markov_head.markov_w1.weight"
#: Tokens per step of the undamaged draft, whose every guess is right.
WHOLE = 6.0


class Fitted:
    """The checkpoint with the fitted draft, and a sequence through its trunk."""

    def __init__(self, root: Path) -> None:
        path = tiny.make(root, "plain")
        fit_draft.apply(path)
        self.made = tiny.Tiny.read(path)
        self.trunk = Model(self.made.config, self.made.weights)
        prompt = tiny.prompt(fit_draft.PROMPT)
        self.ids = torch.cat((prompt, self.trunk.generate(prompt, fit_draft.SAID))).tolist()

    def health(self, weights: tiny.Weights) -> DraftHealth:
        """Run the trunk and the draft of the same checkpoint with other weights."""
        model = Model(self.made.config, weights)
        watch = DraftWatch(model)
        model(torch.tensor(self.ids[:-1]), on_layer=watch)
        starts = starts_of(fit_draft.PROMPT, fit_draft.SAID, depth(model))
        return DraftHealth(depth(model), accepted(watch.logits(self.ids, starts), self.ids, starts))


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    """Return the checkpoint."""
    return Fitted(tmp_path_factory.mktemp("fitted"))


def test_every_guess_of_the_undamaged_draft_is_right(fitted: Fitted) -> None:
    health = fitted.health(fitted.made.weights)
    assert health.length == WHOLE
    assert health.shares == (1.0,) * 5
    assert not health.findings()


def _put(name: str, value: Tensor) -> Callable[[tiny.Weights], tiny.Weights]:
    return lambda weights: replace(weights, stored=weights.stored | {name: value})


def _without_main_proj(weights: tiny.Weights) -> tiny.Weights:
    return _put(MAIN, torch.zeros_like(weights.tensor(MAIN)))(weights)


def _without_markov_head(weights: tiny.Weights) -> tiny.Weights:
    return weights.changed(W1, torch.zeros_like)


def _swapped(weights: tiny.Weights) -> tiny.Weights:
    stored = weights.stored
    return replace(weights, stored=stored | {fit_draft.swapped(name): stored[name] for name in stored})


@pytest.mark.parametrize(
    ("damage", "most"),
    [(_without_main_proj, 4.0), (_without_markov_head, 3.0), (_swapped, 4.0)],
    ids=["main_proj missing", "markov head dropped", "stages swapped"],
)
def test_damage_drops_the_accepted_length(
    fitted: Fitted, damage: Callable[[tiny.Weights], tiny.Weights], most: float
) -> None:
    assert fitted.health(damage(fitted.made.weights)).length < most


def test_main_proj_quantized_again_is_found(fitted: Fitted) -> None:
    """What a runtime does to a BF16 `main_proj` that its skip list forgets: E4M3, no scale."""
    value = fitted.made.weights.tensor(MAIN).to(torch.float8_e4m3fn).float()
    ruined = _put(MAIN, value * torch.finfo(torch.float32).min)
    with pytest.raises(Dsv4Error) as caught:
        fitted.health(ruined(fitted.made.weights))
    (found,) = caught.value.findings
    assert (found.code, found.where) == ("probe.non-finite", "mtp")


def test_a_random_draft_is_idle(model: Callable[..., tiny.Tiny], fitted: Fitted) -> None:
    """The weights that were there before the fit."""
    (found,) = fitted.health(model("plain").weights).findings()
    assert found.code == "probe.draft-idle"


def test_health_counts_by_hand() -> None:
    """Three starts; two, none and all of three guesses accepted."""
    logits = torch.zeros(3, 3, 10)
    said = [9, 1, 2, 3, 4, 5, 6, 7]
    for start, guesses in enumerate([(2, 3, 9), (9, 4, 5), (4, 5, 6)]):
        for place, token in enumerate(guesses):
            logits[start, place, token] = 1.0
    starts = starts_of(1, 6, 3)
    assert list(starts) == [0, 1, 2]
    found = accepted(logits, said, starts)
    assert found == (2, 0, 3)
    health = DraftHealth(3, found)
    assert health.length == pytest.approx(1 + 5 / 3)
    assert health.shares == pytest.approx((2 / 3, 2 / 3, 1 / 3))
