"""I3: ranks that share the index queries of a long prefill find what each would have found alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.dsv4 import indexer as indexer_module
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from dsv4convert.runtime import settings
from dsv4convert.runtime.patches import indexer
from tests.sglang.steps import Step

_ROOT = Path(__file__).resolve().parents[2]
#: Seconds; SGLang's import is most of it.
_PATIENCE = 300
_SIZES = (2, 3)

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def groups(shelf: Path) -> dict[str, Ranks]:
    paths = [_ROOT, _ROOT / "tests/sglang/stubs"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "tests.sglang.ranks", str(shelf / "0731-int8"), *map(str, _SIZES)]
    process = subprocess.Popen(
        command, env=env, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=_PATIENCE)
    finally:
        # Ranks that wait for one another would outlive the process that started them.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, err.decode()[-4000:]
    found: dict[str, Ranks] = json.loads(out.splitlines()[-1])
    return found


@pytest.fixture(params=_SIZES)
def group(request: pytest.FixtureRequest, groups: dict[str, Ranks]) -> Ranks:
    return groups[str(request.param)]


def test_all_ranks_find_the_places_of_one_that_works_alone(group: Ranks) -> None:
    for rank in group:
        for case, found in rank.items():
            alone = group[0][case]["alone"]["places"]
            assert found["split"]["places"] == found["alone"]["places"] == alone, case


def test_the_cases_select(group: Ranks) -> None:
    """A query with more than 512 keys gets 512 of them, one with fewer all."""
    rows = group[0]["ragged"]["alone"]["places"]
    keys = [n // 4 for n in (*range(1, 8), *range(2601, 2620), *range(2045, 2056))]
    assert [sum(place >= 0 for place in row) for row in rows] == [min(n, 512) for n in keys]
    assert len({tuple(sorted(row)) for row in rows[7:26]}) > 10


@pytest.mark.parametrize(
    ("case", "tokens"), [("one prompt, divisible", 48), ("ragged", 37), ("one query", 1), ("two queries", 2)]
)
def test_each_rank_scores_its_share(group: Ranks, case: str, tokens: int) -> None:
    for rank, found in enumerate(group):
        share = len(range(rank, tokens, len(group)))
        assert found[case]["alone"]["scored"] == [tokens]
        # A rank without a query calls no kernel: a grid of nothing is an error on a card.
        assert found[case]["split"]["scored"] == [share] * bool(share)
        # Keys of all tokens have to be stored on every rank.
        assert found[case]["alone"]["compressed"] == found[case]["split"]["compressed"] == [tokens]


@pytest.mark.parametrize("case", ["one prompt, divisible", "ragged"])
def test_a_rank_that_takes_other_queries_is_noticed(group: Ranks, case: str) -> None:
    for rank in group:
        alone, fault = rank[case]["alone"]["places"], rank[case]["fault"]["places"]
        wrong = {number % len(group) for number, row in enumerate(alone) if row != fault[number]}
        assert wrong == {1}


# ---- steps that are left alone, in one process


class _Group:
    """The attention group as the second of two ranks sees it; gathers what this rank has, twice."""

    world_size, rank_in_group = 2, 1

    def __init__(self) -> None:
        self.gathered = 0

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        self.gathered += 1
        output.copy_(torch.cat([input, input]))


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> _Group:
    monkeypatch.setenv("SGLANG_TOPK_TRANSFORM_512_TORCH", "1")
    found = _Group()
    monkeypatch.setattr(indexer, "attention_group", lambda: found)
    return found


@pytest.fixture
def step(shelf: Path) -> Step:
    root = str(shelf / "0731-int8")
    return Step(ModelConfig(model_path=root, quantization="fp8", dtype="bfloat16").hf_config, [(2500, 5)])


_STOCK = indexer_module.C4IndexerBackendMixin.forward_c4_indexer


def _split(monkeypatch: pytest.MonkeyPatch, least: int) -> Any:
    monkeypatch.setenv("DSV4_SM80_PARALLEL_INDEXER_FROM", f"{least}")
    return indexer.split_queries(_STOCK, indexer_module)


def test_the_limit(
    step: Step, peers: _Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """5 tokens with 10 pages of 64 keys are 3,200 scores."""
    with caplog.at_level("INFO", "dsv4convert.runtime"):
        step.run(_split(monkeypatch, 3201))
        assert (peers.gathered, step.scored) == (0, [5])
        assert not caplog.records
        at = _split(monkeypatch, 3200)
        step.run(at)
        assert (peers.gathered, step.scored) == (1, [2])
        # Prefill beside decode, as SGLang mixes them with `--enable-mixed-chunk`.
        step.run(at, ForwardMode.MIXED)
        assert (peers.gathered, step.scored) == (2, [2])
    # Said once, so that a log shows that it happened.
    assert [r.getMessage() for r in caplog.records] == [
        "index queries of a prefill are split: 5 tokens, 3200 scores"
    ]


def test_the_default_limit(step: Step, peers: _Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSV4_SM80_PARALLEL_INDEXER_FROM", raising=False)
    assert settings.least_scores() == 16_777_216
    step.run(indexer.split_queries(_STOCK, indexer_module))
    assert (peers.gathered, step.scored) == (0, [5])


def _alone(step: Step, peers: _Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "world_size", 1)


def _graph(step: Step, peers: _Group, monkeypatch: pytest.MonkeyPatch) -> None:
    step.backend.forward_metadata.indexer_metadata.use_prefill_cuda_graph = True


def _piecewise(step: Step, peers: _Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer_module, "is_in_tc_piecewise_cuda_graph", lambda: True)


def _breakable(step: Step, peers: _Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer_module, "is_in_breakable_cuda_graph", lambda: True)


def _captured(step: Step, peers: _Group, monkeypatch: pytest.MonkeyPatch) -> None:
    capturer = SimpleNamespace(capture=lambda layer, places: None)
    monkeypatch.setattr(indexer_module, "get_global_indexer_capturer", lambda: capturer)


@pytest.mark.parametrize("reason", [_alone, _graph, _piecewise, _breakable, _captured])
def test_other_steps_are_stock(
    reason: Callable[..., None], step: Step, peers: _Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = step.run(_STOCK)
    reason(step, peers, monkeypatch)
    assert torch.equal(step.run(_split(monkeypatch, 1)), alone)
    assert (peers.gathered, step.scored) == (0, [5])


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2])
def test_other_modes_are_stock(
    mode: ForwardMode, step: Step, peers: _Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert torch.equal(step.run(_split(monkeypatch, 1), mode), step.run(_STOCK))
    assert (peers.gathered, step.scored) == (0, [5])
