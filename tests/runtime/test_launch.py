"""How SGLang is started: its arguments and environment, and what nobody may change about them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import dsv4convert
from dsv4convert.memory import Demand
from dsv4convert.runtime import contract
from dsv4convert.runtime.keys import make_key, read_key
from dsv4convert.runtime.launch import (
    Launch,
    arguments,
    chunk_size,
    command,
    contradictions,
    faulty_values,
    number_of,
    value_of,
    variables,
)
from tests.conftest import Ran
from tests.test_schemas import require
from tests.toy import Toybox

LAUNCH = Launch(Path("/m"), 4, True, "127.0.0.1", 30000, None, Demand(context=131072, concurrency=8))
GIB = 2**30


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toybox:
    return Toybox(tmp_path_factory.mktemp("toys"))


# ---- the command that is shown

BASE = """\
env \\
  ENABLE_DSV4_SM80=1 \\
  DSV4_SM80_MOE=ours \\
  SGLANG_OPT_FP8_WO_A_GEMM=0 \\
  SGLANG_OPT_DEEPGEMM_HC_PRENORM=0 \\
  SGLANG_OPT_USE_TOPK_V2=0 \\
  SGLANG_FP8_PAGED_MQA_LOGITS_TORCH=1 \\
  SGLANG_OPT_DSV4_NONPAGED_INDEXER=0 \\
  SGLANG_OPT_FLASHMLA_SPARSE_PREFILL=0 \\
  SGLANG_OPT_USE_ONLINE_COMPRESS=0 \\
  SGLANG_DSV4_FP4_EXPERTS=1 \\
  PYTHONPATH=SITE:HOME:/elsewhere \\
  PYTHONUNBUFFERED=1 \\
  HF_HUB_OFFLINE=1 \\
  PYTHON -m dsv4convert.runtime.server -- \\
  --model-path WORK/int8 \\
  --host 127.0.0.1 \\
  --port 30000 \\
  --tp-size 1 \\
  --dtype bfloat16 \\
  --quantization fp8 \\
  --moe-runner-backend marlin \\
  --kv-cache-dtype bfloat16 \\
  --context-length 1048576 \\
  --mem-fraction-static 0.7 \\
  --max-running-requests 256 \\
  --served-model-name int8 \\
  --reasoning-parser deepseek-v4 \\
  --tool-call-parser deepseekv4 \\
  --chunked-prefill-size 4096 \\
  --skip-server-warmup
"""

DSPARK = """\
  PYTHON -m dsv4convert.runtime.server --api-key-file WORK/key -- \\
  --model-path WORK/mxfp4 \\
  --host 0.0.0.0 \\
  --port 8000 \\
  --tp-size 1 \\
  --dtype bfloat16 \\
  --quantization fp8 \\
  --moe-runner-backend humming \\
  --kv-cache-dtype bfloat16 \\
  --context-length 32768 \\
  --mem-fraction-static 0.6 \\
  --max-running-requests 4 \\
  --reasoning-parser deepseek-v4 \\
  --tool-call-parser deepseekv4 \\
  --chunked-prefill-size 8192 \\
  --speculative-algorithm DSPARK \\
  --served-model-name 'my model' \\
  --disable-cuda-graph
