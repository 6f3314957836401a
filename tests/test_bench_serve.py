"""`bench-serve` with a stand-in for SGLang's benchmark client, which writes what is chosen here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4convert.smoke import bench
from dsv4convert.smoke.bench import Load, Run, Shape, order, summarize
from tests.conftest import Ran
from tests.fakechat import KEY, FakeChat
from tests.test_schemas import require

#: Options and types are those of `sglang/benchmark/serving.py` of SGLang 0.5.16.
_CLIENT = """
import argparse, json, os, pathlib, sys
HERE = pathlib.Path(__file__).parent
TYPES = {"base-url": str, "backend": str, "model": str, "tokenizer": str, "dataset-name": str,
    "random-input-len": int, "random-output-len": int, "random-range-ratio": float, "num-prompts": int,
    "warmup-requests": int, "seed": int, "output-file": str, "max-concurrency": int, "request-rate": float}
FLAGS = ("tokenize-prompt", "flush-cache", "output-details", "cache-report", "disable-tqdm")

def cli_main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, kind in TYPES.items():
        parser.add_argument("--" + name, type=kind)
    for name in FLAGS:
        parser.add_argument("--" + name, action="store_true")
    args = parser.parse_args()
    key = os.environ.get("OPENAI_API_KEY", "")
    began = pathlib.Path("/proc/self/environ").read_bytes() + pathlib.Path("/proc/self/cmdline").read_bytes()
    seen = {"args": vars(args), "key": key, "key_shows": bool(key) and key.encode() in began}
    with open(HERE / "seen.jsonl", "a") as file:
        file.write(json.dumps(seen) + "\\n")
    plan = json.loads((HERE / "plan.json").read_text())
    if plan.get("crashes"):
        print("cannot reach the server with", key)
        raise RuntimeError(plan["crashes"])
    if plan.get("sleeps"):
        import time
        time.sleep(plan["sleeps"])
    n = args.num_prompts
    record = {"output_throughput": 100.0 * args.seed, "input_throughput": 7.0, "request_throughput": 1.0,
        "concurrency": 1.0, "ttfts": [0.001 * (i + 1) for i in range(n)], "itls": [[0.01, 0.03]] * n,
        "errors": [""] * n, "cache_report": {"total_cached_tokens": plan.get("cached", 0)}}
    if plan.get("fails"):
        record["errors"][0] = "Internal Server Error"
    if not plan.get("writes_nothing"):
        pathlib.Path(args.output_file).write_text(json.dumps(record) + "\\n")
