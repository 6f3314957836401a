"""Time of commands that read headers only, on sparse full-size checkpoints; whole processes, start included.

python benchmarks/bench_structure.py [--dir DIR] [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: Release, and the seconds that each command may take.
RELEASES = (("deepseek-v4-flash-0731", 3.0), ("deepseek-v4-pro", 6.0))
COMMANDS = (("original",), ("plan", "--experts", "int8"), ("plan", "--experts", "mxfp4"))


def main() -> None:
    """Parse, measure, print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"{'release':<26}{'command':<26}{'seconds':>9}{'limit':>7}")
    for release, limit in RELEASES:
        with tempfile.TemporaryDirectory(dir=options.dir, prefix="dsv4-bench-") as place:
            source = str(Path(place) / "source")
            run("synth", source, "--scale", "full", "--release", release)
            for command in COMMANDS:
                seconds = statistics.median(
                    run(command[0], source, *command[1:]) for _ in range(options.rounds)
                )
                print(f"{release:<26}{' '.join(command):<26}{seconds:>9.2f}{limit:>7.1f}", flush=True)


def run(*arguments: str) -> float:
    """Run a command to its end and return the seconds; a failure ends the benchmark."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "dsv4convert", *arguments, "-q"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
