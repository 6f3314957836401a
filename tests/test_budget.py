"""The memory budget: measured servers, weights and pools worked out by hand, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dsv4convert.checkpoint import open_checkpoint
from dsv4convert.cli.memory import lines
from dsv4convert.geometry import Draft, Geometry, official_geometry
from dsv4convert.memory import (
    CARD_BYTES,
    RUNTIME_BYTES,
    Demand,
    GpuMemory,
    Positions,
    budgets,
    bytes_per_token,
    gpu_memory,
    pool_bytes,
    read_positions,
    request_state_bytes,
    table_bytes,
    weights_per_gpu,
)
from dsv4convert.names import Layout, Unit, expected_units
from dsv4convert.releases import RELEASES, config
from dsv4convert.survey import survey
from tests.conftest import Ran

GIB = 2**30
FLASH, VISION = "deepseek-v4-flash-0731", "deepseek-v4-flash-vision-exp"
POSITIONS = Positions(limit=1 << 20, window=128, rope_dim=64, yarn_rows=1 << 20)
Sample = Callable[[str], Path]
Cli = Callable[..., Ran]


@cache
def units(key: str) -> tuple[Unit, ...]:
    return tuple(expected_units(official_geometry(key)))


def official(key: str, demand: Demand | None = None) -> GpuMemory:
    positions = read_positions(config(key))
    assert positions == POSITIONS
    return gpu_memory(official_geometry(key), positions, units(key), 4, demand or Demand())


# ---- measured servers, all on four cards of 80 GB; docs/memory.md says where the rest comes from


def test_weights_of_vision_exp_are_those_measured() -> None:
    weights = official(VISION).weights
    assert weights.target / GIB == pytest.approx(38.49, rel=0.005)
    assert weights.draft / GIB == pytest.approx(2.82, rel=0.03)


def _tokens_under_the_public_patch(memory: GpuMemory) -> float:
    """Return the capacity as the public A100 patch counts it.

    It replaces SGLang's bytes per token by an older form: the ratio-128 state counted per window of 128
    tokens (256 rows of 1,024 F32) besides the part per request, and the index cache counted as BF16.
    """
    window = 1024 * 43 + 16 / 128 * 10240 * 21 + 256 / 128 * 4096 * 20
    per_token = (0.1 * window + 1024 * 21 / 4 + 256 * 21 / 4 + 1024 * 20 / 128) * 44 / 43
    held = memory.weights.target + memory.weights.draft + memory.tables
    state = request_state_bytes(official_geometry(FLASH), 48, draft=True)
    return ((CARD_BYTES - RUNTIME_BYTES) * 0.70 - held - state) / per_token


def test_capacity_of_0731_is_the_one_measured_under_the_accounting_of_that_server() -> None:
    assert _tokens_under_the_public_patch(official(FLASH)) == pytest.approx(412_416, rel=0.015)


def test_memory_left_by_0731_is_the_one_measured() -> None:
    memory = official(FLASH)
    pools = pool_bytes(official_geometry(FLASH), POSITIONS, 412_416, 1 << 20, 48, draft=True)
    held = memory.weights.target + memory.weights.draft + memory.tables + sum(pools.values())
    graphs = 1.81 * GIB  # target and draft together, measured on another machine with the same stages
    assert (CARD_BYTES - RUNTIME_BYTES - held - graphs) / GIB == pytest.approx(27.43, rel=0.02)


def test_capacity_and_pools_of_vision_exp_are_near_those_measured() -> None:
    """The source does not say which fraction and concurrency; 0.70 and SGLang's default are assumed."""
    assert official(VISION, Demand(context=524_288)).tokens == pytest.approx(871_680, rel=0.015)
    pools = pool_bytes(official_geometry(VISION), POSITIONS, 871_680, 524_288, 48, draft=True)
    assert (sum(pools.values()) - pools["page_lists"]) / GIB == pytest.approx(11.83, rel=0.02)


