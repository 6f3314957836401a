"""From a picture to rows of the language model: patches, tower, aligner, block. Pure torch, any dtype.

    picture = open_picture(data)                        # bytes of a file -> PIL image in RGB
    patches, grid = picture_patches(picture, vision)    # [N, 3, p, p] bfloat16, and its `layout.Grid`
    tower = Tower(vision)                               # parameters under their official names, no prefix
    rows = tower.rows(patches, grid, block.lead)        # [lead + grid.tokens, D]: a row per position

`Tower` is a plain module tree: its parameters are called ``vision.blocks.0.attn.wqkv.weight``,
``aligner.w1.bias``, ``image_start`` and so on, as in the checkpoint. `probe` runs it in float32 and streams
the weights through it, part by part (`Tower.parts`); the server holds it in bfloat16.

Source: DeepSeek-V4-Flash-Vision-Exp ``inference/vision.py`` and ``inference/image_processor.py``.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsv4convert.vision.config import VisionConfig
from dsv4convert.vision.layout import Grid, Kind, place, plan_size

if TYPE_CHECKING:
    from PIL.Image import Image

#: Epsilon of the tower's norms; a constant, unlike `rms_norm_eps` of the language model.
_EPS: Final = 1e-6
_GREY: Final = (127, 127, 127)


class PictureError(ValueError):
    """A picture that cannot be decoded; the message says why and can be shown to whoever sent it."""


# ---- pixels


def open_picture(data: bytes) -> Image:
    """Decode the bytes of a picture file.

    As in the official code the first frame counts, transparency is dropped, and an orientation that is noted
    beside the pixels is not applied.

    Returns:
        A picture in RGB.

    Raises:
        PictureError: the bytes are no picture that Pillow reads, or it is damaged or too large.
        ImportError: Pillow is not installed.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as source:
            return source.convert("RGB")
    except MemoryError:
        raise
    except UnidentifiedImageError:
        # Pillow would name the object in memory.
        problem = "its bytes are no format that Pillow reads"
        raise PictureError(f"the picture cannot be decoded: {problem}") from None
    # Decoders of damaged files raise whatever they stumble over, from `SyntaxError` to `struct.error`.
    except Exception as error:
        raise PictureError(
            f"the picture cannot be decoded: {str(error)[:200] or type(error).__name__}"
        ) from None


def picture_patches(picture: Image, vision: VisionConfig) -> tuple[Tensor, Grid]:
    """Resize a picture as the model expects it, and cut it into patches.

    Args:
        picture: In RGB.
        vision: Numbers of the model.

    Returns:
        [N, 3, p, p] bfloat16 from -1 to 1, patches row by row, on the CPU, and the grid.
    """
    grid = plan_size(picture.width, picture.height, vision)
    pixels = torch.frombuffer(bytearray(_resized(picture, grid, vision).tobytes()), dtype=torch.uint8)
    x = pixels.view(grid.height, grid.width, 3).permute(2, 0, 1).float() / 255
    x = ((x - 0.5) / 0.5).bfloat16()
    p = vision.patch
    x = x.reshape(3, grid.patch_rows, p, grid.patch_cols, p).permute(1, 3, 0, 2, 4)
    return x.reshape(grid.patches, 3, p, p), grid


def _resized(picture: Image, grid: Grid, vision: VisionConfig) -> Image:
    """Return the picture at the size of its grid: stretched if it is too wide, else padded with grey."""
    from PIL import ImageOps

    size = (grid.width, grid.height)
    wide = picture.width >= vision.max_ratio * picture.height
    # Within its frame a very narrow picture would be 0 pixels wide: Pillow fails, or leaves the frame empty.
    narrow = round(picture.width / picture.height * grid.height) == 0
    if wide or narrow:
        return picture.resize(size)
    return ImageOps.pad(picture, size, color=_GREY)


# ---- tower


class RmsNorm(nn.Module):
    """``x * rsqrt(mean(x^2) + 1e-6) * weight`` in float32, rounded once to the dtype of `x`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Norm the last dim of [..., dim]."""
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + _EPS)
        return (y * self.weight.float()).to(x.dtype)


class Attention(nn.Module):
    """Full attention over all patches of one picture, with rotary positions of row and column."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.wqkv = nn.Linear(dim, 3 * dim)
        self.wo = nn.Linear(dim, dim)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Map [N, dim] to [N, dim]; `angles` [N, head width / 2] float32."""
        q, k, v = (part.unflatten(1, (self.heads, -1)).transpose(0, 1) for part in self.wqkv(x).chunk(3, -1))
        o = F.scaled_dot_product_attention(rotate(q, angles)[None], rotate(k, angles)[None], v[None])[0]
        result: Tensor = self.wo(o.transpose(0, 1).flatten(1))
        return result


class Mlp(nn.Module):
    """``w2(silu(gate) * up)``; gate and up are the halves of `w1`."""

    def __init__(self, dim: int, inter: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, 2 * inter, bias=False)
        self.w2 = nn.Linear(inter, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, dim] to [N, dim]."""
        gate, up = self.w1(x).chunk(2, -1)
        result: Tensor = self.w2(F.silu(gate) * up)
        return result


class TowerBlock(nn.Module):
    """Attention and MLP, each behind a norm and added to its input."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        self.norm1 = RmsNorm(vision.dim)
        self.attn = Attention(vision.dim, vision.heads)
        self.norm2 = RmsNorm(vision.dim)
        self.mlp = Mlp(vision.dim, vision.inter)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Map [N, dim] to [N, dim]."""
        x = x + self.attn(self.norm1(x), angles)
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class PatchEmbed(nn.Module):
    """One linear layer on the pixels of a patch, channel by channel and there row by row."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(3 * vision.patch**2, vision.dim)

    def forward(self, patches: Tensor) -> Tensor:
        """Map [N, 3, p, p] to [N, dim] in the dtype of the weight."""
        result: Tensor = self.proj(patches.flatten(1).to(self.proj.weight.dtype))
        return result


