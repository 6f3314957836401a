"""The checkpoints that `validate_serving` serves, and what `probe` says about them.

All are synthetic, of the smallest shapes that SGLang's kernels take (`synth --scale served`). Golden files
may come from another machine: the same seeds make the same checkpoints.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOKENS = 24
#: Runs a command of dsv4convert in the directory of the checkpoints: name of its log, words -> exit status.
Command = Callable[..., int]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """How a served checkpoint is made.

    Attributes:
        source: Directory of the official one; several conversions may share it.
        synth: Further arguments of `synth`.
        experts: Layout of the conversion.
        is_foreseeable: Give it a draft that is always right.
        goldens: Golden file -> arguments of `probe`, without the pictures.
        pictures: Golden file -> its pictures, in order.
    """

    source: str
    synth: tuple[str, ...]
    experts: str
    is_foreseeable: bool
    goldens: Mapping[str, tuple[str, ...]]
    pictures: Mapping[str, tuple[str, ...]]


def ids(length: int, first: int = 262) -> str:
    """Return a prompt: a fixed walk over 700 ids from `first` on, with commas."""
    state, walk = 2026, []
    for _ in range(length):
        state = (1103515245 * state + 12345) % 2**31
        walk.append(str(first + (state >> 8) % 700))
    return ",".join(walk)


#: No marker, no byte. Within a window; over 6 groups of 128; more keys than the indexer picks.
_TEXTS = {str(length): ("--ids", ids(length)) for length in (40, 760, 3000)}
_CHAT = {"chat": ("--prompt", "Name three rivers.", "--chat")}
#: As `served` is, but whole groups of 128 for each of eight ranks.
_WIDE = ("--intermediate", "1024")
_VISION = ("--release", "deepseek-v4-flash-vision-exp")
CHECKPOINTS: Mapping[str, Checkpoint] = {
    "int8": Checkpoint("official", (), "int8", False, _CHAT | _TEXTS, {}),
    "mxfp4": Checkpoint("official", (), "mxfp4", False, _CHAT | _TEXTS, {}),
    "int8wide": Checkpoint("official-wide", _WIDE, "int8", False, _CHAT | _TEXTS, {}),
    "mxfp4wide": Checkpoint("official-wide", _WIDE, "mxfp4", False, _CHAT | _TEXTS, {}),
    "foreseen": Checkpoint("foreseeable", ("--seed", "1"), "int8", True, {}, {}),
    "vision": Checkpoint(
        "official-vision",
        _VISION,
        "int8",
        False,
        {
            "one": ("--prompt", "What is this?", "--chat"),
            # One picture at two places, where it has other numbers of lead tokens.
            "three": ("--prompt", "Compare these three.", "--chat"),
            # 262 is the place of a picture there.
            "760": ("--ids", ids(760, 263)),
        },
        {"one": ("one.png",), "three": ("one.png", "two.png", "one.png")},
    ),
}


def golden_words(layout: str, golden: str, folder: Path) -> list[str]:
    """Return the arguments of `smoke` that name a golden file and its pictures."""
    pictures = CHECKPOINTS[layout].pictures.get(golden, ())
    words = ["--golden", str(folder / f"{layout}-{golden}.json")]
    return words + [word for name in pictures for word in ("--image", str(folder / name))]


def prepare(command: Command, work: Path, layouts: Iterable[str], goldens: Path | None) -> Path:
    """Make what is not there yet.

    Args:
        command: Runs dsv4convert in `work`.
        work: Where checkpoints go.
        layouts: Keys of `CHECKPOINTS`.
        goldens: Golden files and pictures of an earlier time; None to make them.

    Returns:
        The directory of golden files and pictures.
    """
    wanted = list(dict.fromkeys(layouts))
    for layout in wanted:
        _make_official(command, work, CHECKPOINTS[layout])
    folder = goldens or work / "goldens"
    if goldens is None:
        folder.mkdir(exist_ok=True)
        draw(folder)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda layout: _convert(command, work, layout), wanted))
        if goldens is None:
            jobs = [(layout, golden) for layout in wanted for golden in CHECKPOINTS[layout].goldens]
            list(pool.map(lambda job: _probe(command, folder, *job), jobs))
    return folder


def _make_official(command: Command, work: Path, wanted: Checkpoint) -> None:
    def make(place: Path) -> None:
        command(f"synth-{wanted.source}", "synth", place, "--scale", "served", *wanted.synth)
        if wanted.is_foreseeable:
            change = [sys.executable, HERE / "foreseeable.py", work / place]
            subprocess.run(change, check=True, stdout=subprocess.DEVNULL)
        command(f"original-{wanted.source}", "original", place)

    _make_once(work, wanted.source, make)


def _convert(command: Command, work: Path, layout: str) -> None:
    wanted = CHECKPOINTS[layout]

    def make(place: Path) -> None:
        command(f"convert-{layout}", "convert", wanted.source, place, "--experts", wanted.experts)
        command(f"converted-{layout}", "converted", place, "--reference", wanted.source, "--read-data")

    _make_once(work, layout, make)


def _make_once(work: Path, name: str, make: Callable[[Path], None]) -> None:
    """Make and check a checkpoint that is not there, at a place relative to `work`, before it gets its own.

    What an interrupt left is made anew.
    """
    if (work / name).exists():
        return
    place = Path("unfinished") / name
    shutil.rmtree(work / place, ignore_errors=True)
    (work / place.parent).mkdir(exist_ok=True)
    make(place)
    (work / place).rename(work / name)


def _probe(command: Command, folder: Path, layout: str, golden: str) -> None:
    wanted = CHECKPOINTS[layout]
    images = [word for name in wanted.pictures.get(golden, ()) for word in ("--image", folder / name)]
    words: Sequence[object] = (*wanted.goldens[golden], *images, "--tokens", TOKENS, "--top", 20)
    file = folder / f"{layout}-{golden}.json"
    command(f"probe-{layout}-{golden}", "probe", layout, *words, "--golden", file)


def draw(folder: Path) -> None:
    """Draw the pictures: one wide with flat shapes, one tall with lines."""
    from PIL import Image, ImageDraw

    one = Image.new("RGB", (640, 480), (200, 30, 30))
    pen = ImageDraw.Draw(one)
    pen.ellipse((120, 80, 420, 380), fill=(30, 60, 220))
    pen.rectangle((400, 300, 600, 460), fill=(240, 230, 40))
    one.save(folder / "one.png")
    two = Image.new("RGB", (300, 700), (20, 160, 60))
    pen = ImageDraw.Draw(two)
    for y in range(0, 700, 70):
        pen.line((0, y, 300, 699 - y), fill=(255, 255, 255), width=9)
    two.save(folder / "two.png")
