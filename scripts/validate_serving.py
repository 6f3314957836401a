"""Serve small checkpoints with the real SGLang on this machine's cards, and judge every server from outside.

    python3 scripts/validate_serving.py WORK OUT [--gpus N] [--run NAME ...] [--goldens DIR]

WORK was filled by `scripts/stage_serving.py unpack`; it may lack `server` and `client` where SGLang 0.5.16
and the clients are installed. A run is a layout and a way to serve it, as `int8-dspark-graph-whole`;
without --run all of `RUNS` for the cards there are. Each run is: preflight and start (`serve`), `smoke`,
the tokens of every golden file, a load of 256 requests, 8 at once, and an end by SIGTERM. Several servers
share a card, but never while one of them measures its memory. OUT gets the log of every step and
`results.json`; the exit status is 1 if a run failed. Compiled kernels stay in WORK/cache, for the next
time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parent.parent
CLI = (sys.executable, "-m", "dsv4convert")
CONTEXT, REQUESTS = 40960, 8
#: Servers on one card, and the share of it that weights and pools of each may take.
SHARING, FRACTION = 4, 0.12
#: Lengths of golden prompts: within a window; over 6 groups of 128; more keys than the indexer picks.
LENGTHS = (40, 760, 3000)
TOKENS = 24


@dataclass(frozen=True, slots=True)
class Run:
    """One server.

    Attributes:
        layout: `int8` or `mxfp4`.
        draft: Speculate with the DSpark draft.
        graph: Decode with CUDA graphs.
        chunk: Tokens of a prefill step; -1 for whole prompts.
        tp: Tensor-parallel size.
        variables: More environment variables, as NAME=VALUE.
    """

    layout: str
    draft: bool = False
    graph: bool = True
    chunk: int = -1
    tp: int = 1
    variables: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the name, such as ``int8-dspark-eager-1024``; one GPU and no variables are not named."""
        parts = [self.layout, "dspark" if self.draft else "base", "graph" if self.graph else "eager"]
        parts.append("whole" if self.chunk < 0 else str(self.chunk))
        parts += [f"tp{self.tp}"] if self.tp > 1 else []
        return "-".join([*parts, *(v.partition("=")[0].lower() for v in self.variables)])


_KINDS = tuple(product(("int8", "mxfp4"), (False, True), (True, False), (-1, 1024)))
RUNS = (
    *(Run(*kind) for kind in _KINDS),
    *(Run(*kind, tp=2) for kind in _KINDS),
    *(
        Run("int8", draft, tp=2, variables=variables)
        for draft in (False, True)
        for variables in (
            ("DSV4_SM80_POISON=1",),
            # Prompts of the golden files are below the default limit.
            ("DSV4_SM80_PARALLEL_INDEXER=1", "DSV4_SM80_PARALLEL_INDEXER_FROM=1"),
        )
    ),
)


@dataclass
class Machine:
    """Paths, environments and cards of this machine.

    Attributes:
        work: Packages, checkpoints, caches.
        out: Logs and results.
        gpus: Cards there are.
        native: Let Triton and TileLang compile for the card at hand instead of SM80.
        goldens: What `probe` says about the checkpoints.
    """

    work: Path
    out: Path
    gpus: int
    native: bool
    goldens: Path = Path()
    cards: list[threading.Semaphore] = field(init=False)
    starting: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.cards = [threading.Semaphore(SHARING) for _ in range(self.gpus)]

    def environment(self, part: str) -> dict[str, str]:
        """Return the environment of a `server` or a `client`."""
        cache = self.work / "cache"
        path = [HOME, self.work / part, *filter(None, [os.environ.get("PYTHONPATH")])]
        if part == "server" and not self.native:
            path.insert(0, HOME / "scripts" / "as_sm80")
        mine = {
            "PYTHONPATH": os.pathsep.join(map(os.fspath, path)),
            "HF_HUB_OFFLINE": "1",
            "TVM_FFI_CACHE_DIR": os.fspath(cache / "tvm-ffi"),
            "TILELANG_CACHE_DIR": os.fspath(cache / "tilelang"),
            "TRITON_CACHE_DIR": os.fspath(cache / "triton"),
        }
        if (self.work / "server" / "flashinfer").is_dir():
            mine["SGLANG_IS_FLASHINFER_AVAILABLE"] = "0"
        return os.environ | mine


