"""Memory and time of `probe` on a checkpoint of full size that takes no room on the disk.

python benchmarks/bench_probe.py [--prompt-tokens N] [--tokens N] [--layout int8|mxfp4|official]

Shards are sparse files with the names, shapes and sizes of 0731. What decides which experts a token reaches
is random: embedding rows of the prompt, routers, hash tables, norms of one; the head has a few random rows.
All else reads as zeros, which cost as much to decode and to multiply as other numbers do, but no disk access.
Beside other work, set OMP_NUM_THREADS=1: threads that wait for each other make the figures meaningless.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dsv4convert.checkpoint import Checkpoint, open_checkpoint
from dsv4convert.formats.spec import nbytes
from dsv4convert.geometry import Geometry, read_geometry
from dsv4convert.names import Layout, Unit, expected_units, official_shard, official_shard_count
from dsv4convert.releases import config
from dsv4convert.table import Role
from dsv4convert.writer import encode_header, in_data_order

RELEASE = "deepseek-v4-flash-0731"
HEAD_ROWS = 2048
PROMPT = (5, 1000, 20_000, 40_000, 60_000, 80_000, 100_000, 120_000)


def make_sparse(root: Path, layout: Layout, settings: Mapping[str, Any], prompt: Sequence[int]) -> None:
    """Write a checkpoint whose data are holes, but for what decides about routing.

    Args:
        root: An empty directory.
        layout: How weights are stored.
        settings: Its `config.json`.
        prompt: Token ids that will be run.
    """
    geometry, _ = read_geometry(settings)
    if geometry is None:
        raise ValueError("no model")
    count = official_shard_count(geometry)
    shards: dict[str, list[Unit]] = {}
    for unit in expected_units(geometry):
        name = f"model-{official_shard(geometry, unit):05d}-of-{count:05d}.safetensors"
        shards.setdefault(name, []).append(unit)
    weight_map: dict[str, str] = {}
    for name, units in shards.items():
        stored = [(n, *kind) for unit in units for n, kind in unit.stored(layout).items()]
        entries = in_data_order(stored)
        header = encode_header(entries)
        with open(root / name, "wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(nbytes(dtype, shape) for _, dtype, shape in entries))
        weight_map |= dict.fromkeys((n for n, _, _ in entries), name)
    (root / "config.json").write_text(json.dumps(settings))
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    _fill(open_checkpoint(root), geometry, prompt)


def _fill(checkpoint: Checkpoint, geometry: Geometry, prompt: Sequence[int]) -> None:
    rng = np.random.default_rng(0)
    for unit in expected_units(geometry):
        info = checkpoint.tensors.get(unit.base)
        if info is None or unit.base.startswith("mtp"):
            continue
        row = info.nbytes // info.shape[0]
        if unit.row.role is Role.NORM:
            _write(checkpoint, unit.base, 0, np.full(info.shape, 0x3F80, "<u2"))
        elif unit.base == "embed.weight":
            for token in prompt:
                _write(checkpoint, unit.base, token * row, _bf16(rng, (geometry.hidden,)))
        elif unit.base == "head.weight":
            _write(checkpoint, unit.base, 0, _bf16(rng, (min(HEAD_ROWS, geometry.vocab), geometry.hidden)))
        elif unit.base.endswith("gate.weight"):
            _write(checkpoint, unit.base, 0, _bf16(rng, info.shape))
        elif unit.base.endswith("tid2eid"):
            for token in prompt:
                chosen = rng.permutation(geometry.experts)[: geometry.top_k]
                _write(checkpoint, unit.base, token * row, chosen.astype("<i8"))


def _bf16(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype("<u2")


def _write(checkpoint: Checkpoint, name: str, start: int, data: np.ndarray[Any, Any]) -> None:
    info = checkpoint.tensors[name]
    with open(checkpoint.root / info.shard, "r+b") as file:
        os.pwrite(file.fileno(), data.tobytes(), info.start + start)


def watch(command: list[str]) -> tuple[Mapping[str, Any], dict[str, float]]:
    """Run a probe and return its JSON and what the system says about its process."""
    peak, read = 0, 0
    with tempfile.TemporaryFile() as out:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=out)
        while process.poll() is None:
            peak = max(peak, _number(f"/proc/{process.pid}/status", "RssAnon:") * 1024)
            read = max(read, _number(f"/proc/{process.pid}/io", "rchar:"))
            time.sleep(0.02)
        wall = time.perf_counter() - started
        if process.returncode:
            raise SystemExit(f"probe ended with status {process.returncode}")
        out.seek(0)
        usage = os.times()
        result = json.loads(out.read())
    cpu = usage.children_user + usage.children_system
    return result, {"peak": peak, "read": read, "wall": wall, "cpu": cpu}


def _number(path: str, key: str) -> int:
    try:
        line = next(x for x in Path(path).read_text().splitlines() if x.startswith(key))
    except (OSError, StopIteration):
        return 0
    return int(line.split()[1])


def main() -> None:
    """Make the checkpoint, run `probe` on it, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", choices=[k.value for k in Layout], default=Layout.INT8.value)
    parser.add_argument("--prompt-tokens", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2)
    arguments = parser.parse_args()
    prompt = PROMPT[: arguments.prompt_tokens]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "sparse"
        root.mkdir()
        make_sparse(root, Layout(arguments.layout), config(RELEASE), prompt)
        size = sum(p.stat().st_size for p in root.iterdir())
        disk = sum(p.stat().st_blocks * 512 for p in root.iterdir())
        command = [sys.executable, "-m", "dsv4convert", "probe", str(root), "--json"]
        command += ["--ids", ",".join(map(str, prompt)), "--tokens", str(arguments.tokens)]
        result, used = watch([*command, "--golden", str(Path(folder) / "golden.json")])
    layers, further = result["layer_seconds"], result["token_seconds"]
    print(f"0731 {arguments.layout}: {size:,} bytes of files, {disk / 1e9:.2f} GB on disk")
    print(f"  prompt {len(prompt)} tokens, {arguments.tokens} generated, {used['read'] / 1e9:.1f} GB read")
    print(f"  peak RssAnon {used['peak'] / 2**30:.2f} GiB, resident {result['peak_bytes'] / 2**30:.2f} GiB")
    print(f"  layers over the prompt {sum(layers):.0f} s, {min(layers):.2f} to {max(layers):.2f} s each")
    print(f"  further tokens {', '.join(f'{s:.0f}' for s in further)} s")
    print(f"  wall {used['wall']:.0f} s, CPU {used['cpu']:.0f} s on {len(os.sched_getaffinity(0))} cores")


if __name__ == "__main__":
    main()
