"""Hashing a checkpoint against `sha256sum` and `openssl` on all cores, and looking at its values.

    python benchmarks/bench_hashes.py [--dir DIR] [--rounds N]

Files of equal size, at least eight and one for each core, are read from the page cache, so that the figures
are those of the code and not of a disk. The tools run once per file under `xargs -P`, one per core. Many a
`sha256sum` does not use the SHA instructions of the processor; `openssl` does, and is the harder one to keep
up with. A wrong result has no speed, and less than 0.8 of a tool's speed ends with status 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from dsv4convert.checkpoint import open_checkpoint
from dsv4convert.survey import survey
from dsv4convert.synth import Recipe, synthesize
from dsv4convert.validate.hashing import Hashed, Target, hash_files
from dsv4convert.validate.hashlists import SHA256
from dsv4convert.validate.values import check_values

CORES = len(os.sched_getaffinity(0))
FILES, SIZE = max(8, CORES), 96 << 20
TOOLS = (("sha256sum",), ("openssl", "dgst", "-sha256", "-r"))
#: Share of the speed of the tools that hashing must reach.
TARGET = 0.8


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _ours(folder: Path, names: list[str]) -> dict[str, str]:
    """Return name -> SHA-256 of files, as `original --checksums` computes them."""
    found: dict[str, Hashed] = {}
    targets = [Target(n, folder / n, SIZE, frozenset({SHA256})) for n in names]
    hash_files(targets, CORES, None, lambda h: found.__setitem__(h.name, h), lambda count: None)
    return {name: hashed.digests[SHA256] for name, hashed in found.items()}


def _theirs(tool: tuple[str, ...], folder: Path, names: list[str]) -> dict[str, str]:
    command = ["xargs", "-P", str(CORES), "-n", "1", *tool]
    text = "\n".join(names).encode()
    done = subprocess.run(command, input=text, cwd=folder, capture_output=True, check=True)
    pairs = (line.split() for line in done.stdout.decode().splitlines())
    return {name.removeprefix("*"): value for value, name in pairs}


def same(found: Mapping[str, str], expected: Mapping[str, str], tool: str) -> None:
    """End the benchmark if two sets of digests differ."""
    wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if wrong:
        raise SystemExit(f"error: {len(wrong)} of {FILES} SHA-256 are not those of {tool}, {wrong[0]} first")


def hashing(folder: Path, rounds: int) -> bool:
    """Print a line for each tool; tell whether all targets are met."""
    rng = np.random.default_rng(7)
    names = [f"f{i}" for i in range(FILES)]
    for name in names:
        (folder / name).write_bytes(rng.bytes(SIZE))
    total, met = FILES * SIZE / 1e9, True
    for tool in TOOLS:
        same(_ours(folder, names), _theirs(tool, folder, names), tool[0])
        # In turns, because other work on the machine comes and goes.
        turns = [
            (_seconds(lambda: _ours(folder, names)), _seconds(lambda t=tool: _theirs(t, folder, names)))
            for _ in range(rounds)
        ]
        mine, other = (min(seconds) for seconds in zip(*turns, strict=True))
        ratio = other / mine
        met &= ratio >= TARGET
        speeds = f"{total / mine:.2f} GB/s, {tool[0]} {total / other:.2f} GB/s, x{ratio:.2f}"
        print(f"{CORES} cores: {speeds}{'' if ratio >= TARGET else f', below {TARGET}'}", flush=True)
    return met


def values(folder: Path, rounds: int) -> None:
    """Print how fast one core looks at values."""
    recipe = Recipe("deepseek-v4-flash-0731", "slice", layers=3, experts=16, vocab=4096)
    synthesize(folder / "slice", recipe)
    seen = survey(open_checkpoint(folder / "slice"))
    found = check_values(seen, 100, 1, lambda count: None)
    if found.findings:
        raise SystemExit(f"error: values of a sound checkpoint are refused: {found.findings[0]}")
    seconds = min(_seconds(lambda: check_values(seen, 100, 1, lambda count: None)) for _ in range(rounds))
    speed = found.read / 1e9 / seconds
    print(f"one core: values of {found.read / 1e9:.2f} GB at {speed:.2f} GB/s", flush=True)


def main() -> int:
    """Measure; return the exit status."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--dir", type=Path, default=None, help="where files are made; default: of tempfile")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"argument --rounds: expected at least 1, found {options.rounds}")
    if options.dir and not options.dir.is_dir():
        parser.error(f"argument --dir: {options.dir} is no directory")
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="dsv4-bench-") as place:
        met = hashing(Path(place), options.rounds)
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="dsv4-bench-") as place:
        values(Path(place), options.rounds)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
