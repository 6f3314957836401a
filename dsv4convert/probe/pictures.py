"""Pictures of a prompt: from files to rows that stand in place of embeddings.

The tower runs in float32 whatever the numerics of the trunk are. Its weights are read part by part and
dropped after each, as those of the trunk are, once for every picture.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dsv4convert.errors import EnvironmentFault, Refused, finding
from dsv4convert.files import printable, read_whole
from dsv4convert.vision.config import MOST_PICTURE_BYTES, MOST_PICTURES, VisionConfig
from dsv4convert.vision.layout import Block, Grid
from dsv4convert.vision.tower import PictureError, Tower, open_picture, picture_patches

if TYPE_CHECKING:
    from kernels_ref.source import Source


@dataclass(frozen=True)
class Picture:
    """A picture as the model is given it.

    Attributes:
        file: Name of its file.
        sha256: Of the file.
        width, height: Pixels as decoded.
        grid: What it is resized to.
        patches: [N, 3, p, p] bfloat16.
    """

    file: str
    sha256: str
    width: int
    height: int
    grid: Grid
    patches: Tensor

    def as_dict(self, block: Block) -> dict[str, Any]:
        """Return the JSON form, with the place that a block gives it."""
        return {
            "file": self.file,
            "sha256": self.sha256,
            "width": self.width,
            "height": self.height,
            "rows": self.grid.rows,
            "cols": self.grid.cols,
            "start": block.start,
            "lead": block.lead,
            "positions": len(block.kinds),
        }


@dataclass
class Pictures:
    """The pictures of a prompt.

    Attributes:
        vision: Numbers of the model.
        shown: The pictures, in order.
        seconds: What each took in the tower so far, in every checkpoint.
    """

    vision: VisionConfig
    shown: tuple[Picture, ...]
    seconds: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.seconds = [0.0] * len(self.shown)

    @property
    def grids(self) -> tuple[Grid, ...]:
        """Their grids."""
        return tuple(picture.grid for picture in self.shown)

    def rows(self, source: Source, blocks: Sequence[Block], on_part: Callable[[str, float], None]) -> Tensor:
        """Return the rows of all blocks, one after the other, [P, D] float32, by the tower of a checkpoint.

        Args:
            source: Its weights.
            blocks: Where the pictures stand.
            on_part: See `StreamedTower`.
        """
        tower, found = StreamedTower(source, self.vision, on_part), []
        for index, (picture, block) in enumerate(zip(self.shown, blocks, strict=True)):
            started = time.perf_counter()
            found.append(tower.rows(picture, block.lead))
            self.seconds[index] += time.perf_counter() - started
        return torch.cat(found)

    def as_dicts(self, blocks: Sequence[Block]) -> list[dict[str, Any]]:
        """Return the JSON form, with their places."""
        return [picture.as_dict(block) for picture, block in zip(self.shown, blocks, strict=True)]


def read_pictures(paths: Sequence[str | os.PathLike[str]], vision: VisionConfig) -> Pictures:
    """Read and decode picture files.

    Raises:
        Refused: ``probe.picture``; a file is no picture or too large. ``probe.pictures``; there are too many.
        EnvironmentFault: a file cannot be read, or Pillow is not installed.
    """
    if len(paths) > MOST_PICTURES:
        expected, found = f"at most {MOST_PICTURES}", f"{len(paths)}"
        problem, hint = "more pictures than a prompt may hold", "pass fewer `--image`"
        what = finding("probe.pictures", "prompt", problem, expected=expected, found=found, hint=hint)
        raise Refused(what)
    if importlib.util.find_spec("PIL") is None:
        hint, problem = "pip install 'dsv4convert[probe]'", "is not installed; pictures are decoded with it"
        raise EnvironmentFault(finding("env.missing", "pillow", problem, hint=hint))
    return Pictures(vision, tuple(_picture(Path(path), vision) for path in paths))


def _picture(path: Path, vision: VisionConfig) -> Picture:
    # `.` has no name.
    name = printable(path.name or os.fspath(path))
    data = read_whole(path, name, MOST_PICTURE_BYTES, "probe.picture")
    try:
        image = open_picture(data)
    except PictureError as error:
        raise Refused(finding("probe.picture", name, printable(error))) from None
    patches, grid = picture_patches(image, vision)
    return Picture(name, hashlib.sha256(data).hexdigest(), image.width, image.height, grid, patches)


class StreamedTower:
    """The vision tower of a checkpoint in float32, of which one part is in memory at a time.

    Args:
        source: Weights.
        vision: Numbers of the model.
        on_part: Called after each part with its name and the seconds that it took, reading included.
    """

    def __init__(
        self, source: Source, vision: VisionConfig, on_part: Callable[[str, float], None] | None = None
    ) -> None:
        self._source = source
        self._on_part = on_part
        self._started = 0.0
        with torch.device("meta"):
            self._tower = Tower(vision).requires_grad_(False)
        for name, parameter in self._tower.named_parameters(recurse=False):
            setattr(self._tower, name, _float32(source, name, parameter))
        for prefix, part in self._tower.parts():
            part.register_forward_pre_hook(partial(self._load, prefix))
            part.register_forward_hook(partial(self._drop, prefix))

    def rows(self, picture: Picture, lead: int) -> Tensor:
        """Return the rows of a picture's block, [positions, D] float32.

        Args:
            picture: The picture.
            lead: PADs before START.
        """
        with torch.inference_mode():
            return self._tower.rows(picture.patches, picture.grid, lead)

    def _load(self, prefix: str, part: nn.Module, inputs: object) -> None:
        self._started = time.perf_counter()
        for name, parameter in list(part.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            setattr(part.get_submodule(owner), leaf, _float32(self._source, f"{prefix}.{name}", parameter))

    def _drop(self, prefix: str, part: nn.Module, inputs: object, output: object) -> None:
        part.to("meta")
        _give_back()
        if self._on_part:
            self._on_part(prefix, time.perf_counter() - self._started)


def _give_back() -> None:
    """Return freed memory to the system: glibc keeps what it has reused in part, 3 GB over a whole tower."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


def _float32(source: Source, name: str, parameter: Tensor) -> nn.Parameter:
    """Return a weight of the tower; its shape is that of the parameter, by the structural check."""
    return nn.Parameter(source.tensor(name).float().view(parameter.shape), requires_grad=False)