def ask(machine: Machine, log: str, part: str, *words: object, seconds: float = 900) -> tuple[int, str]:
    """Run a command of dsv4convert; return its status and stdout, and keep both streams in OUT."""
    command = [*CLI, *map(str, words)]
    try:
        ran = subprocess.run(
            command,
            env=machine.environment(part),
            cwd=machine.work,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        status, out, err = ran.returncode, ran.stdout, ran.stderr
    except subprocess.TimeoutExpired as late:
        status, out, err = 124, _text(late.stdout), _text(late.stderr)
    shown = " ".join(["$ dsv4convert", *(f"{word}" for word in words)])
    (machine.out / f"{log}.log").write_text(f"{shown}\n{out}{err}exit status {status}\n", encoding="utf-8")
    return status, out


def _text(stream: str | bytes | None) -> str:
    return stream.decode(errors="replace") if isinstance(stream, bytes) else stream or ""


# ---- checkpoints


def prepare(machine: Machine, goldens: Path | None) -> None:
    """Make the checkpoints and what `probe` says about them, unless they are there."""
    if not (machine.work / "official").exists():
        _require(ask(machine, "synth", "client", "synth", "official", "--scale", "served"))
        _require(ask(machine, "original", "client", "original", "official"))
    if not (machine.work / "key").exists():
        _require(ask(machine, "keygen", "client", "keygen", "key"))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda layout: _convert(machine, layout), ("int8", "mxfp4")))
        if goldens is None:
            goldens = machine.work / "goldens"
            goldens.mkdir(exist_ok=True)
            jobs = [(layout, length) for length in (0, *LENGTHS) for layout in ("int8", "mxfp4")]
            list(pool.map(lambda job: _probe(machine, goldens, *job), jobs))
    machine.goldens = goldens


def _convert(machine: Machine, layout: str) -> None:
    if (machine.work / layout / "config.json").exists():
        return
    _require(ask(machine, f"convert-{layout}", "client", "convert", "official", layout, "--experts", layout))
    words = ("converted", layout, "--reference", "official", "--read-data")
    _require(ask(machine, f"converted-{layout}", "client", *words))


def _probe(machine: Machine, goldens: Path, layout: str, length: int) -> None:
    name = f"{layout}-{length or 'chat'}"
    if length:
        prompt = ["--ids", ",".join(map(str, ids(length)))]
    else:
        prompt = ["--prompt", "Name three rivers.", "--chat"]
    words = ("probe", layout, *prompt, "--tokens", TOKENS, "--top", 20, "--golden", goldens / f"{name}.json")
    _require(ask(machine, f"probe-{name}", "client", *words))


def ids(length: int) -> list[int]:
    """Return a prompt: a fixed walk over the ids that are no byte and no marker."""
    state, walk = 2026, []
    for _ in range(length):
        state = (1103515245 * state + 12345) % 2**31
        walk.append(262 + (state >> 8) % 700)
    return walk


def _require(asked: tuple[int, str]) -> None:
    if asked[0]:
        raise RuntimeError("a step before the first server failed: see its log")


# ---- servers


def validate(machine: Machine, run: Run, number: int) -> dict[str, Any]:
    """Serve and judge one run."""
    result: dict[str, Any] = {"name": run.name, "ok": False}
    began = time.monotonic()
    try:
        with _card(machine, run, number) as visible, _server(machine, run, number, visible, result) as url:
            result["smoke"] = _smoke(machine, run, url)
            result["goldens"] = dict(_goldens(machine, run, url))
            result["load"] = _load(machine, run, url)
        steps = (
            result["smoke"],
            *(g["status"] for g in result["goldens"].values()),
            result["load"]["status"],
        )
        result["ok"] = not any(steps) and result["end"] == 128 + signal.SIGTERM
    except Exception as error:
        result["error"] = repr(error)
        (machine.out / f"{run.name}-error.log").write_text(traceback.format_exc(), encoding="utf-8")
    result["seconds"] = round(time.monotonic() - began)
    print(json.dumps(result), flush=True)
    return result


@contextmanager
def _card(machine: Machine, run: Run, number: int) -> Iterator[str]:
    """Wait for room on as many cards as the run needs; yield what CUDA may see."""
    first = 0 if run.tp > 1 else number % machine.gpus
    mine = machine.cards[first : first + run.tp]
    for card in mine:
        card.acquire()
    try:
        yield ",".join(str(first + rank) for rank in range(run.tp))
    finally:
        for card in mine:
            card.release()


