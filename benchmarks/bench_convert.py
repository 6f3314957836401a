"""Conversion against `cp` of the same bytes and against a plain torch conversion, in one run.

    python benchmarks/bench_convert.py [--dir DIR] [--rounds N] [--gigabytes G] [--jobs N] [--device cuda]

DIR should be a file system in memory with room for four times G. Every measurement runs in a fresh process
that times the work without its start-up, which is reported apart; rounds are interleaved and the median of
the ratios within each round is printed. Nothing is printed for a conversion whose bytes are wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

STARTED = time.perf_counter()
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

#: Name, layout, storage of the weights that are converted, limit of the ratio to `cp`.
SETS = (
    ("FP8 -> BF16", "mxfp4", "fp8 block", 2.2),
    ("MXFP4 kept", "mxfp4", "mxfp4", 1.1),
    ("MXFP4 -> INT8_SHIFT", "int8", "mxfp4", 1.8),
)


@dataclass(frozen=True)
class Measured:
    """Seconds of work, seconds of start-up, peak anonymous memory in MiB."""

    seconds: float
    start: float
    rss_mib: float


def main() -> None:
    """Parse, measure, print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="dsv4-bench-") as place:
        run(Path(place), options.rounds, options.gigabytes, options.jobs, options.device)


def run(place: Path, rounds: int, gigabytes: float, jobs: int, device: str) -> None:
    """Measure every set and print the table."""
    print(
        f"{os.cpu_count()} cores, {device}, {jobs} jobs, {gigabytes:g} GB a set, {rounds} rounds, with hashes"
    )
    header = f"{'set':<22}{'GB in':>7}{'cp s':>8}{'ours s':>8}{'x cp':>7}{'limit':>7}{'naive x':>9}"
    print(header + f"{'start s':>9}{'RssAnon MiB':>13}")
    for name, layout, storage, limit in SETS:
        source = make_set(place / "source", storage, gigabytes)
        ratios, naive_ratios, ours_all, copies = [], [], [], []
        for number in range(rounds):
            copy = measure_copy(place, source)
            ours = measure(place, device, source, layout, storage, jobs)
            copies.append(copy)
            ours_all.append(ours)
            ratios.append(ours.seconds / copy)
            if number == 0 and storage == "fp8 block" and device == "cpu":
                naive_ratios.append(measure(place, "naive", source, layout, storage, 1).seconds / copy)
        best = ours_all[ratios.index(statistics.median_low(ratios))]
        size = sum(p.stat().st_size for p in source.glob("*.safetensors")) / 1e9
        naive = f"{naive_ratios[0]:.1f}" if naive_ratios else "-"
        ratio = statistics.median(ratios)
        print(
            f"{name:<22}{size:>7.2f}{statistics.median(copies):>8.2f}{best.seconds:>8.2f}{ratio:>7.2f}{limit:>7}"
            f"{naive:>9}{best.start:>9.2f}{max(m.rss_mib for m in ours_all):>13.0f}",
            flush=True,
        )
        shutil.rmtree(source)


def make_set(target: Path, storage: str, gigabytes: float) -> Path:
    """Write a slice of 0731 cut down to the weights of one storage, of at least the given size."""
    from dsv4convert.synth import Recipe, synthesize

    # 145 MB of FP8 and 13.4 MB per expert in each of layers + 3 blocks.
    fp8 = storage == "fp8 block"
    blocks = 6
    experts = 2 if fp8 else max(2, round(gigabytes * 1e9 / (blocks * 13.4e6)))
    layers = max(3, round(gigabytes * 1e9 / 132e6)) if fp8 else blocks - 3
    synthesize(target, Recipe("deepseek-v4-flash-0731", "slice", layers, experts, 256))
    keep_only(target, storage)
    return target


