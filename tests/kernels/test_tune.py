"""The tuning command without a card: what it refuses, what it makes of times, what its file says.

Kernels are interpreted and the clock is made up: a plan's time follows from its numbers, so that the fastest
is known beforehand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kernels_ref.sm80 import measure, table_file, tune, tune_attention, tune_experts
from kernels_ref.sm80.measure import CannotRunError, fastest
from kernels_ref.sm80.tiles import AttentionPlan, Plan, ScoresPlan, Tile, Walk
from tests.kernels.interpreted import call

WALKS = Walk(1, 2, 4), Walk(2, 2, 2)
PLANS = [AttentionPlan(0, walk, walk, blocks) for walk in WALKS for blocks in (1, 2)]
SCORES = [ScoresPlan(0, 1, 2, 4, 4), ScoresPlan(0, 2, 3, 16, 8), ScoresPlan(0, 4, 4, 32, 16)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tokens", "4", "0"], "--tokens: expected 1 or more, found 0"),
        (["--intermediate", "512", "200"], "--intermediate: expected a multiple of 128, found 200"),
        (["--hidden", "0"], "--hidden: expected a multiple of 128, found 0"),
        (["--topk", "9", "--experts", "8"], "--topk: expected 1 to --experts 8, found 9"),
        (["--processes", "0"], "--processes: expected 1 or more, found 0"),
        (["--tokens", "many"], "argument --tokens: invalid int value: 'many'"),
        (["--attention", "no"], "unrecognized arguments: --attention no"),
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
    with pytest.raises(SystemExit, match=r"^error: expected a CUDA device .* found none"):
        tune.main([str(tmp_path / "tiles.json")])
    with pytest.raises(SystemExit, match="2"):
        tune.main([str(tmp_path / "missing" / "tiles.json")])
    assert not list(tmp_path.iterdir())


def _made_up(times: dict[str, float | Exception]) -> Callable[..., float]:
    """Return a clock for calls that are their own names."""

    def clock(calls: Sequence[str], milliseconds: float) -> float:
        time = times[calls[0]]
        if isinstance(time, Exception):
            raise time
        return time

    return clock


def test_a_setting_that_the_card_cannot_run_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    times: dict[str, float | Exception] = {"a": 3.0, "b": RuntimeError("no room"), "c": 2.0}
    monkeypatch.setattr(measure, "time_calls", _made_up(times))
    assert fastest("some", {name: [name] for name in times}) == (2.0, "c")
    with pytest.raises(CannotRunError, match=r"some: this card can run none of 1 settings; .* no room"):
        fastest("some", {"b": ["b"]})
    times["c"] = ValueError("a fault of ours")
    with pytest.raises(ValueError, match="a fault of ours"):
        fastest("some", {name: [name] for name in times})


@pytest.mark.parametrize(("places", "split"), [(216, True), (1, False)])
def test_the_walk_that_was_not_measured_stays_as_shipped(places: int, split: bool) -> None:
    measured, shipped = Walk(1, 4, 1), tune_attention.ATTENTION[-1]
    found = tune_attention.only_measured(AttentionPlan(0, measured, measured, 3), 1, places)
    walks = (measured, shipped.whole) if split else (shipped.split, measured)
    assert found == AttentionPlan(1, *walks, 3)


def tuned(tokens: int) -> list[str]:
    """Tune attention and scores on interpreted kernels, with short lists; the third plan is the fastest."""
    from kernels_ref.sm80 import inputs

    timed: list[int] = []

    def clock(calls: Sequence[Callable[[], object]], milliseconds: float) -> float:
        calls[0]()
        timed.append(len(calls))
        return abs(len(timed) - 3.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "time_calls", clock)
        patch.setattr(inputs, "TOUCHED", 1)
        for module, name in product((inputs, tune_attention), ("WINDOW", "PICKED")):
            patch.setattr(module, name, 32)
        patch.setattr(tune_attention, "ATTENTION_PLANS", PLANS)
        patch.setattr(tune_attention, "SCORES_PLANS", SCORES)
        found = list(tune_attention.tune_attention(inputs.Pools.draw(64, 64, "cpu"), [tokens]))
        timed.clear()
        return [repr(pair) for pair in (*found, *tune_attention.tune_scores([tokens], 128, "cpu"))]


def test_the_fastest_plan_is_found_and_kept_for_its_number_of_tokens() -> None:
    shipped = tune_attention.ATTENTION[-1].split
    assert call(tuned, 1) == [
        repr((0.0, AttentionPlan(1, shipped, WALKS[1], 1))),
        repr((0.0, ScoresPlan(1, 4, 4, 32, 16))),
    ]


def test_one_command_measures_all_three_and_its_file_is_whole_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, steps = tmp_path / "tiles.json", []
    tile, walk = Tile("few", 16, 1, 3, 4), Walk(1, 2, 1)
    write = table_file.write

    def watched(*args: Any) -> None:
        write(*args)
        found = table_file.read(path)
        steps.append((sorted(found.experts), len(found.attention), len(found.scores)))

    def experts(layer: Any, tokens: Sequence[int]) -> Any:
        for count in tokens:
            times = {"w4a16": 20.0, "w4a8": 19.0 if count < 8 else 10.0}
            yield {name: (us, Plan(count, name, 8, tile, tile)) for name, us in times.items()}

    monkeypatch.setattr(tune, "require_card", lambda: None)
    monkeypatch.setattr(tune.torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(tune.torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(table_file, "write", watched)
    for module in (tune_experts, tune_attention):
        monkeypatch.setattr(module, "compile_all", lambda *_: None)
    monkeypatch.setattr(tune_experts, "tune", experts)
    monkeypatch.setattr(tune.Pools, "draw", staticmethod(lambda: None))
    plans = [(1.0, AttentionPlan(n, walk, walk, blocks)) for n, blocks in ((1, 2), (8, 2), (64, 1))]
    monkeypatch.setattr(tune_attention, "tune_attention", lambda _: plans)
    scores = [(1.0, ScoresPlan(n, 1, 3, 16, 8)) for n in (1, 8)]
    monkeypatch.setattr(tune_attention, "tune_scores", lambda: scores)

    tune.main([str(path), "--intermediate", "512", "256", "--tokens", "8", "4", "4"])
    shipped = len(tune_attention.ATTENTION), 1
    assert steps == [([512], *shipped), ([256, 512], *shipped), ([256, 512], 2, 1), ([256, 512], 2, 1)]
    found = table_file.read(path)
    auto = (Plan(4, "w4a16", 8, tile, tile), Plan(0, "w4a8", 8, tile, tile))
    assert found.experts[256]["auto"] == found.experts[512]["auto"] == auto
    assert found.attention == (AttentionPlan(8, walk, walk, 2), AttentionPlan(0, walk, walk, 1))
    assert found.scores == (ScoresPlan(0, 1, 3, 16, 8),)
    assert json.loads(path.read_text(encoding="utf-8"))["card"] == "a card"
    printed = capsys.readouterr().out
    assert "I=256 8 tokens* 10.0 us" in printed
    assert "attention, 64 tokens 1.0 us" in printed
