"""The file of tuned tables: what is read back, which plan is taken from it, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels_ref.sm80 import table_file, tiles, tune_attention
from kernels_ref.sm80.tiles import (
    ATTENTION,
    DEFAULT,
    SCORES,
    AttentionPlan,
    Plan,
    ScoresPlan,
    Tables,
    Tile,
    Walk,
    choose,
    choose_attention,
    choose_scores,
)
from kernels_ref.sm80.tune_experts import FAMILIES

FEW = Plan(8, "w4a16", 0, Tile("few", 16, 1, 3, 4), Tile("few", 32, 1, 3, 2))
MORE = replace(FEW, tokens=0, columns=8)
COARSE = Plan(0, "w4a8", 64, Tile("many", 256, 8, 4, 1), Tile("many", 64, 2, 2, 4))
EXPERTS = {1024: {"auto": (FEW, COARSE), "w4a16": (FEW, MORE), "w4a8": (COARSE,)}}
FIRST = AttentionPlan(8, Walk(1, 4, 1), Walk(2, 3, 2), 3)
REST = replace(FIRST, tokens=0, blocks=1)
ONE, ANY = ScoresPlan(1, 4, 2, 4, 16), ScoresPlan(0, 1, 4, 32, 6)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of all three tables, which the environment names."""
    path = tmp_path / "tiles.json"
    table_file.write(path, "some card", EXPERTS, (FIRST, REST), (ONE, ANY))
    monkeypatch.setenv(tiles.VARIABLE, str(path))
    tiles._tables.cache_clear()
    yield path
    tiles._tables.cache_clear()


def test_what_was_written_is_what_the_kernels_choose(file: Path) -> None:
    assert table_file.read(file) == Tables(EXPERTS, (FIRST, REST), (ONE, ANY))
    assert [choose(n, 2048) for n in (1, 8, 9)] == [FEW, FEW, COARSE]
    assert [choose(9, 512, name) for name in ("w4a16", "w4a8")] == [MORE, COARSE]
    assert [choose_attention(n) for n in (1, 8, 9, 10**6)] == [FIRST, FIRST, REST, REST]
    assert [choose_scores(n) for n in (1, 2, 10**6)] == [ONE, ANY, ANY]


def test_a_file_of_an_older_version_has_experts_only(file: Path) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    del content["attention"], content["indexer"]
    file.write_text(json.dumps(content), encoding="utf-8")
    assert table_file.read(file) == Tables(EXPERTS, ATTENTION, SCORES)
    table_file.write(file, "some card", EXPERTS)
    assert json.loads(file.read_text(encoding="utf-8")) == content


def test_shipped_tables_and_everything_that_is_tried_may_stand_in_a_file(file: Path) -> None:
    table_file.write(file, "", DEFAULT, ATTENTION, SCORES)
    assert table_file.read(file) == Tables(DEFAULT, ATTENTION, SCORES)
    for plans in (tune_attention.ATTENTION_PLANS, tune_attention.SCORES_PLANS):
        for plan in plans:
            kind = {"attention" if isinstance(plan, AttentionPlan) else "scores": (plan,)}
            table_file.write(file, "", EXPERTS, **kind)
            assert plan in (*table_file.read(file).attention, *table_file.read(file).scores)
    for family in FAMILIES:
        for tile in family.tiles:
            plan = Plan(0, family.arithmetic, family.columns, tile, tile)
            both = {name: (replace(plan, arithmetic=name),) for name in ("w4a16", "w4a8")}
            table_file.write(file, "", {512: {"auto": (plan,), **both}})
            assert table_file.read(file).experts[512]["auto"] == (plan,)


