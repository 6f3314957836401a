"""Serve small checkpoints with the real SGLang on this machine's cards, and judge every server from outside.

    python3 scripts/validate_serving.py WORK OUT [--gpus N | --one-card] [--run NAME ...] [--goldens DIR]

WORK was filled by `scripts/stage_serving.py unpack`; where SGLang 0.5.16 and the clients are installed it
may be empty or missing. A run is a layout and a way to serve it, as `int8-dspark-graph-whole`; those named
start in that order, without --run all of `RUNS` for the cards there are. Each run is: preflight and start
(`serve`), the tokens of every golden file, and an end by SIGTERM. Runs with pictures, and those with CUDA
graphs, whole prompts and no switch, also get a suite of `smoke` and loads of 256 requests, 8 at once and then
64 a second. Several servers share a card, but never while one of them measures its memory. With --one-card
it is the ranks of a server that share one: 2, 4 or 8 of them, slowly, so that golden tokens are all that is
asked. Cards are the first ones of the machine, whatever CUDA_VISIBLE_DEVICES says. OUT gets the log of every
step and `results.json`; the exit status is 1 if a run failed. Compiled kernels stay in WORK/cache, for the
next time.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving_checkpoints import CHECKPOINTS, golden_words, prepare
from serving_runs import RUNS, Run, chosen

HOME = Path(__file__).resolve().parent.parent
CLI = (sys.executable, "-m", "dsv4convert")
CONTEXT, REQUESTS = 40960, 8
#: Servers on one card, and the share of it that weights and pools of each may take.
SHARING, FRACTION = 6, 0.1
#: The same share for each of up to eight ranks on one card.
FRACTION_OF_RANK = 0.08
#: Of the first server; below those that systems hand out by themselves, which begin at 32768.
PORT, NCCL_PORT = 31000, 21000
#: Seconds between two starts on one card: a server measures the free memory of a card twice, 7 s apart, and
#: would take for its own weights what another one fills in between.
STAGGER = 12
_JUDGED = ("--api-key-file", "key", "--random-weights")


@dataclass
class Machine:
    """Paths, environments and cards of this machine.

    Attributes:
        work: Packages, checkpoints, caches.
        out: Logs and results.
        gpus: Cards there are.
        native: Let Triton and TileLang compile for the card at hand instead of SM80.
        one_card: All ranks of a server run on the first card.
        goldens: What `probe` says about the checkpoints.
        interrupted: No more servers are to be started, and those that run are to end.
        serving: All servers that were started.
    """

    work: Path
    out: Path
    gpus: int
    native: bool
    one_card: bool = False
    goldens: Path = Path()
    interrupted: threading.Event = field(default_factory=threading.Event)
    serving: list[subprocess.Popen[str]] = field(default_factory=list)
    rooms: list[threading.Semaphore] = field(init=False)
    starting: list[threading.Lock] = field(init=False)

    def __post_init__(self) -> None:
        # Ranks on one card wait for each other in kernels: a second server would wait for all of them.
        self.rooms = [threading.Semaphore(1 if self.one_card else SHARING) for _ in range(self.gpus)]
        self.starting = [threading.Lock() for _ in range(self.gpus)]

    def environment(self, part: str) -> dict[str, str]:
        """Return the environment of a `server` or a `client`."""
        cache = self.work / "cache"
        path = [HOME, self.work / part, *filter(None, [os.environ.get("PYTHONPATH")])]
        if part == "server" and not self.native:
            path.insert(0, HOME / "scripts" / "as_sm80")
        if part == "server" and self.one_card:
            path.insert(0, HOME / "scripts" / "one_card")
        mine = {
            "PYTHONPATH": os.pathsep.join(map(os.fspath, path)),
            "HF_HUB_OFFLINE": "1",
            "TVM_FFI_CACHE_DIR": os.fspath(cache / "tvm-ffi"),
            "TILELANG_CACHE_DIR": os.fspath(cache / "tilelang"),
            "TRITON_CACHE_DIR": os.fspath(cache / "triton"),
            # Servers share a card, so it is never as empty as SGLang expects of several cards; and nothing is
            # compiled between the two measurements of its memory, because another server would fill it then.
            "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
            "SGLANG_DSV4_MHC_PREWARM": "0",
        }
        if self.one_card:
            mine["SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS"] = "1"
        if (self.work / "server" / "flashinfer").is_dir():
            mine["SGLANG_IS_FLASHINFER_AVAILABLE"] = "0"
        return os.environ | mine

    def interrupt(self, *_: object) -> None:
        """End every server, and start none any more; a signal handler."""
        self.interrupted.set()
        for process in self.serving:
            process.terminate()

    def go_on(self) -> None:
        """Raise where an interrupt ends a run: before its start, and between its parts."""
        if self.interrupted.is_set():
            raise RuntimeError("interrupted")

    def command(self, log: str, *words: object) -> int:
        """Run a command that has to succeed, as `serving_checkpoints.Command`."""
        status, _ = ask(self, log, "client", *words)
        if status:
            raise SystemExit(f"error: `dsv4convert {words[0]}` ended with {status}: see {log}.log")
        return status


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
    text = f"$ dsv4convert {shlex.join(map(str, words))}\n{out}{err}exit status {status}\n"
    (machine.out / f"{log}.log").write_text(text, encoding="utf-8")
    return status, out


def _text(stream: str | bytes | None) -> str:
    return stream.decode(errors="replace") if isinstance(stream, bytes) else stream or ""


# ---- servers


def validate(machine: Machine, run: Run, number: int) -> dict[str, Any]:
    """Serve and judge one run."""
    result: dict[str, Any] = {"name": run.name, "ok": False}
    began = time.monotonic()
    try:
        with _cards(machine, run, number) as cards, _server(machine, run, number, cards, result) as url:
            result["goldens"] = _goldens(machine, run, url)
            machine.go_on()
            if run.is_full and not machine.one_card:
                result["smoke"] = _smoke(machine, run, url)
                machine.go_on()
                result["load"] = _load(machine, run, url)
                machine.go_on()
        result["ok"] = _is_right(result)
    except Exception as error:
        result["error"] = repr(error)
        (machine.out / f"{run.name}-error.log").write_text(traceback.format_exc(), encoding="utf-8")
    result["seconds"] = round(time.monotonic() - began)
    print(json.dumps(result), flush=True)
    return result


def _is_right(result: dict[str, Any]) -> bool:
    """Judge what every part of a run came to; a part that was not asked has no say."""
    goldens = result["goldens"].values()
    return (
        all(not golden["status"] and golden.get("complete") and not golden["wrong"] for golden in goldens)
        and not result.get("smoke")
        and not result.get("load", {}).get("status")
        and result["end"] == 128 + signal.SIGTERM
        and not result["left"]
    )


@contextmanager
def _cards(machine: Machine, run: Run, number: int) -> Iterator[range]:
    """Wait for room on as many cards as the run needs; yield their numbers."""
    first = 0 if run.tp > 1 else number % machine.gpus
    cards = range(first, first + (1 if machine.one_card else run.tp))
    with ExitStack() as held:
        for card in cards:
            held.enter_context(machine.rooms[card])
        yield cards


@contextmanager
def _server(machine: Machine, run: Run, number: int, cards: range, result: dict[str, Any]) -> Iterator[str]:
    """Start a server, yield its address when it is ready, and end it."""
    # With ranks on one card, the numbers that SGLang hands to them.
    numbers = range(run.tp) if machine.one_card else cards
    environment = machine.environment("server") | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, numbers))}
    environment |= dict(variable.split("=", 1) for variable in run.variables)
    port, tag = PORT + 20 * number, f"--nccl-port {NCCL_PORT + 20 * number}"
    log = machine.out / f"{run.name}-server.log"
    command = [*CLI, *_words(machine, run, port, log), *tag.split()]
    with ExitStack() as held, (machine.out / f"{run.name}-serve.log").open("w") as errors:
        for card in cards:
            held.enter_context(machine.starting[card])
        machine.go_on()
        process = subprocess.Popen(
            command, env=environment, cwd=machine.work, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        machine.serving.append(process)
        began = time.monotonic()
        machine.interrupted.wait(STAGGER)
    try:
        machine.go_on()
        # One line when it is ready, several when it cannot be.
        line = (process.stdout.readline() if process.stdout else "").strip()
        if not line.endswith("}"):
            raise RuntimeError(f"serve ended with {process.wait()}: see {run.name}-serve.log")
        result |= {"ready_seconds": round(time.monotonic() - began), "guards": json.loads(line)["guards"]}
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        result["end"] = process.wait(timeout=120)
        if process.stdout:
            process.stdout.close()
        left = subprocess.run(["pgrep", "-fc", "--", tag], capture_output=True, text=True).stdout
        result["left"] = int(left or 0)


def _words(machine: Machine, run: Run, port: int, log: Path) -> list[str]:
    fraction = FRACTION_OF_RANK if machine.one_card else FRACTION
    ours = f"serve {run.layout} --tp {run.tp} --port {port} --api-key-file key --allow-arch 90 --json --quiet"
    ours += f" --context {CONTEXT} --concurrency {REQUESTS} --mem-fraction-static {fraction}"
    ours += " --dspark" if run.draft else ""
    theirs = "--grammar-backend none --sampling-backend pytorch"
    if run.chunk < 0 and CHECKPOINTS[run.layout].pictures:
        # The safe mode for pictures; without chunks alone their rules would still be in force.
        ours += " --whole-prompts"
    else:
        theirs += f" --chunked-prefill-size {run.chunk}"
    theirs += " --enable-metrics" + ("" if run.graph else " --disable-cuda-graph")
    theirs += " --disable-custom-all-reduce" if machine.one_card else ""
    return [*ours.split(), "--log-file", os.fspath(log), "--", *theirs.split(), *run.extra]


def _smoke(machine: Machine, run: Run, url: str) -> int:
    wanted = CHECKPOINTS[run.layout]
    words = ["--suite", "vision" if wanted.pictures else "full", "--timeout", 600, *_JUDGED]
    if wanted.is_foreseeable:
        # 64 tokens take 11 steps of 6 at best: 5.82 a step, 53 of 55 guesses.
        words += ["--min-accept-length", 5.8, "--min-accept-rate", 0.96]
    else:
        words += golden_words(run.layout, next(iter(wanted.goldens)), machine.goldens)
    return ask(machine, f"{run.name}-smoke", "client", "smoke", url, *words)[0]


def _goldens(machine: Machine, run: Run, url: str) -> dict[str, dict[str, Any]]:
    """Compare the tokens of every golden file, all at once: batches change, and the tokens must not.

    The quick suite around them makes more traffic; ranks on one card would take minutes for it.
    """

    def compare(golden: str) -> tuple[str, dict[str, Any]]:
        words = [*_JUDGED, *golden_words(run.layout, golden, machine.goldens), "--json"]
        words += ["--only", "tokens.*", "--timeout", 600] if machine.one_card else []
        log, seconds = f"{run.name}-golden-{golden}", 3600 if machine.one_card else 900
        status, out = ask(machine, log, "client", "smoke", url, *words, seconds=seconds)
        checks = json.loads(out).get("checks", []) if out.startswith("{") else []
        facts = next((check["facts"] for check in checks if check["name"] == "tokens.ids"), {})
        return golden, {"status": status} | facts

    goldens = list(CHECKPOINTS[run.layout].goldens)
    with ThreadPoolExecutor(len(goldens) or 1) as pool:
        return dict(pool.map(compare, goldens))


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
    parser.add_argument("work", type=Path, help="packages, checkpoints, golden files, caches")
    parser.add_argument("out", type=Path, help="logs and results")
    cards = parser.add_mutually_exclusive_group()
    cards.add_argument("--gpus", type=int, default=1, metavar="N", help="cards to use; default 1")
    cards.add_argument(
        "--one-card", action="store_true", help="runs of several ranks, with all ranks on the first card"
    )
    parser.add_argument(
        "--run",
        action="append",
        choices=[run.name for run in RUNS],
        metavar="NAME",
        help="one run, or several with one --run each; a wrong name lists them all",
    )
    parser.add_argument(
        "--goldens",
        type=Path,
        metavar="DIR",
        help="golden files of an earlier time, for the same checkpoints",
    )
    parser.add_argument(
        "--native", action="store_true", help="Triton and TileLang for this card instead of SM80"
    )
    arguments = parser.parse_args()
    if arguments.gpus < 1:
        parser.error(f"argument --gpus: expected at least 1, found {arguments.gpus}")
    arguments.runs = chosen(arguments.run, arguments.gpus, arguments.one_card)
    large = [run for run in arguments.runs if run.tp > arguments.gpus]
    if large and not arguments.one_card:
        name, tp = large[0].name, large[0].tp
        expected = f"{name} needs {tp} cards, found {arguments.gpus}"
        parser.error(f"argument --gpus: {expected}; pass --gpus {tp}, or --one-card")
    alone = [run for run in arguments.runs if run.tp == 1]
    if alone and arguments.one_card:
        parser.error(f"argument --one-card: {alone[0].name} has one rank: run it without")
    if arguments.goldens:
        missing = _missing(arguments.goldens, arguments.runs)
        if missing:
            found = "is no directory" if not arguments.goldens.is_dir() else f"lacks {missing}"
            parser.error(f"argument --goldens: {arguments.goldens} {found}")
    return arguments


def _missing(folder: Path, runs: Sequence[Run]) -> str:
    """Return the name of the first file that these runs need and a directory of golden files lacks."""
    for run in runs:
        for golden in CHECKPOINTS[run.layout].goldens:
            files = [Path(word) for word in golden_words(run.layout, golden, folder) if word[:2] != "--"]
            absent = [file.name for file in files if not file.is_file()]
            if absent:
                return absent[0]
    return ""


def main() -> int:
    """Run the script."""
    arguments = _arguments()
    places = arguments.work.resolve(), arguments.out.resolve()
    machine = Machine(*places, arguments.gpus, arguments.native, arguments.one_card)
    for folder in (machine.work, machine.out):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            expected = f"expected a directory, or a place for one: {error.strerror}"
            raise SystemExit(f"error: {folder}: {expected}") from None
    if not (machine.work / "key").exists():
        machine.command("keygen", "keygen", "key")
    layouts = [run.layout for run in arguments.runs]
    earlier = arguments.goldens and arguments.goldens.resolve()
    try:
        machine.goldens = prepare(machine.command, machine.work, layouts, earlier)
    except KeyboardInterrupt:
        print("interrupted while checkpoints were made; run the same command again", file=sys.stderr)
        return 128 + signal.SIGINT
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, machine.interrupt)
    results = _validate_all(machine, arguments.runs)
    print(f"{sum(r['ok'] for r in results)} of {len(results)} runs passed")
    if machine.interrupted.is_set():
        return 128 + signal.SIGINT
    return 0 if all(r["ok"] for r in results) else 1


def _validate_all(machine: Machine, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Validate runs beside each other; keep what is known after each, in case that this process is killed."""
    results: list[dict[str, Any]] = []
    with ThreadPoolExecutor(SHARING * machine.gpus) as pool:
        jobs = [pool.submit(validate, machine, run, number) for number, run in enumerate(runs)]
        for job in as_completed(jobs):
            results.append(job.result())
            text = json.dumps(results, indent=1) + "\n"
            (machine.out / "results.json").write_text(text, encoding="utf-8")
    return results


if __name__ == "__main__":
    sys.exit(main())
