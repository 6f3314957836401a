"""The command `bench-serve`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from dsv4convert.cli.shell import EXIT_HELP, Shell, command_options
from dsv4convert.cli.smoke import bypass_proxy, key_option, parse_url, read_key_file
from dsv4convert.errors import EnvironmentFault, Exit, errors_of, finding
from dsv4convert.files import printable

_AT_ONCE = (1, 4, 8)
_RATES = (0.5, 1.0, 2.0, 4.0)


@click.command("bench-serve", epilog=EXIT_HELP)
@click.argument("url", callback=parse_url)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DST",
    required=True,
    help="Checkpoint, or a directory with its tokenizer.",
)
@key_option
@click.option(
    "--concurrency",
    type=click.IntRange(1, 4096),
    multiple=True,
    default=_AT_ONCE,
    show_default=True,
    help="Requests at once; repeatable.",
)
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    multiple=True,
    default=_RATES,
    show_default=True,
    help="Requests per second, whether earlier ones are answered or not; repeatable.",
)
@click.option(
    "--input-tokens", type=click.IntRange(1), default=1024, show_default=True, help="Of every prompt."
)
@click.option(
    "--output-tokens", type=click.IntRange(2), default=256, show_default=True, help="Of every answer."
)
@click.option("--requests", type=click.IntRange(1), default=32, show_default=True, help="Of one run.")
@click.option(
    "--warmup", type=click.IntRange(1), default=2, show_default=True, help="Requests before each run."
)
@click.option(
    "--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="Runs of every load."
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Draw a picture there; needs `pip install 'dsv4convert[report]'`.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=1800.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest time for one run.",
)
@click.option("--strict", is_flag=True, help="Let warnings fail too.")
@command_options
def bench_serve(
    shell: Shell,
    url: str,
    tokenizer: Path,
    api_key_file: Path | None,
    plot: Path | None,
    strict: bool,
    **chosen: Any,
) -> None:
    """Measure the server at URL with SGLang's own benchmark client, in interleaved rounds.

    Runs where SGLang 0.5.16 is installed. Rates are medians over rounds; percentiles are of all requests.
    """
    from dsv4convert.smoke import bench
    from dsv4convert.smoke.server import open_server, require_libraries

    require_libraries(("httpx",))
    bench.require_client(tokenizer)
    _require_matplotlib(plot)
    bypass_proxy(url)
    key = read_key_file(api_key_file)
    shape = _shape(url, tokenizer, chosen)
    with open_server(url, key, 60.0) as server:
        about = {"url": url, "model": server.model, "context": server.context, **_about(server.info)}
    total = len(shape.loads) * shape.rounds
    runs = bench.run_all(
        shape, key, lambda load, number: shell.say(f"  {load.name}, round {number + 1} of {shape.rounds}")
    )
    rows, findings = bench.summarize(runs), bench.findings_of(runs)
    ok = not (findings if strict else errors_of(findings))
    if plot and ok:
        bench.draw(rows, printable(about["model"], 60), plot)
    if shell.json:
        page = {"ok": ok, "server": about, "shape": _shape_json(shape), "runs": total, "loads": rows}
        page |= {"not_covered": list(bench.NOT_COVERED), "findings": [f.as_dict() for f in findings]}
        shell.data(json.dumps(page, indent=1))
    else:
        shell.findings(findings)
        for line in (*_lines(about, rows), *(f"  NOT covered  {text}" for text in bench.NOT_COVERED)):
            shell.data(line)
        shell.data(f"measured: {total} runs" if ok else "FAILED: these numbers mean nothing")
    raise SystemExit(int(Exit.CLEAN if ok else Exit.FINDINGS))


def _require_matplotlib(plot: Path | None) -> None:
    if plot and importlib.util.find_spec("matplotlib") is None:
        hint = "pip install 'dsv4convert[report]', or leave `--plot` out"
        raise EnvironmentFault(finding("env.missing", "matplotlib", "is not installed; it draws", hint=hint))


def _shape(url: str, tokenizer: Path, chosen: Mapping[str, Any]) -> Any:
    from dsv4convert.smoke.bench import Load, Shape

    at_once = [Load("concurrency", float(value)) for value in dict.fromkeys(chosen["concurrency"])]
    rates = [Load("rate", value) for value in dict.fromkeys(chosen["rate"])]
    return Shape(
        url=url,
        tokenizer=tokenizer.resolve(),
        input_tokens=chosen["input_tokens"],
        output_tokens=chosen["output_tokens"],
        requests=chosen["requests"],
        warmup=chosen["warmup"],
        loads=(*at_once, *rates),
        rounds=chosen["rounds"],
        seconds=chosen["timeout"],
    )


def _shape_json(shape: Any) -> dict[str, Any]:
    names = ("input_tokens", "output_tokens", "requests", "warmup", "rounds")
    return {name: getattr(shape, name) for name in names}


def _about(info: Mapping[str, Any]) -> dict[str, Any]:
    names = ("version", "speculative_algorithm", "tp_size", "max_running_requests", "chunked_prefill_size")
    return {name: info.get(name) for name in names}


def _lines(about: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    speculation = f", {about['speculative_algorithm']}" if about["speculative_algorithm"] else ""
    version = printable(about["version"] or "unknown version", 40)
    yield f"{about['url']}: {printable(about['model'])}, SGLang {version}{speculation}"
    yield "  output tokens/s: median over rounds (least to most); ms: p50, p90, p99 of all requests"
    heads = f"{'output tokens/s':>28}{'first token':>26}{'per output token':>26}"
    yield f"  {'load':<16}{'n':>6}{heads}"
    for row in rows:
        rate = row["output_tokens_per_second"]
        shown = f"{rate['median']:,.1f} ({rate['min']:,.1f} to {rate['max']:,.1f})"
        name = f"{row['load']['kind']} {row['load']['value']:g}"
        first, each = _three(row["first_token_ms"]), _three(row["per_output_token_ms"])
        yield f"  {name:<16}{row['requests']:>6,}{shown:>28}{first:>26}{each:>26}"


def _three(values: Mapping[str, float | None]) -> str:
    # A percentile of too few requests is none.
    return "  ".join("-" if value is None else f"{value:,.4g}" for value in values.values())
