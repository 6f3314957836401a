"""Seconds until the first token of long prompts, of servers side by side.

    python benchmarks/bench_prefill.py NAME=URL ... [--api-key-file FILE] [--tokens N ...] [--rounds N]
        [--ids FIRST LAST] [--timeout SECONDS] [--out FILE]

A prompt is random ids, another one in every round, so that no prefix cache knows it; one request runs at a
time and asks for one token. In a round every server gets the same prompts, one after the other, in an order
that turns round by round. The time is that of the whole request on the client's clock, with its JSON. The
first tokens are compared with those of the first server. Servers may share cards: the others are idle.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(HOME))

from dsv4convert.errors import Dsv4Error  # noqa: E402
from dsv4convert.smoke.native import generate  # noqa: E402
from dsv4convert.smoke.server import Server, open_server, root_of  # noqa: E402


def main(words: Sequence[str] | None = None) -> int:
    """Parse, measure, print one table; 1 if a number means nothing."""
    options = _arguments(words)
    try:
        key = options.api_key_file.read_text(encoding="utf-8").strip() if options.api_key_file else ""
    except OSError as error:
        raise SystemExit(f"error: {error.filename}: cannot be read: {error.strerror}") from None
    rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(_opened(url, key, options.timeout))
            for name, _, url in (server.partition("=") for server in options.servers)
        }
        for number, tokens in _order(options.rounds, options.tokens):
            prompt = _prompt(number, tokens, *options.ids)
            names = list(servers)
            for name in names if number % 2 == 0 else reversed(names):
                row = ask(servers[name], prompt)
                if number >= 0:
                    rows.setdefault((name, tokens), []).append(row)
    table = list(summarize(rows, next(iter(servers))))
    heads = ("median s", "min", "max", "tokens/s", "same", "cached")
    print(f"{'server':<16}{'tokens':>8}{''.join(f'{head:>10}' for head in heads)}")
    for row in table:
        times = "".join(f"{row[what]:>10.3f}" for what in ("median", "min", "max"))
        rate, same = row["tokens"] / row["median"], f"{row['same']}/{row['rounds']}"
        print(f"{row['server']:<16}{row['tokens']:>8,}{times}{rate:>10,.0f}{same:>10}{row['cached']:>10,}")
    if options.out:
        options.out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return int(any(row["cached"] for row in table))


def _opened(url: str, key: str, timeout: float) -> AbstractContextManager[Server]:
    try:
        return open_server(root_of(url), key, timeout)
    except Dsv4Error as fault:
        raise SystemExit(str(fault)) from None
    except ValueError as fault:
        raise SystemExit(f"error: {fault}") from None


def _order(rounds: int, lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield round and length; round -1 warms up."""
    yield from ((number, tokens) for number in range(-1, rounds) for tokens in lengths)


def _prompt(number: int, tokens: int, first: int, last: int) -> list[int]:
    choose = random.Random(f"{number} {tokens}")
    return [choose.randint(first, last) for _ in range(tokens)]


def ask(server: Server, prompt: Sequence[int]) -> dict[str, Any]:
    """Return the seconds of a request for one token, the token, and prompt tokens that a cache had.

    Raises:
        Trouble: the server gave no usable answer.
    """
    began = time.perf_counter()
    answer = generate(server, prompt, 1)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "token": answer.ids[0], "cached": answer.meta.get("cached_tokens") or 0}


def summarize(rows: dict[tuple[str, int], list[dict[str, Any]]], first: str) -> Iterator[dict[str, Any]]:
    """Yield a row for every server and length; `same` counts first tokens that server `first` picked, too."""
    for (name, tokens), found in sorted(rows.items(), key=lambda item: item[0][1]):
        seconds = [row["seconds"] for row in found]
        pairs = zip(found, rows[first, tokens], strict=True)
        yield {
            "server": name,
            "tokens": tokens,
            "rounds": len(found),
            "seconds": seconds,
            "median": statistics.median(seconds),
            "min": min(seconds),
            "max": max(seconds),
            "same": sum(mine["token"] == theirs["token"] for mine, theirs in pairs),
            "cached": sum(row["cached"] for row in found),
        }


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--api-key-file", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ids", type=int, nargs=2, default=[1000, 100000], metavar=("FIRST", "LAST"))
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of one request")
    parser.add_argument("--out", type=Path, help="write the table there as JSON")
    options = parser.parse_args(words)
    if not all("=" in server for server in options.servers):
        parser.error("a server is NAME=URL")
    return options


if __name__ == "__main__":
    sys.exit(main())