def test_runtime_share_is_what_the_measured_parts_leave_unexplained() -> None:
    in_use, explained = 56.5, 38.49 + 2.82 + 11.83 + 1.81
    assert (in_use - explained) * GIB == pytest.approx(RUNTIME_BYTES)


# ---- by hand

SMALL = Geometry(
    family="v4",
    hidden=256,
    vocab=100,
    layers=3,
    heads=4,
    head_dim=64,
    q_lora=32,
    o_lora=16,
    o_groups=2,
    moe_inter=256,
    shared=1,
    experts=2,
    top_k=1,
    hash_layers=1,
    hc_mult=4,
    ratios=(0, 4, 128),
    kv_sources=(1, 2),
    index_sources=(1,),
    index_heads=2,
    index_dim=16,
    block=(128, 128),
    draft=Draft(stages=2, targets=(1, 2), markov_rank=8, block_size=5, noise_token=0, experts=2),
    vision=None,
    engram=None,
)
SMALL_POSITIONS = Positions(limit=1000, window=16, rope_dim=8, yarn_rows=500)


@pytest.mark.parametrize(
    ("base", "size"),
    [
        ("embed.weight", 64 * 256 * 2),  # 100 rows are padded to 128
        ("head.weight", 64 * 256 * 2),
        ("layers.1.attn.wq_a", 32 * 256 * 2),
        ("layers.1.attn.wq_b", 128 * 32 * 2),
        ("layers.1.attn.wkv", 64 * 256 * 2),
        ("layers.1.attn.wo_a", 16 * 128 * 2),
        ("layers.1.attn.wo_b", 256 * 16 * 2),
        ("layers.1.attn.attn_sink", 4 * 4),
        ("layers.1.attn.indexer.wq_b", 32 * 32 * 2),
        ("layers.1.attn.compressor.wkv.weight", 128 * 256 * 2),
        ("layers.1.attn.compressor.norm.weight", 64 * 4),
        ("layers.0.ffn.gate.tid2eid", 100 * 4),
        ("layers.0.ffn.gate.weight", 2 * 256 * 2),
        ("layers.0.ffn.shared_experts.w1", 128 * 256 * 2),
        ("layers.0.ffn.shared_experts.w2", 256 * 128 * 2),
        # Half of the codes and shifts; row scales of w1 split with its rows, those of w2 are on every GPU.
        ("layers.0.ffn.experts.0.w1", 128 * 128 + 128 * 2 + 128 * 4),
        ("layers.0.ffn.experts.0.w2", 256 * 64 + 256 * 1 + 256 * 4),
        ("mtp.0.main_proj", 256 * 512 * 2),
        ("mtp.1.markov_head.markov_w1.weight", 100 * 8 * 2),
    ],
)
def test_bytes_of_one_weight_on_one_of_two_gpus(base: str, size: int) -> None:
    (unit,) = (u for u in expected_units(SMALL) if u.base == base)
    weights = weights_per_gpu([unit], Layout.INT8, 2)
    assert (weights.target, weights.draft) == ((0, size) if base.startswith("mtp.") else (size, 0))


def test_experts_are_padded_to_whole_groups() -> None:
    w1, w2 = (u for u in expected_units(SMALL) if u.base in [f"layers.0.ffn.experts.0.w{n}" for n in "12"])
    assert weights_per_gpu([w1], Layout.INT8, 4) == weights_per_gpu([w1], Layout.INT8, 2)
    assert weights_per_gpu([w2], Layout.INT8, 4) == weights_per_gpu([w2], Layout.INT8, 2)


def test_weights_on_one_gpu_are_those_of_the_checkpoint() -> None:
    """Without a split only padding of the vocabulary, I32 router tables and F32 norms differ."""
    units = list(expected_units(SMALL))
    weights = weights_per_gpu(units, Layout.INT8, 1)
    norms = 2 * (64 + 16 + 64)  # layer 1 has two compressors, layer 2 one; F32 instead of BF16
    stored = sum(u.nbytes(Layout.INT8) for u in units)
    assert weights.target + weights.draft == stored + 2 * 28 * 256 * 2 - 100 * 4 + norms


