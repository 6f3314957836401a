"""The tile table: what is chosen, what a table from a file must be, what every plan must keep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kernels_ref.sm80 import tiles, tune
from kernels_ref.sm80.moe import _halves, _rows
from kernels_ref.sm80.tiles import DEFAULT, Plan, Tile, choose
from kernels_ref.sm80.tune import FAMILIES, merge, preferred

PLAN = Plan(8, "w4a16", 0, Tile("few", 16, 1, 3, 4), Tile("few", 32, 1, 3, 2))
PLANS = list({plan: 0 for table in DEFAULT.values() for plans in table.values() for plan in plans})


@pytest.fixture
def table_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "tiles.json"
    monkeypatch.setenv(tiles.VARIABLE, str(path))
    tiles._table.cache_clear()
    yield path
    tiles._table.cache_clear()


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


def test_file_of_the_environment_replaces_the_table(table_file: Path) -> None:
    more, coarse = replace(PLAN, tokens=0, columns=8), replace(PLAN, tokens=0, arithmetic="w4a8")
    table = {1024: {"auto": (PLAN, more), "w4a16": (PLAN, more), "w4a8": (coarse,)}}
    tiles.write(table_file, table, "some card")
    assert tiles.read(table_file) == table
    assert choose(8, 2048) == PLAN
    assert choose(9, 2048) == more
    assert choose(9, 2048, "w4a8") == coarse


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"plans": {"512": {"auto": [{"tokens": 1}]}}}', '{"plans": {"x": {}}}']
)
def test_another_file_is_refused_by_name(table_file: Path, text: str) -> None:
    table_file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"tiles\.json: expected a tile table"):
        choose(1, 512)


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


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tokens", "4", "0"], "--tokens: expected 1 or more, found 0"),
        (["--intermediate", "512", "200"], "--intermediate: expected a multiple of 128, found 200"),
        (["--topk", "9", "--experts", "8"], "--topk: expected 1 to --experts 8, found 9"),
        (["--processes", "0"], "--processes: expected 1 or more, found 0"),
    ],
)
def test_tuning_refuses_sizes_before_it_looks_for_a_card(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tune.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        tune.main([str(tmp_path / "tiles.json"), *arguments])
    assert sentence in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"expected a CUDA device .* found none"):
        tune.main([str(tmp_path / "tiles.json")])
    with pytest.raises(SystemExit, match="2"):
        tune.main([str(tmp_path / "missing" / "tiles.json")])
