"""Pictures of the tests, and the requests that hold them."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs

from dsv4convert.vision.config import VisionConfig
from dsv4convert.vision.layout import Block, Grid, place, salted_hash


def url(width: int, height: int, color: tuple[int, int, int] = (200, 30, 30), kind: str = "PNG") -> str:
    """Return a picture of one colour as a ``data:`` URL."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), color).save(buffer, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def grid(rows: int, cols: int, vision: VisionConfig) -> Grid:
    """Return a grid of so many patches."""
    return Grid.of(cols * vision.patch, rows * vision.patch, vision)


def item(patches: torch.Tensor, grid: Grid, start: int) -> tuple[MultimodalDataItem, Block]:
    """Return what the processor makes of a picture at a position of the prompt."""
    block = place(grid, start)
    made = MultimodalDataItem(
        modality=Modality.IMAGE,
        hash=salted_hash(patches.view(torch.uint8).numpy().tobytes(), grid, block.lead),
        offsets=[(block.start, block.stop - 1)],
        feature=patches,
        model_specific_data={"patch_grid": (grid.patch_rows, grid.patch_cols)},
    )
    made.set_pad_value()
    return made, block


def spanned(*ranges: tuple[int, int]) -> MultimodalInputs:
    """Return the inputs of a request whose pictures fill the given positions, without anything in them."""
    items = [MultimodalDataItem(modality=Modality.IMAGE, offsets=[(a, b - 1)]) for a, b in ranges]
    return MultimodalInputs(mm_items=items)


def step(
    mode: Any, prefixes: Sequence[int], lengths: Sequence[int], inputs: Sequence[Any]
) -> SimpleNamespace:
    """Return what is read of a ``ForwardBatch``."""
    return SimpleNamespace(
        forward_mode=mode,
        extend_prefix_lens_cpu=list(prefixes),
        extend_seq_lens_cpu=list(lengths),
        mm_inputs=list(inputs),
    )