def keep_only(directory: Path, storage: str) -> None:
    """Rewrite the shards of a checkpoint with the tensors of one storage; what is left is no checkpoint."""
    from dsv4convert.checkpoint import open_checkpoint
    from dsv4convert.names import Layout
    from dsv4convert.survey import survey
    from dsv4convert.writer import encode_header, in_data_order

    seen = survey(open_checkpoint(directory))
    kept = {n for u in seen.units if u.row.storage.value == storage for n in u.stored(Layout.OFFICIAL)}
    for shard in seen.checkpoint.shards.values():
        tensors = {t.name: t for t in shard.tensors if t.name in kept}
        entries = in_data_order((t.name, t.dtype, t.shape) for t in tensors.values())
        smaller = shard.path.with_suffix(".new")
        with open(shard.path, "rb") as old, open(smaller, "wb") as new:
            new.write(encode_header(entries))
            for name, _, _ in entries:
                old.seek(tensors[name].start)
                left = tensors[name].nbytes
                while left:
                    left -= new.write(old.read(min(left, 1 << 22)))
        os.replace(smaller, shard.path)
    index = {"metadata": {}, "weight_map": {n: seen.checkpoint.weight_map[n] for n in kept}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def measure_copy(place: Path, source: Path) -> float:
    """Time `cp` of the shards, in seconds, without its start."""
    target = place / "copy"
    target.mkdir()
    shards = [os.fspath(p) for p in sorted(source.glob("*.safetensors"))]
    started = time.perf_counter()
    subprocess.run(["cp", *shards, os.fspath(target)], check=True)
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return seconds


def measure(place: Path, what: str, source: Path, layout: str, storage: str, jobs: int) -> Measured:
    """Run one measurement in a fresh process."""
    target = place / "out"
    arguments = [what, os.fspath(source), os.fspath(target), f"{layout}/{storage}", str(jobs)]
    command = [sys.executable, __file__, "--child", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    shutil.rmtree(target)
    return Measured(**json.loads(done.stdout))


def child(what: str, source: str, target: str, kind: str, jobs: str) -> None:
    """Do one measurement and print it as JSON."""
    layout, storage = kind.split("/")
    act = prepare(what, Path(source), Path(target), layout, storage, int(jobs))
    start = time.perf_counter() - STARTED
    with rss_anon() as peak:
        began = time.perf_counter()
        act()
        seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "start": start, "rss_mib": peak[0] / 1024}))


def prepare(
    what: str, source: Path, target: Path, layout: str, storage: str, jobs: int
) -> Callable[[], object]:
    """Import and plan everything that is not the work itself."""
    from dsv4convert.checkpoint import open_checkpoint
    from dsv4convert.convert import Limits, convert_shards
    from dsv4convert.journal import Journal
    from dsv4convert.plan import plan
    from dsv4convert.survey import survey

    if what == "naive":
        return lambda: naive(source, target)
    checkpoint = open_checkpoint(source)
    seen = survey(checkpoint)
    units = tuple(u for u in seen.units if u.row.storage.value == storage)
    layouts = replace(seen, units=units, findings=())
    made = plan(layouts, layout)
    Journal(target).start(made, source)
    if what == "cuda" and jobs == 1:
        # Opening the card and compiling kernels, once in a process, counts as start-up.
        warm = target.with_name("warm")
        Journal(warm).start(made, source)
        convert_shards(checkpoint, warm, made.shards[:1], 1, Limits(), lambda count: None, device=what)
        shutil.rmtree(warm)
    return lambda: convert_shards(
        checkpoint, target, made.shards, jobs, Limits(), lambda count: None, device=what
    )


def naive(source: Path, target: Path) -> None:
    """Convert as the public scripts do: whole tensors, BF16 product by repeated scales, `save_file`."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    target.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        result = {}
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118
                if name.endswith(".weight"):
                    codes = shard.get_tensor(name)
                    scale = shard.get_tensor(name.removesuffix(".weight") + ".scale").to(torch.bfloat16)
                    grid = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
                    result[name] = codes.to(torch.bfloat16) * grid[: codes.shape[0], : codes.shape[1]]
        save_file(result, target / path.name)


@contextmanager
def rss_anon() -> Iterator[list[int]]:
    """Sample this process's anonymous memory; the list holds the peak in KiB."""
    peak, stop = [0], threading.Event()

    def sample() -> None:
        while not stop.wait(0.02):
            with open("/proc/self/status") as status:
                found = next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
            peak[0] = max(peak[0], found)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    yield peak
    stop.set()
    thread.join()


if __name__ == "__main__":
    main()
