"""What hashing every tensor costs a conversion: ``python benchmarks/bench_hash_cost.py [-h]``.

Whole conversions of a slice of 0731 in one process and one job, each with XXH3 and with an object in its
place that hashes nothing, in turns whose order alternates. DIR needs room for four times the slice.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4convert import sink
from dsv4convert.convert import convert
from dsv4convert.synth import Recipe, synthesize


class _Nothing:
    """Takes the place of an XXH3."""

    def __init__(self, data: bytes = b"") -> None:
        pass

    def update(self, data: memoryview) -> None:
        """Hash nothing."""

    def hexdigest(self) -> str:
        """Return a digest of the right length."""
        return "0" * 32


_HASHES: dict[bool, Any] = {True: sink.xxhash, False: SimpleNamespace(xxh3_128=_Nothing)}


def _seconds(source: Path, target: Path, experts: str, hashed: bool) -> float:
    with patch.object(sink, "xxhash", _HASHES[hashed]):
        began = time.perf_counter()
        convert(source, target, experts=experts)
        seconds = time.perf_counter() - began
    shutil.rmtree(target)
    return seconds


def main() -> None:
    """Measure and print one line for each layout."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--experts", type=int, default=14, help="of a layer; each adds 80 MB to 0.9 GB")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="dsv4-bench-") as place:
        source, target = Path(place, "source"), Path(place, "target")
        recipe = Recipe("deepseek-v4-flash-0731", "slice", layers=3, experts=options.experts, vocab=1024)
        print(f"{synthesize(source, recipe) / 1e9:.2f} GB, {options.rounds} rounds")
        for layout in ("int8", "mxfp4"):
            _seconds(source, target, layout, True)
            times: dict[bool, list[float]] = {True: [], False: []}
            for number in range(options.rounds):
                for hashed in (True, False) if number % 2 else (False, True):
                    times[hashed].append(_seconds(source, target, layout, hashed))
            with_hash, without = (statistics.median(times[hashed]) for hashed in (True, False))
            ratio = statistics.median(a / b for a, b in zip(times[True], times[False], strict=True))
            print(
                f"{layout}: {with_hash:.3f} s, without {without:.3f} s: {with_hash / without - 1:+.1%}; "
                f"median of ratios {ratio - 1:+.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