# Where in the file, what stands there instead, what the sentence says, and a neighbour that is taken.
FAULTS: list[tuple[str, Any, str, Any]] = [
    ("attention.0.split.slices", 3, "3 where attention[0].split.slices must be one of 1, 2, 4", 4),
    ("attention.0.split.tiles", 3, "3 where attention[0].split.tiles must be one of 1, 2", 2),
    ("attention.0.whole.stages", 0, "0 where attention[0].whole.stages must be an integer of 1 to 8", 1),
    ("attention.0.whole.stages", 9, "9 where attention[0].whole.stages must be an integer of 1 to 8", 8),
    ("attention.0.whole.stages", 2.0, "2.0 where attention[0].whole.stages must be an integer", 2),
    ("attention.0.blocks", 33, "33 where attention[0].blocks must be an integer of 1 to 32", 32),
    ("attention.0.blocks", True, "true where attention[0].blocks must be an integer", 1),
    ("attention.0.tokens", -1, "-1 where attention[0].tokens must be an integer of 0 to 2147483647", 1),
    ("attention.1.tokens", 9, "[8, 9] where attention: tokens must be ascending, the last of them 0", 0),
    ("attention.0.tokens", 0, "[0, 0] where attention: tokens must be ascending", 8),
    ("attention", [], "[] where attention must be a list of plans", [{"tokens": 0, "blocks": 2} | {
        name: {"tiles": 1, "stages": 3, "slices": 2} for name in ("split", "whole")}]),
    ("attention.0.split", None, "null where attention[0].split must be an object of tiles, stages, slices",
     {"tiles": 1, "stages": 2, "slices": 1}),
    ("indexer.0.warps", 3, "3 where indexer[0].warps must be one of 1, 2, 4, 8", 2),
    ("indexer.0.warps", "1", '"1" where indexer[0].warps must be one of', 1),
    ("indexer.0.warps", True, "true where indexer[0].warps must be one of", 1),
    ("indexer.1.pages", 0, "0 where indexer[1].pages must be an integer of 1 to 1048576", 1),
    ("indexer.1.pages", float("nan"), "NaN where indexer[1].pages must be an integer", 7),
    ("plans.1024.auto.0.w13.kernel", "some", '"some" where plans.1024.auto[0].w13.kernel must be', "few"),
    ("plans.1024.auto.0.w13.rows", 48, "48 where plans.1024.auto[0].w13.rows must be one of 16, 32", 64),
    ("plans.1024.auto.0.w2.warps", 4, "32 where plans.1024.auto[0].w2.rows must be 64 or more", 2),
    ("plans.1024.auto.0.w2.halves", 3, "3 where plans.1024.auto[0].w2.halves must be one of 1, 2, 4, 8", 8),
    ("plans.1024.auto.1.columns", 128, "128 where plans.1024.auto[1].columns must be 16 to the 64 rows", 16),
    ("plans.1024.auto.1.columns", 8, "8 where plans.1024.auto[1].columns must be 16 to the", 64),
    ("plans.1024.auto.0.columns", 12, "12 where plans.1024.auto[0].columns must be one of 0, 8, 16", 8),
    ("plans.1024.auto.0.arithmetic", "w8a8", '"w8a8" where plans.1024.auto[0].arithmetic must be', "w4a8"),
    ("plans.1024.w4a16.0.arithmetic", "w4a8", "where plans.1024.w4a16 must be plans of w4a16", "w4a16"),
    ("plans.1024.w4a8", [], "[] where plans.1024.w4a8 must be a list of plans", None),
    ("plans", {}, "{} where plans must be an object of intermediate sizes", None),
    ("plans", {"100": {}}, '"100" where plans must be an object of intermediate sizes, multiples of', None),
    ("plans", {"x": {}}, '"x" where plans must be an object of intermediate sizes, multiples of 128', None),
    ("card", 5, "5 where card must be a text", "another card"),
]  # fmt: skip


def _put(content: Any, where: str, value: Any) -> None:
    *path, last = (int(name) if len(name) == 1 else name for name in where.split("."))
    for name in path:
        content = content[name]
    content[last] = value


@pytest.mark.parametrize(
    ("where", "value", "sentence", "neighbour"), FAULTS, ids=[f"{case[0]}={case[1]}" for case in FAULTS]
)
def test_a_number_that_no_kernel_takes_is_refused_by_name(
    file: Path, where: str, value: Any, sentence: str, neighbour: Any
) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    if neighbour is not None:
        _put(content, where, neighbour)
        file.write_text(json.dumps(content), encoding="utf-8")
        table_file.read(file)
    _put(content, where, value)
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match="expected a tile table") as refused:
        choose_attention(1)
    assert sentence in str(refused.value)
    assert str(file) in str(refused.value)
    assert tiles.VARIABLE in str(refused.value)


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("scores", "the file must be an object of card, plans and perhaps attention, indexer"),
        ("attention.0.warps", "attention[0] must be an object of tokens, split, whole, blocks"),
        ("indexer.1.slices", "indexer[1] must be an object of tokens, warps, stages, pages, blocks"),
        ("plans.1024.w8a8", "plans.1024 must be an object of auto, w4a16, w4a8"),
        ("plans.1024.auto.0.w13.slices", "w13 must be an object of kernel, rows, warps, stages and perhaps"),
    ],
)
def test_an_unknown_key_is_refused(file: Path, where: str, sentence: str) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    _put(content, where, 1)
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match="expected a tile table") as refused:
        table_file.read(file)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("where", "missing"),
    [((), "card"), ((), "plans"), (("attention", 0), "blocks"), (("plans", "1024"), "auto")],
)
def test_a_missing_key_is_refused(file: Path, where: tuple[Any, ...], missing: str) -> None:
    content = part = json.loads(file.read_text(encoding="utf-8"))
    for name in where:
        part = part[name]
    del part[missing]
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"must be an object of .*\b{missing}\b"):
        table_file.read(file)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"plans": {"512": {"auto": [{"tokens": 1}]}}}', '{"card": "", "plans": 1}']
)
def test_another_file_or_none_is_refused_by_name(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    for take in (choose_attention, choose_scores, lambda tokens: choose(tokens, 512)):
        with pytest.raises(ValueError, match=r"tiles\.json: expected a tile table"):
            take(1)
    file.unlink()
    with pytest.raises(ValueError, match=r"tiles\.json: expected a tile table .* No such file"):
        choose_attention(1)


def test_reading_a_file_loads_neither_torch_nor_triton(file: Path) -> None:
    """`preflight` does it, which takes seconds and runs where neither may be there."""
    code = (
        "import sys; from pathlib import Path; from kernels_ref.sm80.table_file import parse; "
        "parse(Path(sys.argv[1])); print([name for name in ('torch', 'triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
