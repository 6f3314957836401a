"""A serving benchmark whose numbers can be compared: SGLang's own client, run in rounds.

Every load is run once per round, and rounds go through the loads in turn, back and forth, so that a machine
that warms up or is disturbed does so for all of them. Each run warms up, empties the prefix cache and then
measures. Rates are medians over rounds; percentiles are taken over the requests of all rounds together,
because an average of percentiles is none.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from dsv4convert.errors import EnvironmentFault, Finding, Refused, finding
from dsv4convert.files import printable
from dsv4convert.smoke.answers import count_at, pick, rows_at
from dsv4convert.smoke.client import MODULE

#: Percentiles, and how many values one needs so that at least one lies beyond it.
PERCENTILES: Final[Mapping[str, tuple[float, int]]] = {"p50": (50, 1), "p90": (90, 10), "p99": (99, 100)}
#: Last lines of a run that failed which are shown.
_SHOWN: Final = 20
#: What the numbers do not cover.
NOT_COVERED: Final = (
    "prompts of people: random ids have no structure, and a draft guesses less of them",
    "answers that end by themselves: every answer has the length that was asked for",
    "the prefix cache: it is emptied before every run",
    "Chat, templates and functions: ids go to `/generate`",
    "the network between clients and server, unless this ran on another machine",
)


@dataclass(frozen=True, slots=True)
class Load:
    """How requests arrive: so many at once, or at a rate per second as a Poisson process."""

    kind: str
    value: float

    @property
    def name(self) -> str:
        """Return the name of the load, such as ``concurrency 4``."""
        return f"{self.kind} {self.value:g}"


@dataclass(frozen=True, slots=True)
class Shape:
    """What is asked.

    Attributes:
        url: Address of the server.
        tokenizer: Directory with the tokenizer of the model.
        input_tokens: Length of every prompt.
        output_tokens: Length of every answer.
        requests: Requests of one run.
        warmup: Requests before, which do not count.
        loads: How they arrive.
        rounds: How often every load is run.
        seconds: Time limit of one run.
    """

    url: str
    tokenizer: Path
    input_tokens: int
    output_tokens: int
    requests: int
    warmup: int
    loads: tuple[Load, ...]
    rounds: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the client: its load, its round (from 0), and what it wrote."""

    load: Load
    round: int
    record: Mapping[str, Any]


def require_client(tokenizer: Path) -> None:
    """Refuse to begin without the client, or with a tokenizer that it would execute.

    Raises:
        EnvironmentFault: ``env.missing``; SGLang is not installed here, or has no such module.
        Refused: ``bench.tokenizer``; there is none, or it brings code.
    """
    spec = importlib.util.find_spec("sglang")
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not any((Path(place) / MODULE).is_file() for place in places):
        problem = "has no module `sglang.benchmark.serving` here" if spec else "is not installed here"
        hint = "run this command in the environment of SGLang 0.5.16, on any machine that reaches the server"
        raise EnvironmentFault(finding("env.missing", "sglang", problem, hint=hint))
    for name in ("tokenizer_config.json", "config.json"):
        path = tokenizer / name
        if path.is_file() and "auto_map" in path.read_text(encoding="utf-8", errors="replace"):
            problem = "names code of the checkpoint, which SGLang's client would execute"
            raise Refused(finding("bench.tokenizer", name, problem))
    if not (tokenizer / "tokenizer.json").is_file():
        raise Refused(finding("bench.tokenizer", printable(tokenizer.name), "holds no `tokenizer.json`"))


def order(loads: Sequence[Load], rounds: int) -> Iterator[tuple[int, Load]]:
    """Yield what is run: every load once per round, back and forth."""
    for number in range(rounds):
        for load in loads if number % 2 == 0 else reversed(loads):
            yield number, load


def arguments(shape: Shape, load: Load, number: int, output: Path) -> list[str]:
    """Return the arguments of ``sglang.benchmark.serving`` for one run."""
    pairs = {
        "--backend": "sglang",
        "--base-url": shape.url,
        "--model": os.fspath(shape.tokenizer),
        "--tokenizer": os.fspath(shape.tokenizer),
        # Ids of the whole vocabulary: needs no download, and lengths are exact.
        "--dataset-name": "random-ids",
        "--random-input-len": f"{shape.input_tokens}",
        "--random-output-len": f"{shape.output_tokens}",
        "--random-range-ratio": "1",
        "--num-prompts": f"{shape.requests}",
        "--warmup-requests": f"{shape.warmup}",
        "--seed": f"{number + 1}",
        "--output-file": os.fspath(output),
        ("--max-concurrency" if load.kind == "concurrency" else "--request-rate"): f"{load.value:g}",
    }
    flags = ["--tokenize-prompt", "--flush-cache", "--output-details", "--cache-report", "--disable-tqdm"]
    return [part for pair in pairs.items() for part in pair] + flags


def run_all(
    shape: Shape, key: str, on_run: Callable[[Load, int], None] = lambda load, number: None
) -> list[Run]:
    """Run everything, one run after the other.

    Args:
        shape: What is asked.
        key: API key; empty for none.
        on_run: Called before every run.

    Raises:
        EnvironmentFault: ``bench.failed``; a run ended with an error or not in time.
    """
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="dsv4convert-bench-") as folder:
        for number, load in order(shape.loads, shape.rounds):
            on_run(load, number)
            output = Path(folder) / f"{len(runs)}.jsonl"
            _execute(arguments(shape, load, number, output), key, load, shape.seconds)
            runs.append(Run(load, number, _record(output, load)))
    return runs