def test_rope_tables() -> None:
    complex_table, yarn_table = 1000 * 4 * 8, 500 * 8 * 4
    assert table_bytes(SMALL, SMALL_POSITIONS, draft=False) == 2 * (complex_table + yarn_table)
    assert table_bytes(SMALL, SMALL_POSITIONS, draft=True) == 3 * complex_table + 2 * yarn_table
    pure = replace(SMALL, ratios=(4, 4, 4), draft=Draft(1, (), 0, 0, 0, 2))
    assert table_bytes(pure, SMALL_POSITIONS, draft=True) == complex_table + yarn_table


def test_bytes_per_token() -> None:
    # Keys of 128 bytes on 3 layers, state rows of 1,280 bytes: 8 (16 with a draft) per window of 16 tokens.
    assert bytes_per_token(SMALL, SMALL_POSITIONS, draft=False) == pytest.approx(0.1 * (384 + 640) + 38)
    with_draft = (0.1 * (384 + 1280) + 38) * 4 / 3
    assert bytes_per_token(SMALL, SMALL_POSITIONS, draft=True) == pytest.approx(with_draft)


def test_bytes_per_token_of_flash_are_those_of_the_contract() -> None:
    """SGLang's own 7,705.4 bytes with FP8 keys of 584 bytes, plus 440 bytes more for every BF16 key."""
    more = 440 * (0.1 * 43 + 21 / 4 + 20 / 128)
    per_token = bytes_per_token(official_geometry(FLASH), POSITIONS, draft=False)
    assert per_token == pytest.approx(7705.45 + more, abs=0.1)


def test_pools() -> None:
    assert pool_bytes(SMALL, SMALL_POSITIONS, 2560, 100, 2, draft=False) == {
        "window": 512 * 128 * 3,  # 256 tokens and one page more
        "c4": 704 * 128,
        "c128": 22 * 128,
        "index": 704 * 20,
        "c4_state": 140 * 1280,  # 16 windows x 8 + 9 rows, padded to 4
        "c128_state": 640 * 512,  # (2 + 2) x 128 + 1 rows, padded to 128
        "draft_window": 0,
        "page_lists": 3 * 100 * 4 + (2560 + 257) * 8,
    }
    with_draft = pool_bytes(SMALL, SMALL_POSITIONS, 2560, 100, 2, draft=True)
    assert with_draft["draft_window"] == 512 * 128 * 2
    assert with_draft["c4_state"] == 276 * 1280
    assert with_draft["c128_state"] == 1152 * 512


def test_capacity_by_hand() -> None:
    held = 10**9 - RUNTIME_BYTES
    demand = Demand(concurrency=2, fraction=0.5, card_bytes=RUNTIME_BYTES + 10**9, draft=False)
    memory = gpu_memory(SMALL, SMALL_POSITIONS, [], 1, demand)
    tables = 2 * (32_000 + 16_000)
    assert memory.tokens == int((0.5 * 10**9 - tables - 640 * 512) / 140.4) // 256 * 256
    assert memory.left == held + RUNTIME_BYTES - tables - sum(memory.pools.values())
    assert (memory.context, memory.needed, memory.longest) == (1000, 2048, 1000)


def test_without_its_draft_a_model_has_room_for_more() -> None:
    served, plain = official(FLASH), official(FLASH, Demand(draft=False))
    assert (served.concurrency, plain.concurrency) == (48, 256)
    assert plain.weights.draft == plain.pools["draft_window"] == 0
    few = official(FLASH, Demand(draft=False, concurrency=48))
    assert few.tokens > served.tokens and plain.tokens < few.tokens


# ---- the command


def found(ran: Ran) -> list[str]:
    return [f["code"] for f in ran.json()["findings"] if f["severity"] == "error"]


