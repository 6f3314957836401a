"""A sequence in pieces gives what it gives in one: window, remainders and indexer keys carry over."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels_ref.arithmetic import EXACT, Numerics
from kernels_ref.decisions import Decisions
from kernels_ref.model import Model
from tests.reference.tiny import Tiny, prompt, relative
from tests.tolerances import FLOAT32_MODELS, ROUNDED_IN_PIECES

# Ends of groups of 4 and of 128, and of the window of 16, fall inside, between and on borders of pieces.
PIECES = (1, 2, 1, 4, 7, 1, 100, 11, 1, 1, 3, 64, 60, 4)


def _in_pieces(model: Model, ids: Tensor) -> Tensor:
    state = model.state()
    parts = [model(part, state) for part in ids.split(PIECES)]
    assert state.position == len(ids)
    return torch.cat(parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "numerics",
    [EXACT, Numerics(linear="e4m3", kv="e4m3", index="e2m1"), Numerics(index="int8", experts="w4a8")],
    ids=["exact", "official roundings", "sm80 roundings"],
)
def test_pieces_of_any_length_give_the_logits_of_the_whole(
    numerics: Numerics, model: Callable[..., Tiny]
) -> None:
    """In float32, and with decisions replayed: a sum in another order must flip no rounding or choice."""
    tiny, ids = model("plain"), prompt(sum(PIECES))
    recorded = Decisions()
    whole = Model(tiny.config, tiny.weights, numerics, decisions=recorded)(ids)
    replayed = Decisions.replay(recorded.chosen)
    pieces = _in_pieces(Model(tiny.config, tiny.weights, numerics, decisions=replayed), ids)
    if numerics is EXACT:
        assert relative(pieces, whole) < FLOAT32_MODELS
        assert torch.equal(pieces.argmax(-1), whole.argmax(-1))
        # Not the indexers': of entries with equal scores, here often 0, any may be picked.
        assert all(torch.equal(replayed.own[n], x) for n, x in recorded.own.items() if "gate" in n)
    else:
        assert relative(pieces, whole) < ROUNDED_IN_PIECES


@pytest.mark.slow
def test_greedy_tokens_are_those_of_the_prompt_run_again(model: Callable[..., Tiny]) -> None:
    tiny, ids = model("plain"), prompt(122)
    reference = Model(tiny.config, tiny.weights)
    found = reference.generate(ids, 8)
    for token in found:
        assert reference(ids)[-1].argmax() == token
        ids = torch.cat((ids, token[None]))


def test_each_layer_is_shown(model: Callable[..., Tiny]) -> None:
    tiny, shown = model("plain"), {}
    reference = Model(tiny.config, tiny.weights)
    logits = reference(prompt(5), on_layer=lambda layer, h: shown.setdefault(layer, h))
    assert list(shown) == [0, 1, 2, 3, 4]
    assert {tuple(h.shape) for h in shown.values()} == {(5, 4, 256)}
    assert torch.equal(reference.head(shown[4]), logits)


def test_only_chosen_experts_are_fetched(model: Callable[..., Tiny]) -> None:
    tiny, fetched = model("plain"), set()

    class Spy:
        def tensor(self, name: str) -> Tensor:
            return tiny.weights.tensor(name)

        def expert(self, prefix: str, index: int) -> object:
            fetched.add((prefix, index))
            return tiny.weights.expert(prefix, index)

    decisions = Decisions()
    Model(tiny.config, Spy(), decisions=decisions)(prompt(2))
    chosen = {
        (name.removesuffix(".ffn.gate"), index)
        for name, rows in decisions.chosen.items()
        if name.endswith("gate")
        for index in rows.unique().tolist()
    }
    assert fetched == chosen
    assert len(fetched) <= 2 * 2 * 5