"""


class Client:
    """The stand-in for SGLang: what it does, and what it was given."""

    def __init__(self, root: Path) -> None:
        self.root = root / "sglang" / "benchmark"
        self.root.mkdir(parents=True)
        for folder in (self.root.parent, self.root):
            (folder / "__init__.py").touch()
        (self.root / "serving.py").write_text(_CLIENT)
        self.plan()

    def plan(self, **plan: Any) -> None:
        """Say what it does."""
        (self.root / "plan.json").write_text(json.dumps(plan))

    def seen(self) -> list[dict[str, Any]]:
        """Return what every run was given."""
        return [json.loads(line) for line in (self.root / "seen.jsonl").read_text().splitlines()]


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    made = Client(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    return made


@pytest.fixture
def server() -> Iterator[FakeChat]:
    with FakeChat() as running:
        yield running
        running.shutdown()


@pytest.fixture
def command(server: FakeChat, tmp_path: Path, cli: Callable[..., Ran]) -> Callable[..., Ran]:
    """Return a function that runs the command, short, with more options."""
    tokenizer, key = tmp_path / "model", tmp_path / "key"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    key.touch(mode=0o600)
    key.write_text(KEY)
    given = ("bench-serve", server.url, "--tokenizer", tokenizer, "--api-key-file", key)
    return lambda *more: cli(*given, "--concurrency", 2, "--rate", 4, "--requests", 3, *more)


def test_runs_are_interleaved_and_measured(client: Client, command: Callable[..., Ran]) -> None:
    ran = command("--rounds", 3, "--json", "-q")
    assert ran.exit_code == 0, ran.err
    page = ran.json()
    require("bench-serve", page)
    seen = client.seen()
    loads = [(run["args"]["max_concurrency"], run["args"]["request_rate"]) for run in seen]
    assert loads == [(2, None), (None, 4.0), (None, 4.0), (2, None), (2, None), (None, 4.0)]
    assert {run["key"] for run in seen} == {KEY} and not any(run["key_shows"] for run in seen)
    flags = ("tokenize_prompt", "flush_cache", "output_details", "cache_report")
    assert all(run["args"][flag] for run in seen for flag in flags)
    assert {(run["args"]["warmup_requests"], run["args"]["dataset_name"]) for run in seen} == {
        (2, "random-ids")
    }
    at_once = page["loads"][0]
    # Throughput is 100 times the round, from 1; nine requests of 1, 2 and 3 ms, and gaps of 10 and 30 ms.
    assert at_once["output_tokens_per_second"] == {"median": 200.0, "min": 100.0, "max": 300.0}
    assert (at_once["requests"], at_once["rounds"], at_once["failed"]) == (9, 3, 0)
    assert at_once["first_token_ms"]["p50"] == pytest.approx(2.0)
    assert at_once["first_token_ms"]["p90"] is None and at_once["first_token_ms"]["p99"] is None
    assert at_once["per_output_token_ms"]["p50"] == pytest.approx(20.0)
    assert at_once["request_ms"]["p50"] == pytest.approx(42.0)


def test_table_picture_and_what_is_not_covered(
    client: Client, command: Callable[..., Ran], tmp_path: Path
) -> None:
    picture = tmp_path / "bench.svg"
    ran = command("--rounds", 1, "--plot", picture)
    assert ran.exit_code == 0, ran.err
    assert "100.0 (100.0 to 100.0)" in ran.out and ran.out.endswith("measured: 2 runs\n")
    assert ran.out.count("  NOT covered  ") == len(bench.NOT_COVERED)
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("plan", "status", "code"),
    [
        ({"crashes": "no route"}, 4, "bench.failed"),
        ({"writes_nothing": True}, 4, "bench.failed"),
        ({"fails": True}, 1, "bench.requests"),
        ({"cached": 256}, 0, "bench.cached"),
    ],
)
def test_run_that_is_worth_nothing(
    plan: dict[str, Any], status: int, code: str, client: Client, command: Callable[..., Ran]
) -> None:
    client.plan(**plan)
    ran = command("--rounds", 1, "--json", "-q")
    assert ran.exit_code == status
    assert {f["code"] for f in ran.json()["findings"]} == {code}
    assert KEY not in ran.out + ran.err
    if status == 0:
        assert command("--rounds", 1, "--json", "-q", "--strict").exit_code == 1


def test_run_that_does_not_end(client: Client, command: Callable[..., Ran]) -> None:
    client.plan(sleeps=60)
    ran = command("--rounds", 1, "--json", "-q", "--timeout", 2)
    assert ran.exit_code == 4 and "did not end within 2 s" in ran.json()["findings"][0]["problem"]


def test_missing_client_is_a_sentence(
    command: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "site" / "sglang").mkdir(parents=True)
    (tmp_path / "site" / "sglang" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    ran = command("--json")
    assert ran.exit_code == 4
    assert "sglang.benchmark.serving" in ran.json()["findings"][0]["problem"]


@pytest.mark.parametrize("fault", ["code", "none"])
def test_tokenizer_must_be_data(
    fault: str, client: Client, command: Callable[..., Ran], tmp_path: Path
) -> None:
    if fault == "code":
        (tmp_path / "model" / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": "x.Y"}}')
    else:
        (tmp_path / "model" / "tokenizer.json").unlink()
    ran = command("--json")
    assert ran.exit_code == 3 and ran.json()["findings"][0]["code"] == "bench.tokenizer"


def test_order_goes_back_and_forth() -> None:
    a, b, c = (Load("concurrency", float(n)) for n in (1, 4, 8))
    assert [load for _, load in order((a, b, c), 3)] == [a, b, c, c, b, a, a, b, c]


def test_percentiles_are_pooled_and_not_averaged() -> None:
    load = Load("rate", 1.0)
    rest = {"output_throughput": 1.0, "input_throughput": 1.0, "request_throughput": 1.0, "concurrency": 1.0}
    # Ninety requests of 1 ms in one round, ten of 11 ms in the other: the average of both p50 would be 6.
    fast = {**rest, "ttfts": [0.001] * 90, "itls": [[0.01]] * 90, "errors": [""] * 90}
    slow = {**rest, "ttfts": [0.011] * 10, "itls": [[0.01]] * 10, "errors": [""] * 10}
    [row] = summarize([Run(load, 0, fast), Run(load, 1, slow)])
    found = row["first_token_ms"]
    assert (found["p50"], found["p90"], found["p99"]) == pytest.approx((1.0, 2.0, 11.0))


def test_failed_requests_are_left_out_of_percentiles() -> None:
    record = {"ttfts": [0.001, 0.0], "itls": [[0.01], []], "errors": ["", "x"], "output_throughput": 1.0}
    [row] = summarize([Run(Load("rate", 1.0), 0, record)])
    assert (row["requests"], row["failed"]) == (1, 1) and row["first_token_ms"]["p50"] == pytest.approx(1.0)


def test_rate_and_concurrency_are_never_given_together(tmp_path: Path) -> None:
    shape = Shape("http://h:1", tmp_path, 8, 8, 4, 1, (), 1, 1.0)
    for load, option, other in (
        (Load("rate", 0.5), "--request-rate", "--max-concurrency"),
        (Load("concurrency", 8.0), "--max-concurrency", "--request-rate"),
    ):
        words = bench.arguments(shape, load, 0, tmp_path / "x")
        assert words[words.index(option) + 1] == f"{load.value:g}" and other not in words
        assert words[words.index("--tokenizer") + 1] == os.fspath(tmp_path)