class VisionTransformer(nn.Module):
    """The tower: a picture is one sequence of patches; nothing but the rotation tells their places."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(vision)
        self.blocks = nn.ModuleList(TowerBlock(vision) for _ in range(vision.layers))
        self.norm = RmsNorm(vision.dim)
        self._width = vision.dim // vision.heads
        self._theta = vision.theta

    def forward(self, patches: Tensor, grid: Grid) -> Tensor:
        """Map patches [N, 3, p, p] of a grid to [N, dim]."""
        angles = patch_angles(grid, self._width, self._theta, patches.device)
        x = self.patch_embed(patches)
        for block in self.blocks:
            x = block(x, angles)
        result: Tensor = self.norm(x)
        return result


class Aligner(nn.Module):
    """From cells of the tower's output to rows of the language model."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(vision.dim * vision.downsample**2, vision.hidden)
        self.w2 = nn.Linear(vision.hidden, vision.hidden)
        self._down = vision.downsample

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Map [N, dim] to [cells, D], cells row by row."""
        result: Tensor = self.w2(F.gelu(self.w1(unfold_cells(x, grid, self._down))))
        return result


class Tower(nn.Module):
    """Everything of a checkpoint that pictures need, under its official names.

    Args:
        vision: Numbers of the model.
    """

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        self.vision = VisionTransformer(vision)
        self.aligner = Aligner(vision)
        self.image_start = nn.Parameter(torch.zeros(vision.hidden))
        self.image_pad = nn.Parameter(torch.zeros(vision.hidden))
        self.image_newline = nn.Parameter(torch.zeros(vision.hidden))
        self.image_end = nn.Parameter(torch.zeros(vision.hidden))

    def features(self, patches: Tensor, grid: Grid) -> Tensor:
        """Return the aligner's rows of a picture, [cells, D].

        Args:
            patches: [N, 3, p, p] of `picture_patches`, on the device of the weights.
            grid: Their grid.
        """
        result: Tensor = self.aligner(self.vision(patches, grid), grid)
        return result

    def rows(self, patches: Tensor, grid: Grid, lead: int) -> Tensor:
        """Return the rows of a block, [lead + grid.tokens, D]; arguments as those of `features`.

        Args:
            lead: PADs before START, `layout.Block.lead`.
        """
        return self.fill(self.features(patches, grid), grid, lead)

    def fill(self, features: Tensor, grid: Grid, lead: int) -> Tensor:
        """Return the rows of a block from the aligner's rows [cells, D]."""
        block = place(grid, 3 - lead)
        kinds = torch.tensor(block.kinds, device=features.device)
        # In the order of `Kind`; the row of IMAGE is overwritten below.
        single = (self.image_start, self.image_pad, self.image_pad, self.image_newline, self.image_end)
        rows = torch.stack(single).to(features.dtype)[kinds]
        rows[kinds == Kind.IMAGE] = features[torch.tensor(block.perm, device=features.device)]
        return rows

    def parts(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules that run one after the other, with the prefix of their parameters' names."""
        yield "vision.patch_embed", self.vision.patch_embed
        for index, block in enumerate(self.vision.blocks):
            yield f"vision.blocks.{index}", block
        yield "vision.norm", self.vision.norm
        yield "aligner", self.aligner


def patch_angles(grid: Grid, width: int, theta: float, device: torch.device | str | None = None) -> Tensor:
    """Return the rotary angles of all patches, [N, width / 2] float32: half by row, half by column.

    Args:
        grid: Of the picture.
        width: Of a head.
        theta: Base.
        device: Where they are wanted.
    """
    count = width // 4
    # A power may round otherwise on a card; the products are the same everywhere.
    freqs = (theta ** (-torch.arange(count, dtype=torch.float32) * 2 / (width // 2))).to(device)
    rows = torch.arange(grid.patch_rows, dtype=torch.float32, device=device)[:, None] * freqs
    cols = torch.arange(grid.patch_cols, dtype=torch.float32, device=device)[:, None] * freqs
    both = (
        rows[:, None].expand(-1, grid.patch_cols, -1),
        cols[None].expand(grid.patch_rows, -1, -1),
    )
    return torch.cat(both, -1).flatten(0, 1)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs of dims (i, i + half) by the angles of their patch; float32 inside, rounded once.

    Args:
        x: [..., N, width].
        angles: [N, width / 2] float32.
    """
    a, b = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def unfold_cells(x: Tensor, grid: Grid, down: int) -> Tensor:
    """Gather the patches of each cell, [cells, dim * down^2]: dim by dim, there row by row, zeros outside.

    Args:
        x: [N, dim], patches row by row.
        grid: Of the picture.
        down: Patches on a side of a cell.
    """
    image = x.view(grid.patch_rows, grid.patch_cols, -1)
    edge = (0, 0, 0, grid.cols * down - grid.patch_cols, 0, grid.rows * down - grid.patch_rows)
    image = F.pad(image, edge)
    cells = image.view(grid.rows, down, grid.cols, down, -1).permute(0, 2, 4, 1, 3)
    return cells.reshape(grid.cells, -1)
