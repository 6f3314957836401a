"""Time and memory of the vision tower as `probe` runs it: float32, full size, weights streamed from a file.

OMP_NUM_THREADS=1 python benchmarks/bench_tower.py [WIDTHxHEIGHT ...]

The checkpoint has the names and shapes of the tower of Vision-Exp and zeros in it, which cost as much to
read, to decode and to multiply as other numbers do. CPU time stands for the time on an idle machine: beside
other work the time on the clock says little, and more threads than idle cores make it worse.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.bench_probe import make_sparse
from dsv4convert import api, synth
from dsv4convert.names import Layout
from dsv4convert.probe.pictures import StreamedTower, read_pictures
from dsv4convert.probe.source import CheckpointSource
from dsv4convert.survey import survey
from dsv4convert.vision.config import VisionConfig

RELEASE = "deepseek-v4-flash-vision-exp"
#: A small picture, a square one, and the one that has the most patches.
SIZES = ((640, 480), (1024, 1024), (1931, 332))


def settings() -> dict[str, Any]:
    """Return a config with the true tower and as little as possible beside it."""
    return synth.make_config(synth.Recipe(RELEASE, "slice", layers=3, experts=6, vocab=1024))


def size_of(word: str) -> tuple[int, int]:
    """Return width and height, both at least 1, of ``WIDTHxHEIGHT``."""
    width, _, height = word.partition("x")
    if min(int(width), int(height)) < 1:
        raise ValueError(word)
    return int(width), int(height)


def main(sizes: list[tuple[int, int]]) -> None:
    """Make the checkpoint and pictures of noise, look at each, print a table."""
    config = settings()
    vision = VisionConfig.from_config(config)
    if vision is None:
        raise ValueError("no tower")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "sparse"
        root.mkdir()
        make_sparse(root, Layout.INT8, config, ())
        paths = [Path(folder) / f"{width}x{height}.png" for width, height in sizes]
        for path, size in zip(paths, sizes, strict=True):
            Image.effect_noise(size, 90).save(path)
        pictures = read_pictures(paths, vision)
        before = _peak()
        print(f"before the tower {before / 2**30:.2f} GiB resident at most")
        with CheckpointSource(survey(api.open(root))) as source:
            tower = StreamedTower(source, vision)
            for path, picture in zip(paths, pictures.shown, strict=True):
                cpu, wall = time.process_time(), time.perf_counter()
                rows = tower.rows(picture, 3)
                cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
                print(
                    f"{path.stem:>10}: {picture.grid.patches:,} patches, {len(rows)} positions: "
                    f"{cpu:.1f} s CPU, {wall:.1f} s, {_peak() / 2**30:.2f} GiB resident at most"
                )


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sizes", type=size_of, nargs="*", metavar="WIDTHxHEIGHT", default=list(SIZES))
    main(parser.parse_args().sizes)
