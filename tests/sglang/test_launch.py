"""What `serve` and `preflight` assume about SGLang: its command line and its rules for skip lists."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sglang
from sglang.srt.layers.quantization.utils import is_layer_skipped
from sglang.srt.server_args import ServerArgs

from dsv4convert.handoff import is_skipped
from dsv4convert.memory import Demand
from dsv4convert.runtime import contract, gate, launch
from dsv4convert.runtime.guards import Guards
from dsv4convert.runtime.patches import guard
from dsv4convert.runtime.settings import MOE_BACKENDS
from tests.sglang import world

DEMAND = Demand(context=131072, concurrency=8)


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    ServerArgs.add_cli_args(made)
    return made


@pytest.mark.parametrize("backend", MOE_BACKENDS)
@pytest.mark.parametrize("dspark", [False, True])
def test_arguments_are_those_of_sglang(parser: argparse.ArgumentParser, backend: str, dspark: bool) -> None:
    """Names and choices, among them the parsers of reasoning and tool calls."""
    asked = launch.Launch(Path("/m"), 4, dspark, "127.0.0.1", 30000, None, DEMAND, backend)
    read = parser.parse_args(launch.arguments(asked, name="n", context=131072, chunk=4096))
    assert (read.model_path, read.served_model_name, read.tp_size) == ("/m", "n", 4)
    assert (read.dtype, read.kv_cache_dtype, read.quantization) == ("bfloat16", "bfloat16", "fp8")
    assert (read.context_length, read.max_running_requests, read.chunked_prefill_size) == (131072, 8, 4096)
    assert (read.reasoning_parser, read.tool_call_parser) == ("deepseek-v4", "deepseekv4")
    assert read.moe_runner_backend == ("humming" if backend == "humming" else "marlin")
    assert read.speculative_algorithm == ("DSPARK" if dspark else None)
    assert read.skip_server_warmup is not dspark and read.api_key is None


def test_refused_arguments_are_those_of_sglang(parser: argparse.ArgumentParser) -> None:
    names = {name for action in parser._actions for name in action.option_strings}
    refused = {name for name in names if list(launch.contradictions([name]))}
    # The level of the log is free in part.
    assert refused == {*launch._OWNED, "--log-level"}
    # Each of them is refused by its own name, not because another one begins alike.
    assert all(next(launch.contradictions([name]))[0] == name for name in refused)


def test_no_other_spelling_of_a_refused_argument_is_free(parser: argparse.ArgumentParser) -> None:
    spellings = {name: action.dest for action in parser._actions for name in action.option_strings}
    owned = {spellings[name] for name in launch._OWNED}
    assert {name for name, dest in spellings.items() if dest in owned} == set(launch._OWNED)
    # argparse takes the beginnings of names too: what they stand for here, they stand for there.
    free = [name for name in spellings if name not in {*launch._OWNED, "--log-level"}]
    assert len(free) > 300 and not list(launch.contradictions(free))


def test_values_that_serve_reads_are_read_as_sglang_reads_them(parser: argparse.ArgumentParser) -> None:
    names = [name for action in parser._actions for name in action.option_strings if name.startswith("--")]
    for name in launch._READ:
        # A longer name of SGLang is another argument; a shorter one would be taken for this.
        assert [other for other in names if name.startswith(other)] == [name]
    words = [launch.CHUNK, "-1", launch.NCCL_PORT, " +1_024 ", launch.NAME, "-"]
    read = parser.parse_args(["--model-path", "/m", *words])
    assert (read.chunked_prefill_size, read.nccl_port, read.served_model_name) == (-1, 1024, "-")
    assert launch.number_of(words, launch.NCCL_PORT) == 1024 and list(launch.faulty_values(words)) == []
    for name in (launch.CHUNK, launch.NCCL_PORT, launch.NAME):
        for wrong in ([name], [name, "--trust-remote-code"]):
            with pytest.raises(SystemExit):
                parser.parse_args(["--model-path", "/m", *wrong])
            assert [found for found, _ in launch.faulty_values(wrong)] == [name]


def test_installed_files_are_the_pinned_ones() -> None:
    assert list(gate.changed_files(Path(sglang.__path__[0]))) == []


def test_server_process_parses_with_the_shim_in_force() -> None:
    command = [sys.executable, "-m", "dsv4convert.runtime.server", "--", "--help"]
    path = os.pathsep.join([os.fspath(contract.SITE), *sys.path])
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "--moe-runner-backend" in done.stdout


def test_lines_of_the_shim_are_those_serve_waits_for(shelf: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Said once per process, and this one may have said it before.
    guard._announce.cache_clear()
    watch = Guards(1, dspark=True, backend="ours")
    with caplog.at_level("INFO", "dsv4convert.runtime"):
        for draft in (False, True):
            assert watch.missing()
            world.load(shelf / "0731-int8", draft=draft)
            for record in caplog.records:
                watch.feed(f"[2026-11-29 22:00:00] {record.getMessage()}")
            caplog.clear()
    assert watch.missing() == () and watch.failed == ()


def test_a_switch_shows_in_the_lines_of_every_rank(
    loaded: Callable[..., world.Loaded], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded("0731-int8").model
    monkeypatch.setenv("DSV4_SM80_POISON", "1")
    monkeypatch.setattr(gate, "require_patches", lambda: ("A3", "D1"))
    with caplog.at_level("INFO", "dsv4convert.runtime"):
        guard._announce.__wrapped__()
        guard._report(model, 7)
    shim, warning, line = [r for r in caplog.records if r.name == "dsv4convert.runtime"]
    assert shim.getMessage().endswith(" patches=A3,D1")
    assert warning.levelname == "WARNING" and warning.getMessage().startswith("DSV4_SM80_POISON=1: NaN in ")
    assert line.getMessage().endswith(" layers=5 poison=1")
    watch = Guards(1, dspark=False, backend="ours")
    for record in (shim, warning, line):
        watch.feed(f"[2026-11-29 22:00:00 TP0] {record.getMessage()}")
    assert watch.missing() == () and watch.failed == ()


MODULES = (
    "model.layers.0.self_attn.wqkv_a",
    "model.layers.0.mlp.shared_experts.gate_up_proj",
    "model.layers.0.mlp.shared_experts.down_proj",
    "model.layers.10.mlp.experts",
    "stages.0.main_proj",
    "stages.1.mlp.experts",
    "model.e_proj",
)
WORDS = (
    "model",
    "layers",
    "0",
    "1",
    "10",
    "self_attn",
    "mlp",
    "experts",
    "gate_proj",
    "up_proj",
    "mtp",
    "w1",
    "",
)


def _random_entry(choose: random.Random) -> str:
    parts = choose.choice(MODULES).split(".")
    first = choose.randrange(len(parts))
    entry = parts[first : choose.randint(first + 1, len(parts))]
    entry += [choose.choice(WORDS)] if choose.random() < 0.3 else []
    part = choose.choice(("gate_up_proj", "gate_proj", "up_proj"))
    return ".".join(part if word == "gate_up_proj" else word for word in entry)


def test_skip_lists_are_read_as_sglang_reads_them() -> None:
    choose, both = random.Random(0), {True: 0, False: 0}
    for _ in range(20_000):
        entries = [_random_entry(choose) for _ in range(choose.randint(1, 3))]
        module = choose.choice(MODULES)
        # As `Fp8Config.from_config` prepares the list.
        bases = [entry.removeprefix("model.") for entry in entries]
        try:
            skipped = is_layer_skipped(module, [form for base in bases for form in (base, f"model.{base}")])
        except ValueError:  # Parts of a fused module that are not skipped alike.
            skipped = False
        assert is_skipped(module, entries) is skipped, (module, entries)
        both[skipped] += 1
    assert min(both.values()) > 1000