def _execute(words: Sequence[str], key: str, load: Load, seconds: float) -> None:
    command = [sys.executable, "-m", "dsv4convert.smoke.client", *words]
    home = os.fspath(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), home)))
    # Everything the client needs is here; it must not wait for a hub.
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    try:
        ran = subprocess.run(
            command,
            input=f"{key}\n",
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        problem = f"a run did not end within {seconds:g} s"
        raise EnvironmentFault(finding("bench.failed", load.name, problem)) from None
    if ran.returncode:
        said = ran.stdout.replace(key, "<key>") if key else ran.stdout
        last = " | ".join(printable(line, 120) for line in said.splitlines()[-_SHOWN:] if line.strip())
        problem = "SGLang's benchmark client ended with an error"
        raise EnvironmentFault(finding("bench.failed", load.name, problem, found=last[-1500:]))


def _record(output: Path, load: Load) -> Mapping[str, Any]:
    try:
        record = json.loads(output.read_text(encoding="utf-8").splitlines()[-1])
    except (OSError, ValueError, IndexError):
        record = None
    if not isinstance(record, dict) or not rows_at(record, "ttfts"):
        problem = "SGLang's benchmark client wrote no result"
        raise EnvironmentFault(finding("bench.failed", load.name, problem))
    return record


def findings_of(runs: Iterable[Run]) -> tuple[Finding, ...]:
    """Return what makes the numbers worthless: requests that failed, or that the prefix cache served."""
    found = []
    for run in runs:
        where = f"{run.load.name}, round {run.round + 1}"
        errors = [printable(error, 120) for error in rows_at(run.record, "errors") if error]
        if errors:
            problem, total = f"{len(errors)} requests failed", len(rows_at(run.record, "errors"))
            found.append(
                finding("bench.requests", where, problem, expected=f"{total} answers", found=errors[-1])
            )
        cached = count_at(run.record, "cache_report", "total_cached_tokens") or 0
        if cached:
            problem = "prompt tokens came from the prefix cache, though it was to be empty"
            found.append(finding("bench.cached", where, problem, found=f"{cached:,}"))
    return tuple(found)


def summarize(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return one row for every load: medians over rounds, percentiles over the requests of all rounds."""
    loads = dict.fromkeys(run.load for run in runs)
    return [_row(load, [run.record for run in runs if run.load == load]) for load in loads]


def _row(load: Load, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    requests = [request for record in records for request in _requests(record)]
    return {
        "load": {"kind": load.kind, "value": load.value},
        "rounds": len(records),
        "requests": len(requests),
        "failed": sum(bool(error) for record in records for error in rows_at(record, "errors")),
        "output_tokens_per_second": _over_rounds(records, "output_throughput"),
        "input_tokens_per_second": _over_rounds(records, "input_throughput"),
        "requests_per_second": _over_rounds(records, "request_throughput"),
        "concurrency": _over_rounds(records, "concurrency"),
        "first_token_ms": _percentiles([1e3 * first for first, _ in requests]),
        "per_output_token_ms": _percentiles([1e3 * sum(gaps) / len(gaps) for _, gaps in requests if gaps]),
        "request_ms": _percentiles([1e3 * (first + sum(gaps)) for first, gaps in requests]),
    }


def _requests(record: Mapping[str, Any]) -> Iterator[tuple[float, Sequence[float]]]:
    """Yield the seconds to the first token and between tokens of every request that succeeded."""
    rows = zip(rows_at(record, "ttfts"), rows_at(record, "itls"), rows_at(record, "errors"), strict=True)
    yield from ((first, gaps) for first, gaps, error in rows if not error)


def _over_rounds(records: Sequence[Mapping[str, Any]], name: str) -> dict[str, float]:
    values = [float(pick(record, name) or 0.0) for record in records]
    return {"median": median(values), "min": min(values), "max": max(values)}


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    import numpy as np

    return {
        name: float(np.percentile(values, share)) if len(values) >= least else None
        for name, (share, least) in PERCENTILES.items()
    }


def draw(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw throughput and latencies over the loads into a picture, of the format that `path` ends with."""
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(row["load"]["kind"] for row in rows))
    figure = Figure(figsize=(5.5 * len(kinds), 8), layout="constrained")
    axes = figure.subplots(3, len(kinds), squeeze=False)
    for column, kind in enumerate(kinds):
        mine = [row for row in rows if row["load"]["kind"] == kind]
        at = [row["load"]["value"] for row in mine]
        rates = [row["output_tokens_per_second"] for row in mine]
        middle = [rate["median"] for rate in rates]
        spread = [
            [rate["median"] - rate["min"] for rate in rates],
            [rate["max"] - rate["median"] for rate in rates],
        ]
        axes[0][column].errorbar(at, middle, yerr=spread, marker="o", capsize=3)
        axes[0][column].set(
            title=f"{title}, by {kind}", ylabel="output tokens/s\nmedian, least, most of rounds"
        )
        for line, (name, label) in enumerate(
            (("first_token_ms", "first token, ms"), ("per_output_token_ms", "per output token, ms")), 1
        ):
            for share in PERCENTILES:
                values = [float("nan") if row[name][share] is None else row[name][share] for row in mine]
                axes[line][column].plot(at, values, marker="o", label=share)
            axes[line][column].set(ylabel=label)
            axes[line][column].legend()
        unit = "requests at once" if kind == "concurrency" else "requests per second"
        axes[2][column].set(xlabel=unit)
        for row_axes in axes:
            row_axes[column].set_ylim(bottom=0)
            row_axes[column].grid(alpha=0.3)
    figure.savefig(path)