@pytest.mark.parametrize(
    ("options", "codes"),
    [
        (["--context", "4096", "--concurrency", "2"], []),
        (["--context", "1048576", "--concurrency", "1"], []),
        (["--context", "1048577", "--concurrency", "1"], ["serve.context"]),
        (["--context", "1048577", "--tp", "2", "--experts", "mxfp4"], ["serve.context"]),
        (["--context", "1048576", "--concurrency", "1024"], ["serve.memory"]),
        (["--gpu-memory", str(1 << 30)], ["serve.memory"]),
        (["--concurrency", "8"], []),
    ],
)
def test_plan_says_what_does_not_fit(sample: Sample, cli: Cli, options: list[str], codes: list[str]) -> None:
    ran = cli("plan", sample("plain"), "--tp", "1", *options, "--json")
    assert found(ran) == codes
    assert ran.exit_code == (1 if codes else 0)


@pytest.mark.parametrize(
    "options",
    [
        ["--context", "4096"],
        ["--concurrency", "2"],
        ["--tp", "1", "--concurrency", "0"],
        ["--tp", "1", "--context", "0"],
        ["--tp", "1", "--mem-fraction-static", "1"],
        ["--tp", "1", "--mem-fraction-static", "0"],
        ["--tp", "1", "--gpu-memory", "80"],
    ],
)
def test_impossible_options_are_usage_errors(sample: Sample, cli: Cli, options: list[str]) -> None:
    assert cli("plan", sample("plain"), *options).exit_code == 2


def test_a_size_that_cuts_a_group_has_no_budget(sample: Sample, cli: Cli) -> None:
    page = cli("plan", sample("plain"), "--tp", "1", "--tp", "2", "--json").json()
    assert list(page["gpu_memory"]) == ["1"]
    assert [f["code"] for f in page["findings"]] == ["tp.split"]


def test_json_and_page_of_a_budget(sample: Sample, cli: Cli) -> None:
    command = ("plan", sample("plain"), "--tp", "1", "--context", "4096", "--concurrency", "2")
    budget: dict[str, Any] = cli(*command, "--json").json()["gpu_memory"]["1"]
    assert budget["fits"] is True and budget["concurrency"] == 2 and budget["context"] == 4096
    assert budget["max_total_num_tokens"] % 256 == 0
    taken = budget["draft_bytes"] + budget["rope_table_bytes"] + RUNTIME_BYTES
    taken += sum(budget["weight_bytes"].values()) + sum(budget["pool_bytes"].values())
    assert budget["left_bytes"] == CARD_BYTES - taken
    out = cli(*command).out
    assert "2 x 4,096 tokens fits" in out and "of DSpark weights" in out
    assert "requests" not in cli("plan", sample("plain")).out


def test_example_of_the_memory_page_is_what_plan_prints() -> None:
    page = (Path(__file__).parent.parent / "docs" / "memory.md").read_text(encoding="utf-8")
    shown = "".join(f"{line[2:]}\n" for line in lines(official(FLASH), "DSpark"))
    assert f"```text\n{shown}```" in page


def test_a_model_that_nothing_serves_has_no_kv_budget(sample: Sample, cli: Cli) -> None:
    ran = cli("plan", sample("v41"), "--experts", "mxfp4", "--tp", "1", "--context", "99", "--json")
    assert ran.json()["gpu_memory"] == {} and "no KV budget" in ran.json()["serving"]
    seen = survey(open_checkpoint(sample("plain")))
    assert len(budgets(seen, [1], Demand())) == 1
    for key, release in RELEASES.items():
        named = replace(seen, release=release)
        assert len(budgets(named, [1], Demand())) == (0 if "pro" in key or "4.1" in key else 1)


@pytest.mark.parametrize("key", ["max_position_embeddings", "sliding_window", "qk_rope_head_dim", "factor"])
@pytest.mark.parametrize("value", [None, True, 0, "128", 1.5])
def test_unusable_numbers_about_positions_give_no_budget(key: str, value: Any) -> None:
    numbers = config(FLASH)
    (numbers["rope_scaling"] if key == "factor" else numbers)[key] = value
    assert read_positions(numbers) is None
    assert read_positions(numbers | {"rope_scaling": None}) is None