"""


@pytest.fixture
def shown(
    cli: Callable[..., Ran], toys: Toybox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Return ``shown(toy, *options)``: what `serve --dry-run` prints, places of this machine replaced."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("PATH", f"/usr/bin:{os.path.dirname(sys.executable)}")
    for name in [n for n in os.environ if n.startswith(("SGLANG", "ENABLE_", "DSV4", "HF_HUB"))]:
        monkeypatch.delenv(name)
    home = Path(dsv4convert.__file__).resolve().parent.parent
    places = {contract.SITE: "SITE", home: "HOME", tmp_path: "WORK", sys.executable: "PYTHON"}

    def run(toy: str, *options: object) -> str:
        toys.copy(toy, tmp_path)
        ran = cli("serve", toy, "--dry-run", "-q", *options)
        assert ran.exit_code == 0, ran.err
        text = ran.out
        # An interpreter in `.venv` lies below home: the longer places first.
        for place, name in sorted(places.items(), key=lambda row: len(os.fspath(row[0])), reverse=True):
            text = text.replace(os.fspath(place), name)
        return text

    return run


def test_dry_run_of_the_base_mode(shown: Callable[..., str]) -> None:
    assert shown("int8", "--tp", 1) == BASE


def test_dry_run_of_dspark_with_key_and_further_arguments(shown: Callable[..., str], tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    options = "--tp 1 --dspark --host 0.0.0.0 --port 8000 --api-key-file key --context 32768 --concurrency 4"
    more = "--mem-fraction-static 0.6 --moe-backend humming"
    extra = ("--", "--served-model-name", "my model", "--disable-cuda-graph")
    text = shown("mxfp4", *options.split(), *more.split(), *extra)
    assert "DSV4_SM80_MOE=humming" in text
    assert text[text.index("  PYTHON -m") :] == DSPARK
    assert read_key(tmp_path / "key") not in text


def test_shown_command_is_what_a_shell_runs(cli: Callable[..., Ran], toys: Toybox) -> None:
    """The shell gets the words of ``--json``: with another program in place of Python, it prints them."""
    options = ("serve", toys.original("int8"), "--dry-run", "-q", "--tp", 1)
    extra = ("--", "--served-model-name", "a 'quoted' $name")
    text, page = cli(*options, *extra).out, cli(*options, "--json", *extra).json()
    require("serve", page)
    text = text.replace(f"\n  {sys.executable} ", "\n  printf '%s\\n' ")
    printed = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == page["command"][1:]


# ---- arguments


def pairs(launch: Launch) -> dict[str, str]:
    words = arguments(launch, name="n", context=131072, chunk=4096)
    return {w: words[i + 1] for i, w in enumerate(words[:-1]) if w.startswith("--")}


def test_what_the_shim_relies_on_is_said_explicitly() -> None:
    said = pairs(LAUNCH)
    assert said["--dtype"] == said["--kv-cache-dtype"] == "bfloat16"
    assert said["--quantization"] == "fp8" and said["--moe-runner-backend"] == "marlin"
    assert said["--max-running-requests"] == "8" and said["--context-length"] == "131072"
    assert said["--speculative-algorithm"] == "DSPARK"


@pytest.mark.parametrize(
    ("backend", "runner"), [("ours", "marlin"), ("marlin", "marlin"), ("humming", "humming")]
)
def test_backend_decides_the_runner_and_the_variable(backend: str, runner: str) -> None:
    launch = replace(LAUNCH, backend=backend)
    assert pairs(launch)["--moe-runner-backend"] == runner
    assert variables(launch, {})["DSV4_SM80_MOE"] == backend


def test_warm_up_is_skipped_without_a_draft_only() -> None:
    for dspark in (True, False):
        words = arguments(replace(LAUNCH, dspark=dspark), name="n", context=1, chunk=256)
        assert ("--skip-server-warmup" in words) is not dspark


@pytest.mark.parametrize("name", ["--served-model-name", "--reasoning-parser", "--tool-call-parser"])
def test_a_default_of_ours_yields(name: str) -> None:
    for extra in ((name, "x"), (f"{name}=x",), (name[:-2], "x")):
        words = arguments(replace(LAUNCH, extra=extra), name="n", context=1, chunk=256)
        assert sum(w.startswith(name[:-2]) for w in words) == 1 and value_of(words, name) == "x"
    assert value_of(("--", name[:2] + "x", "y"), name) is None


def test_key_file_is_named_and_no_key_is_needed_without_one() -> None:
    named = command(replace(LAUNCH, key_file=Path("/k")), ["--x"])
    assert named[1:] == ["-m", "dsv4convert.runtime.server", "--api-key-file", "/k", "--", "--x"]
    assert command(LAUNCH, ["--x"])[1:] == ["-m", "dsv4convert.runtime.server", "--", "--x"]


@pytest.mark.parametrize(
    ("extra", "owner"),
    [
        (["--tp-size", "8"], "--tp-size"),
        (["--tp", "8"], "--tp-size"),
        (["--tp-size=8"], "--tp-size"),
        (["--api-key", "sekret"], "--api-key"),
        (["--api-k=sekret"], "--api-key"),
        (["--admin-api-key=sekret"], "--admin-api-key"),
        (["--quantization", "awq"], "--quantization"),
        (["--kv-cache-dtype=auto"], "--kv-cache-dtype"),
        (["--kv", "auto"], "--kv-cache-dtype"),
        (["--config", "f.yaml"], "--config"),
        (["--tokenizer-worker-num", "4"], "--tokenizer-worker-num"),
        (["--grpc-port", "1"], "--grpc-port"),
        (["--skip-server-warmup"], "--skip-server-warmup"),
        (["--model", "x"], "--model"),
        (["--ep", "2"], "--ep"),
        (["--delete-ckpt-after-loading"], "--delete-ckpt-after-loading"),
        (["--delete-ckpt"], "--delete-ckpt-after-loading"),
        (["--enable-nsa-prefill-context-parallel"], "--enable-nsa-prefill-context-parallel"),
        (["--decode-context-parallel-size", "2"], "--decode-context-parallel-size"),
        (["--grpc-http-sidecar-port=1"], "--grpc-http-sidecar-port"),
        (["--device", "cpu"], "--device"),
        (["--crash-dump-folder", "d"], "--crash-dump-folder"),
        (["--ssl-keyfile", "k.pem"], "--ssl-keyfile"),
        (["--ssl-certfile=c.pem"], "--ssl-certfile"),
        (["-h"], "-h"),
        (["--help"], "--help"),
        (["--log-level", "warning"], "--log-level"),
        (["--log-level=error"], "--log-level"),
        (["--log-level", "abc"], "--log-level"),
        (["--log-level"], "--log-level"),
    ],
)
def test_arguments_that_serve_sets_are_refused_without_their_value(
    cli: Callable[..., Ran], extra: list[str], owner: str
) -> None:
    assert [name for name, _ in contradictions(extra)] == [owner]
    ran = cli("serve", "anywhere", "--", *extra)
    assert ran.exit_code == 2 and f"{owner}: " in ran.err and "sekret" not in ran.err + ran.out


@pytest.mark.parametrize(
    "extra",
    [
        ["--disable-cuda-graph"],
        ["--model-loader-extra-config", "{}"],
        ["--quantization-param-path", "p"],
        ["--served-model-name", "-"],
        ["--dllm-algorithm-config", "f"],
        ["--enable-return-routed-experts"],
        ["--chunked-prefill-size", "2048"],
        ["--log-level", "debug"],
        ["--stream-interval", "--tp-like-value"],
    ],
)
def test_neighbours_of_refused_arguments_pass(extra: list[str]) -> None:
    assert list(contradictions(extra)) == []


def test_all_contradictions_are_told_together(cli: Callable[..., Ran]) -> None:
    ran = cli("serve", "anywhere", "--", "--dtype", "half", "--page-size", "64")
    assert ran.exit_code == 2 and "--dtype: " in ran.err and "--page-size: " in ran.err


SIZE = "--chunked-prefill-size: expected a multiple of 256, or -1 for prompts in one step, found"
PORT = "--nccl-port: expected a port, 1 to 65535, found"


@pytest.mark.parametrize(
    ("extra", "sentence", "neighbour"),
    [
        (["--chunked-prefill-size", "abc"], f"{SIZE} abc", ["--chunked-prefill-size", "256"]),
        (["--chunked-prefill-size", "1.5"], f"{SIZE} 1.5", ["--chunked-prefill-size", "+512"]),
        (["--chunked-prefill-size=0"], f"{SIZE} 0", ["--chunked-prefill-size=256"]),
        (["--chunked-prefill-size", "-2"], f"{SIZE} -2", ["--chunked-prefill-size", "-1"]),
        (["--chunked-prefill-size", "1000"], f"{SIZE} 1000", ["--chunked-prefill-size", "1024"]),
        (["--chunked-prefill-size"], f"{SIZE} nothing", ["--chunked-prefill-size=-1"]),
        (["--chunked-prefill-size="], f"{SIZE} nothing", ["--chunked-prefill-size=1_024"]),
        (["--chunked=abc", "--chunked=512"], f"{SIZE} abc", ["--chunked=256", "--chunked=512"]),
        (["--nccl-port", "abc"], f"{PORT} abc", ["--nccl-port", "1"]),
        (["--nccl-port", "0"], f"{PORT} 0", ["--nccl-port", "29500"]),
        (["--nccl-port=65536"], f"{PORT} 65536", ["--nccl-port=65535"]),
        (["--served-model-name"], "expected a name, found nothing", ["--served-model-name", "n"]),
        (["--served-model-name="], "expected a name, found nothing", ["--served-model-name=n"]),
    ],
)
def test_values_that_serve_reads_are_refused_with_what_they_have_to_be(
    cli: Callable[..., Ran], toys: Toybox, extra: list[str], sentence: str, neighbour: list[str]
) -> None:
    asked = ("serve", toys.original("int8"), "--tp", 1, "--dry-run", "--")
    ran = cli(*asked, *extra)
    assert ran.exit_code == 2 and sentence in ran.err
    assert list(contradictions(extra)) == []
    assert cli(*asked, *neighbour).exit_code == 0


def test_what_follows_in_the_place_of_a_value_is_not_shown(cli: Callable[..., Ran]) -> None:
    ran = cli("serve", "anywhere", "--", "--chunked-prefill-size", "--x=sekret", "--dtype", "half")
    assert ran.exit_code == 2 and f"{SIZE} nothing" in ran.err and "sekret" not in ran.err + ran.out
    assert "--dtype: " in ran.err


@pytest.mark.parametrize("name", ["--chunked-prefill-size", "--nccl-port"])
def test_a_number_is_read_as_argparse_reads_it(name: str) -> None:
    for words, number in (([], None), ([name, "512"], 512), ([f"{name[:-1]}=1", name, " +256 "], 256)):
        assert number_of(words, name) == number
    with pytest.raises(ValueError, match="abc"):
        number_of([name, "abc"], name)
    assert [found for found, _ in faulty_values([name, "abc"])] == [name]


def test_a_word_in_front_of_the_arguments_is_a_usage_error(cli: Callable[..., Ran]) -> None:
    ran = cli("serve", "anywhere", "somewhere")
    assert ran.exit_code == 2 and "somewhere" in ran.err


# ---- prefill steps: 4 bytes for every compressed key, a quarter of what is left


@pytest.mark.parametrize(
    ("context", "left", "size"),
    [
        # 8192 x 131072 / 4 x 4 bytes = 1 GiB of the 5.75 allowed.
        (131072, 23 * GIB, 8192),
        # At 512K a full step needs exactly 4 GiB, a quarter of 16.
        (524288, 16 * GIB, 8192),
        (524288, 16 * GIB - 1, 4096),
        (1048576, 23 * GIB, 4096),
        (1048576, 1 * GIB, 256),
        (1048576, 0, 256),
        (1048576, -1, 256),
    ],
)
def test_chunk_follows_context_and_memory(context: int, left: int, size: int) -> None:
    assert chunk_size(context, left) == size


# ---- environment


def test_environment_holds_the_contract_and_keeps_the_path() -> None:
    made = variables(LAUNCH, {"PYTHONPATH": os.pathsep.join(["/a", "", "/b"])})
    assert made.items() >= contract.environment("ours").items()
    path = made["PYTHONPATH"].split(os.pathsep)
    assert path[0] == os.fspath(contract.SITE) and path[-2:] == ["/a", "/b"] and "" not in path
    # A second `serve` in a process that the first one started adds nothing.
    assert variables(LAUNCH, made)["PYTHONPATH"] == made["PYTHONPATH"]


def test_parallel_indexer_is_a_variable_of_the_server() -> None:
    name = "DSV4_SM80_PARALLEL_INDEXER"
    assert name not in variables(LAUNCH, {})
    assert variables(replace(LAUNCH, parallel_indexer=True), {})[name] == "1"


def test_programs_beside_python_are_found_without_an_activated_environment() -> None:
    beside = os.path.dirname(sys.executable)
    assert variables(LAUNCH, {"PATH": "/usr/bin"})["PATH"] == f"{beside}:/usr/bin"
    assert "PATH" not in variables(LAUNCH, {"PATH": f"/usr/bin:{beside}"})


def test_a_choice_of_the_user_about_the_hub_stays() -> None:
    assert variables(LAUNCH, {})["HF_HUB_OFFLINE"] == "1"
    assert variables(LAUNCH, {"HF_HUB_OFFLINE": "0"})["HF_HUB_OFFLINE"] == "0"


@pytest.mark.parametrize(
    ("host", "exposed", "url"),
    [
        ("127.0.0.1", False, "http://127.0.0.1:30000"),
        ("127.9.9.9", False, "http://127.9.9.9:30000"),
        ("localhost", False, "http://localhost:30000"),
        ("::1", False, "http://[::1]:30000"),
        ("0.0.0.0", True, "http://127.0.0.1:30000"),
        ("::", True, "http://[::1]:30000"),
        ("10.0.0.5", True, "http://10.0.0.5:30000"),
        ("gpu-node-7", True, "http://gpu-node-7:30000"),
    ],
)
def test_addresses(host: str, exposed: bool, url: str) -> None:
    launch = replace(LAUNCH, host=host)
    assert (launch.is_exposed, launch.url) == (exposed, url)


@pytest.mark.parametrize(
    ("extra", "prewarm"),
    [(("--chunked-prefill-size", "-1"), "0"), (("--chunked-prefill-size=1024",), None), ((), None)],
)
def test_nothing_is_compiled_ahead_for_chunks_that_there_are_none_of(
    extra: tuple[str, ...], prewarm: str | None
) -> None:
    # SGLang 0.5.16 would ask for tensors of -1 rows: seen on a server.
    assert variables(replace(LAUNCH, extra=extra), {}).get("SGLANG_DSV4_MHC_PREWARM") == prewarm
