"""Hashing a checkpoint against `sha256sum` and `openssl` on all cores, and looking at its values.

Files of equal size, at least eight and one for each core, are read from the page cache, so that the figures
are those of the code and not of a disk. The tools run once per file under `xargs -P`, one per core. Many a
`sha256sum` does not use the SHA instructions of the processor; `openssl` does, and is the harder one to keep
up with.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dsv4convert.checkpoint import open_checkpoint
from dsv4convert.survey import survey
from dsv4convert.synth import Recipe, synthesize
from dsv4convert.validate.hashing import Hashed, Target, hash_files
from dsv4convert.validate.hashlists import SHA256
from dsv4convert.validate.values import check_values

CORES = len(os.sched_getaffinity(0))
FILES, SIZE = max(8, CORES), 96 << 20
#: Share of the speed of the tools that hashing must reach.
TARGET = 0.8


def _best(work: Callable[[], object], times: int = 3) -> float:
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def _digests(tool: list[str], folder: Path, names: list[str]) -> dict[str, str]:
    command = ["xargs", "-P", str(CORES), "-n", "1", *tool]
    text = "\n".join(names).encode()
    done = subprocess.run(command, input=text, cwd=folder, capture_output=True, check=True)
    pairs = (line.split() for line in done.stdout.decode().splitlines())
    return {name.removeprefix("*"): value for value, name in pairs}


@pytest.mark.bench
@pytest.mark.parametrize("tool", [["sha256sum"], ["openssl", "dgst", "-sha256", "-r"]], ids=lambda t: t[0])
def test_hashing_keeps_up_with_the_tools_on_all_cores(tmp_path: Path, tool: list[str]) -> None:
    rng = np.random.default_rng(7)
    names = [f"f{i}" for i in range(FILES)]
    for name in names:
        (tmp_path / name).write_bytes(rng.bytes(SIZE))
    targets = [Target(n, tmp_path / n, SIZE, frozenset({SHA256})) for n in names]
    found: dict[str, Hashed] = {}

    def ours() -> None:
        hash_files(targets, CORES, None, lambda h: found.__setitem__(h.name, h), lambda count: None)

    ours()
    expected = _digests(tool, tmp_path, names)
    assert {n: h.digests[SHA256] for n, h in found.items()} == expected, "a wrong result has no speed"
    # In turns, because other work on the machine comes and goes.
    pairs = [(_best(ours, 1), _best(lambda: _digests(tool, tmp_path, names), 1)) for _ in range(5)]
    mine, other = (min(p[i] for p in pairs) for i in (0, 1))
    total, ratio = FILES * SIZE / 1e9, other / mine
    print(f"\n{CORES} cores: {total / mine:.2f} GB/s, {tool[0]} {total / other:.2f} GB/s, x{ratio:.2f}")
    assert ratio >= TARGET


@pytest.mark.bench
def test_values_are_looked_at_near_memory_speed(tmp_path: Path) -> None:
    synthesize(
        tmp_path / "slice", Recipe("deepseek-v4-flash-0731", "slice", layers=3, experts=16, vocab=4096)
    )
    seen = survey(open_checkpoint(tmp_path / "slice"))
    found = check_values(seen, 100, 1, lambda count: None)
    assert not found.findings, "a wrong result has no speed"
    seconds = _best(lambda: check_values(seen, 100, 1, lambda count: None))
    print(f"\none core: values of {found.read / 1e9:.2f} GB at {found.read / 1e9 / seconds:.2f} GB/s")