@contextmanager
def _server(machine: Machine, run: Run, number: int, visible: str, result: dict[str, Any]) -> Iterator[str]:
    port = 31000 + 20 * number
    words = ["serve", run.layout, "--tp", run.tp, "--port", port, "--api-key-file", "key", "--allow-arch", 90]
    words += [
        "--context",
        CONTEXT,
        "--concurrency",
        REQUESTS,
        "--mem-fraction-static",
        FRACTION,
        "--json",
        "--quiet",
    ]
    words += [
        "--log-file",
        machine.out / f"{run.name}-server.log",
        *(["--dspark"] if run.draft else []),
        "--",
    ]
    words += [
        "--grammar-backend",
        "none",
        "--sampling-backend",
        "pytorch",
        "--nccl-port",
        41000 + 20 * number,
    ]
    words += [
        "--chunked-prefill-size",
        run.chunk,
        "--enable-metrics",
        *([] if run.graph else ["--disable-cuda-graph"]),
    ]
    environment = machine.environment("server") | {"CUDA_VISIBLE_DEVICES": visible}
    environment |= dict(v.split("=", 1) for v in run.variables)
    # Two servers that measure the free memory of a card at once would take each other's weights for theirs.
    with machine.starting:
        began = time.monotonic()
        process = subprocess.Popen(
            [*CLI, *map(str, words)],
            env=environment,
            cwd=machine.work,
            stdout=subprocess.PIPE,
            stderr=(machine.out / f"{run.name}-serve.log").open("w"),
            text=True,
        )
        line = (process.stdout.readline() if process.stdout else "").strip()
        result["start_seconds"] = round(time.monotonic() - began, 1)
    try:
        if not line.endswith("}") or len(line) < 3:
            raise RuntimeError(f"serve ended with {process.wait()}: see {run.name}-serve.log")
        result["guards"] = json.loads(line)["guards"]
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        result["end"] = process.wait(timeout=120)
        left = subprocess.run(
            ["pgrep", "-fc", f"nccl-port {41000 + 20 * number}"], capture_output=True, text=True
        )
        result["left"] = int(left.stdout or 0)


def _smoke(machine: Machine, run: Run, url: str) -> int:
    golden = machine.goldens / f"{run.layout}-chat.json"
    words = (
        "--api-key-file",
        "key",
        "--suite",
        "full",
        "--random-weights",
        "--timeout",
        600,
        "--golden",
        golden,
    )
    return ask(machine, f"{run.name}-smoke", "client", "smoke", url, *words)[0]


def _goldens(machine: Machine, run: Run, url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for length in LENGTHS:
        golden = machine.goldens / f"{run.layout}-{length}.json"
        words = ("--api-key-file", "key", "--random-weights", "--golden", golden, "--json")
        status, out = ask(machine, f"{run.name}-golden-{length}", "client", "smoke", url, *words)
        checks = json.loads(out)["checks"] if out.startswith("{") else []
        facts = next((c["facts"] for c in checks if c["name"] == "tokens.ids"), {})
        yield str(length), {"status": status, **facts}


def _load(machine: Machine, run: Run, url: str) -> dict[str, Any]:
    words = ("--tokenizer", run.layout, "--api-key-file", "key", "--concurrency", REQUESTS, "--rate", 64)
    words += ("--requests", 256, "--rounds", 1, "--input-tokens", 256, "--output-tokens", 32, "--json")
    status, out = ask(machine, f"{run.name}-load", "server", "bench-serve", url, *words)
    rows = json.loads(out).get("loads", []) if out.startswith("{") else []
    return {"status": status, "requests": [row.get("requests") for row in rows]}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--run", action="append", choices=[run.name for run in RUNS], metavar="NAME")
    parser.add_argument(
        "--goldens", type=Path, help="golden files of an earlier time, for the same checkpoints"
    )
    parser.add_argument(
        "--native", action="store_true", help="Triton and TileLang for this card instead of SM80"
    )
    return parser.parse_args()


def main() -> int:
    """Run the script."""
    arguments = _arguments()
    machine = Machine(arguments.work.resolve(), arguments.out.resolve(), arguments.gpus, arguments.native)
    machine.out.mkdir(parents=True, exist_ok=True)
    prepare(machine, arguments.goldens and arguments.goldens.resolve())
    runs: Sequence[Run] = [
        run for run in RUNS if (run.name in arguments.run if arguments.run else run.tp <= machine.gpus)
    ]
    with ThreadPoolExecutor(SHARING * machine.gpus) as pool:
        results = list(pool.map(lambda job: validate(machine, job[1], job[0]), enumerate(runs)))
    (machine.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"{sum(r['ok'] for r in results)} of {len(results)} runs passed")
    return 0 if all(r["ok"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
