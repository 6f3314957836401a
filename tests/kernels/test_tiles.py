"""The shipped tables: what is chosen, what every plan must keep, and what tuning makes of times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels_ref.sm80.measure import merge
from kernels_ref.sm80.moe import _halves, _rows
from kernels_ref.sm80.tiles import DEFAULT, Plan, Tile, Walk, choose, choose_attention, choose_scores
from kernels_ref.sm80.tune_experts import FAMILIES, preferred

PLAN = Plan(8, "w4a16", 0, Tile("few", 16, 1, 3, 4), Tile("few", 32, 1, 3, 2))
PLANS = list({plan: 0 for table in DEFAULT.values() for plans in table.values() for plan in plans})


@pytest.mark.parametrize(
    ("tokens", "intermediate", "size", "row"),
    [
        (1, 2048, 2048, 0),
        (2, 2048, 2048, 0),
        (3, 2048, 2048, 1),
        (10**6, 2048, 2048, -1),
        (1, 512, 512, 0),
        (1, 256, 256, 0),
        (1, 384, 256, 0),
        (1, 385, 512, 0),
        (64, 1024, 512, 2),
        (64, 3072, 2048, 2),
    ],
)
def test_nearest_size_and_first_plan_that_holds(tokens: int, intermediate: int, size: int, row: int) -> None:
    for arithmetic in ("auto", "w4a16"):
        assert choose(tokens, intermediate, arithmetic) is DEFAULT[size][arithmetic][row]


@pytest.mark.parametrize("arithmetic", ["auto", "w4a16", "w4a8"])
@pytest.mark.parametrize("size", DEFAULT)
def test_plans_ascend_and_the_last_holds_for_any_number(size: int, arithmetic: str) -> None:
    plans = DEFAULT[size][arithmetic]
    assert {plan.arithmetic for plan in plans} <= (
        {arithmetic} if arithmetic != "auto" else {"w4a16", "w4a8"}
    )
    limits = [plan.tokens for plan in plans]
    assert limits[-1] == 0
    assert limits[:-1] == sorted(set(limits[:-1]))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_plan_keeps_what_its_kernels_need(plan: Plan) -> None:
    digits = {"w4a8": 1, "w4a16": 2}[plan.arithmetic]
    for tile in (plan.w13, plan.w2):
        assert tile.rows >= 16 * tile.warps
        assert tile.halves in (1, 2, 4, 8)
        if tile.kernel == "many":
            # Otherwise warps share rows, and decoded weights go through shared memory.
            assert tile.rows >= plan.columns >= 16
    assert plan.columns % (8 * digits) == 0 or plan.columns == 8


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (8, 1), (32, 1), (33, 2), (4096, 2), (10**6, 2)])
def test_shipped_attention_and_scores_take_any_number_of_tokens(tokens: int, blocks: int) -> None:
    plan = choose_attention(tokens)
    assert (plan.split, plan.whole, plan.blocks) == (Walk(1, 3, 2), Walk(2, 2, 4), blocks)
    scores = choose_scores(tokens)
    assert (scores.warps, scores.stages, scores.pages, scores.blocks) == (1, 3, 16, 8)


def test_rows_and_steps_shrink_to_fit_and_no_further() -> None:
    assert _rows(Tile("many", 256, 4, 3), 384) == 128
    assert _halves(Tile("few", 16, 1, 3, 8), 384) == 2
    with pytest.raises(ValueError, match="a matrix of 384 rows cannot be cut into tiles of 256 rows or more"):
        _rows(Tile("many", 256, 16, 3), 384)
    with pytest.raises(ValueError, match="K must be a multiple of 128"):
        _halves(Tile("few", 16, 1, 3, 8), 320)


def test_neighbours_that_differ_in_tokens_only_become_one() -> None:
    other = replace(PLAN, columns=8)
    plans = [replace(PLAN, tokens=n) for n in (1, 2)] + [replace(other, tokens=n) for n in (4, 8)]
    assert merge(plans) == (replace(PLAN, tokens=2), replace(other, tokens=0))


def test_both_arithmetics_are_measured_for_every_number_of_tokens() -> None:
    for tokens in (1, 8, 9, 64, 300, 2048, 10**6):
        assert {f.arithmetic for f in FAMILIES if f.first <= tokens <= f.last} == {"w4a16", "w4a8"}


@pytest.mark.parametrize(("w4a8", "choice"), [(91.0, "w4a16"), (89.0, "w4a8")])
def test_coarse_arithmetic_needs_more_than_ten_percent(w4a8: float, choice: str) -> None:
    assert preferred({"w4a16": (100.0, PLAN), "w4a8": (w4a8, PLAN)}) == choice
