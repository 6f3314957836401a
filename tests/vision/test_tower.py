"""The tower against a literal second reading in Python floats; its parts and pixels against arithmetic."""

from __future__ import annotations

import io
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4convert import releases
from dsv4convert.geometry import read_geometry
from dsv4convert.names import Layout, expected_units
from dsv4convert.table import Role
from dsv4convert.vision.config import VisionConfig
from dsv4convert.vision.layout import Grid, Kind, place, plan_size
from dsv4convert.vision.tower import (
    PictureError,
    RmsNorm,
    Tower,
    open_picture,
    patch_angles,
    picture_patches,
    rotate,
    unfold_cells,
)
from tests.tolerances import BF16_TOWER, FLOAT32_TOWER

Image = pytest.importorskip("PIL.Image")


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def fill(tower: Tower, seed: int = 0) -> Tower:
    """Give every parameter values with which every operation matters."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in tower.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        scale = 0.3 if parameter.dim() == 1 else 1.5 / math.sqrt(parameter.shape[-1])
        parameter.data = (noise * scale + ("norm" in name)).to(parameter.dtype)
    return tower.requires_grad_(False)


@pytest.fixture
def patches(small: VisionConfig) -> tuple[Tensor, Grid]:
    """Return random patches of a grid whose right column and bottom row of cells are half empty."""
    grid = Grid.of(7 * 4, 5 * 4, small)
    assert (grid.rows, grid.cols, grid.tokens) == (3, 4, 4 * 5 + 2)
    generator = torch.Generator().manual_seed(1)
    return torch.randn(grid.patches, 3, 4, 4, generator=generator, dtype=torch.float64), grid


# ---- the second reading


def norm(x: list[float], weight: Tensor) -> list[float]:
    mean = sum(v * v for v in x) / len(x)
    return [v / math.sqrt(mean + 1e-6) * w for v, w in zip(x, weight.tolist(), strict=True)]


def affine(x: list[float], weight: Tensor, bias: Tensor | None = None) -> list[float]:
    y = [math.fsum(a * b for a, b in zip(x, row, strict=True)) for row in weight.tolist()]
    return y if bias is None else [a + b for a, b in zip(y, bias.tolist(), strict=True)]


def turned(x: list[float], row: int, col: int, theta: float) -> list[float]:
    """Rotate a head's vector: dim i and dim i + half are one complex number, turned by its angle."""
    half = len(x) // 2
    done = [0j] * half
    for i in range(half):
        step = i % (half // 2)
        angle = (row if i < half // 2 else col) * theta ** (-2 * step / half)
        done[i] = complex(x[i], x[half + i]) * complex(math.cos(angle), math.sin(angle))
    return [z.real for z in done] + [z.imag for z in done]


def attention(
    x: list[list[float]], weights: dict[str, Tensor], grid: Grid, v: VisionConfig
) -> list[list[float]]:
    dim, width = v.dim, v.dim // v.heads
    qkv = [affine(row, weights["attn.wqkv.weight"], weights["attn.wqkv.bias"]) for row in x]
    out = [[0.0] * dim for _ in x]
    for head in range(v.heads):
        at = slice(head * width, head * width + width)
        places = [divmod(i, grid.patch_cols) for i in range(len(x))]
        q = [turned(r[:dim][at], *p, v.theta) for r, p in zip(qkv, places, strict=True)]
        k = [turned(r[dim : 2 * dim][at], *p, v.theta) for r, p in zip(qkv, places, strict=True)]
        for i, query in enumerate(q):
            scores = [sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(width) for key in k]
            top = max(scores)
            share = [math.exp(s - top) for s in scores]
            for d in range(width):
                values = (r[2 * dim :][at][d] for r in qkv)
                out[i][head * width + d] = sum(a * b for a, b in zip(share, values, strict=True)) / sum(share)
    return [affine(row, weights["attn.wo.weight"], weights["attn.wo.bias"]) for row in out]


def mlp(x: list[float], weights: dict[str, Tensor], inter: int) -> list[float]:
    both = affine(x, weights["mlp.w1.weight"])
    a = [g / (1 + math.exp(-g)) * u for g, u in zip(both[:inter], both[inter:], strict=True)]
    return affine(a, weights["mlp.w2.weight"])


def plus(x: list[list[float]], y: list[list[float]]) -> list[list[float]]:
    return [[a + b for a, b in zip(r, s, strict=True)] for r, s in zip(x, y, strict=True)]


def second_reading(w: dict[str, Tensor], patches: Tensor, grid: Grid, v: VisionConfig, lead: int) -> Tensor:
    """Compute the rows of a block number by number, in Python floats."""
    proj = (w["vision.patch_embed.proj.weight"], w["vision.patch_embed.proj.bias"])
    x = [affine([p[c][y][z] for c in range(3) for y in range(v.patch) for z in range(v.patch)], *proj)
         for p in patches.tolist()]  # fmt: skip
    for n in range(v.layers):
        prefix = f"vision.blocks.{n}."
        part = {k.removeprefix(prefix): t for k, t in w.items() if k.startswith(prefix)}
        x = plus(x, attention([norm(row, part["norm1.weight"]) for row in x], part, grid, v))
        x = plus(x, [mlp(norm(row, part["norm2.weight"]), part, v.inter) for row in x])
    x = [norm(row, w["vision.norm.weight"]) for row in x]
    cells = []
    for cell in range(grid.cells):
        r, c = divmod(cell, grid.cols)
        places = [
            (r * v.downsample + y, c * v.downsample + z)
            for y in range(v.downsample)
            for z in range(v.downsample)
        ]
        inside = [(a < grid.patch_rows and b < grid.patch_cols, a * grid.patch_cols + b) for a, b in places]
        wide = [x[i][d] if ok else 0.0 for d in range(v.dim) for ok, i in inside]
        hidden = affine(wide, w["aligner.w1.weight"], w["aligner.w1.bias"])
        hidden = [h * (1 + math.erf(h / math.sqrt(2))) / 2 for h in hidden]
        cells.append(affine(hidden, w["aligner.w2.weight"], w["aligner.w2.bias"]))
    block = place(grid, 3 - lead)
    names = {Kind.START: "start", Kind.PAD: "pad", Kind.NEWLINE: "newline", Kind.END: "end"}
    perm = iter(block.perm)
    rows = [
        cells[next(perm)] if k == Kind.IMAGE else w[f"image_{names[Kind(k)]}"].tolist() for k in block.kinds
    ]
    return torch.tensor(rows, dtype=torch.float64)


def test_rows_are_those_of_a_second_reading(small: VisionConfig, patches: tuple[Tensor, Grid]) -> None:
    tower = fill(Tower(small).double())
    rows = tower.rows(*patches, lead=2)
    expected = second_reading(dict(tower.named_parameters()), *patches, small, 2)
    assert rows.shape == (2 + patches[1].tokens, small.hidden)
    assert rows.dtype == torch.float64
    # Angles and norms are float32 inside, as in the official code.
    assert error(rows, expected) < FLOAT32_TOWER


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, FLOAT32_TOWER), (torch.bfloat16, BF16_TOWER)], ids=["f32", "bf16"]
)
def test_the_dtype_is_that_of_the_weights(
    small: VisionConfig, patches: tuple[Tensor, Grid], dtype: torch.dtype, limit: float
) -> None:
    pixels, grid = patches[0].to(torch.bfloat16), patches[1]
    rounded = fill(Tower(small).to(torch.bfloat16)).to(dtype)
    rows = rounded.rows(pixels, grid, lead=0)
    exact = fill(Tower(small).to(torch.bfloat16)).double().rows(pixels, grid, lead=0)
    assert rows.dtype == dtype and 0 < error(rows, exact) < limit


FAULTS: dict[str, Callable[[Tower], None]] = {
    "q and k swapped": lambda t: _swap(t.vision.blocks[0].attn.wqkv.weight, 0, 48, 48),
    "gate and up swapped": lambda t: _swap(t.vision.blocks[1].mlp.w1.weight, 0, 20, 20),
    "a patch's row and column swapped": lambda t: _turn(t.vision.patch_embed.proj.weight),
    "cells patch by patch": lambda t: _regroup(t.aligner.w1.weight),
    "no bias of the attention's output": lambda t: t.vision.blocks[0].attn.wo.bias.zero_(),
    "PAD and NEWLINE swapped": lambda t: _exchange(t.image_pad, t.image_newline),
}


def _swap(weight: Tensor, a: int, b: int, count: int) -> None:
    _exchange(weight[a : a + count], weight[b : b + count])


def _exchange(a: Tensor, b: Tensor) -> None:
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)


def _turn(weight: Tensor) -> None:
    weight.copy_(weight.view(-1, 3, 4, 4).transpose(2, 3).reshape(weight.shape).clone())


def _regroup(weight: Tensor) -> None:
    weight.copy_(weight.view(24, 48, 4).transpose(1, 2).reshape(24, 192).clone())


@pytest.mark.parametrize("fault", FAULTS)
def test_the_second_reading_sees_a_fault(
    fault: str, small: VisionConfig, patches: tuple[Tensor, Grid]
) -> None:
    tower = fill(Tower(small).double())
    before = tower.rows(*patches, lead=1)
    FAULTS[fault](tower)
    assert error(tower.rows(*patches, lead=1), before) > 10 * FLOAT32_TOWER


def test_a_row_of_zeros_stays_zero() -> None:
    """The tower's epsilon is 1e-6, whatever `rms_norm_eps` says: no NaN, and no division by 1e-20."""
    layer = RmsNorm(4)
    assert layer(torch.zeros(1, 4)).tolist() == [[0.0] * 4]
    assert layer(torch.full((1, 4), 1e-3)).tolist() == [[pytest.approx(2**-0.5, rel=1e-6)] * 4]


# ---- parts


def test_rotation_is_multiplication_of_complex_numbers(released: VisionConfig) -> None:
    """Head of 64 dims: 16 angles from the row, 16 from the column, halves as real and imaginary parts."""
    grid = Grid.of(14 * 5, 14 * 3, released)
    angles = patch_angles(grid, 64, 10000.0)
    assert angles.shape == (15, 32)
    x = torch.randn(2, 15, 64, generator=torch.Generator().manual_seed(2))
    turned = torch.complex(x[..., :32], x[..., 32:]).to(torch.complex128)
    for patch in range(15):
        row, col = divmod(patch, 5)
        for i in range(32):
            angle = (row if i < 16 else col) * 10000.0 ** (-2 * (i % 16) / 32)
            turned[:, patch, i] *= complex(math.cos(angle), math.sin(angle))
    expected = torch.cat((turned.real, turned.imag), -1)
    assert error(rotate(x, angles), expected) < FLOAT32_TOWER
    # Of a square of patches the diagonal tells rows and columns apart by nothing; elsewhere they differ.
    assert not torch.equal(angles[1], angles[5]) and torch.equal(angles[6, :16], angles[6, 16:])


@pytest.mark.parametrize(("width", "height"), [(9, 6), (7, 5), (3, 3), (1, 1), (8, 1)])
def test_cells_gather_the_patches_that_their_index_says(
    width: int, height: int, released: VisionConfig
) -> None:
    grid = Grid.of(14 * width, 14 * height, released)
    dim = 4
    index = torch.arange(1, width * height * dim + 1).view(-1, dim)
    cells = unfold_cells(index, grid, 3)
    assert cells.shape == (grid.cells, dim * 9)
    for cell in range(grid.cells):
        row, col = divmod(cell, grid.cols)
        for feature in range(dim * 9):
            channel, rest = divmod(feature, 9)
            y, x = row * 3 + rest // 3, col * 3 + rest % 3
            inside = y < height and x < width
            assert cells[cell, feature] == ((y * width + x) * dim + channel + 1 if inside else 0)


def test_cells_are_those_of_torch(released: VisionConfig) -> None:
    grid = Grid.of(14 * 7, 14 * 5, released)
    x = torch.randn(35, 8, generator=torch.Generator().manual_seed(3))
    image = torch.nn.functional.pad(x.view(5, 7, 8).permute(2, 0, 1), (0, 2, 0, 1))[None]
    expected = torch.nn.functional.unfold(image, 3, stride=3)[0].T
    assert torch.equal(unfold_cells(x, grid, 3), expected)


@pytest.mark.parametrize("lead", range(4))
def test_rows_of_a_block_stand_where_its_layout_says(lead: int, small: VisionConfig) -> None:
    tower = fill(Tower(small))
    grid = Grid.of(7 * 4, 5 * 4, small)
    features = torch.randn(grid.cells, small.hidden, generator=torch.Generator().manual_seed(5))
    rows = tower.fill(features, grid, lead)
    singles = {0: tower.image_start, 1: tower.image_pad, 3: tower.image_newline, 4: tower.image_end}
    block = place(grid, 4 * 9 + 3 - lead)
    assert block.lead == lead and len(rows) == len(block.kinds)
    perm = iter(block.perm)
    for row, kind in zip(rows, block.kinds, strict=True):
        assert torch.equal(row, features[next(perm)] if kind == Kind.IMAGE else singles[kind])


def test_parameters_have_the_official_names_and_shapes(released: VisionConfig) -> None:
    geometry, _ = read_geometry(releases.config("deepseek-v4-flash-vision-exp"))
    roles = (Role.VISION, Role.ALIGNER, Role.IMAGE_TOKEN)
    official = {
        name: shape
        for unit in expected_units(geometry)
        if unit.row.role in roles
        for name, (_, shape) in unit.stored(Layout.OFFICIAL).items()
    }
    with torch.device("meta"):
        tower = Tower(released)
    assert {n: tuple(p.shape) for n, p in tower.named_parameters()} == official
    assert len(official) == 267 and not list(tower.buffers())
    assert sum(p.numel() for p in tower.parameters()) == 466_393_088
    parts = {f"{prefix}.{n}" for prefix, m in tower.parts() for n, _ in m.named_parameters()}
    assert official.keys() - parts == {f"image_{end}" for end in ("start", "pad", "newline", "end")}


# ---- pixels


def encoded(picture: Image.Image, form: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, form, **options)
    return buffer.getvalue()


def test_pixels_of_a_picture_that_needs_no_resizing(released: VisionConfig) -> None:
    """Row-major patches, channel first, (x / 255 - 1/2) / (1/2) rounded to bfloat16 once."""
    width, height = 14 * 30, 14 * 28
    assert plan_size(width, height, released) == Grid.of(width, height, released)
    pixels = torch.randint(
        0, 256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(6)
    )
    picture = open_picture(encoded(Image.fromarray(pixels.numpy())))
    patches, grid = picture_patches(picture, released)
    assert patches.shape == (30 * 28, 3, 14, 14) and patches.dtype == torch.bfloat16 and grid.cols == 10
    for patch, channel, y, x in ((0, 0, 0, 0), (29, 1, 3, 13), (30, 2, 13, 0), (839, 0, 5, 7)):
        row, col = divmod(patch, 30)
        value = int(pixels[row * 14 + y, col * 14 + x, channel])
        assert patches[patch, channel, y, x] == torch.tensor((value / 255 - 0.5) / 0.5).bfloat16()
    levels = {
        int(v): float(x) for v, x in zip(pixels[:14, :14, 0].flatten(), patches[0, 0].flatten(), strict=True)
    }
    assert all(-1 <= x <= 1 for x in levels.values())


def border(picture: Image.Image, vision: VisionConfig) -> tuple[list[float], list[float]]:
    """Return the red of the first and of the last pixel of the middle row and of the middle column."""
    patches, grid = picture_patches(picture, vision)
    p = vision.patch
    image = patches.view(grid.patch_rows, grid.patch_cols, 3, p, p).permute(2, 0, 3, 1, 4)
    red = image.reshape(3, grid.height, grid.width)[0].float()
    middle = (grid.height // 2, grid.width // 2)
    return [float(red[middle[0], i]) for i in (0, -1)], [float(red[i, middle[1]]) for i in (0, -1)]


def test_grey_fills_what_the_shape_leaves(released: VisionConfig) -> None:
    grey = float(torch.tensor((127 / 255 - 0.5) / 0.5).bfloat16())
    white = lambda w, h: Image.new("RGB", (w, h), (255, 255, 255))  # noqa: E731
    # 500 x 397 becomes 504 x 406: a frame of another shape.
    across, down = border(white(500, 397), released)
    assert across == [1, 1] and down == [grey, grey]
    # From eight times as wide as high on there is no frame; just below there is.
    assert border(white(800, 100), released) == ([1, 1], [1, 1])
    assert border(white(2000, 120), released) == ([1, 1], [1, 1])
    assert grey in border(white(799, 100), released)[1]
    # So narrow that nothing of it would be left in its frame: stretched.
    assert border(white(1, 16_000), released) == ([1, 1], [1, 1])
    assert border(white(1, 4_000), released) == ([grey, grey], [1, 1])


def test_a_file_is_read_as_the_official_code_reads_it() -> None:
    red, blue = Image.new("RGB", (20, 10), (255, 0, 0)), Image.new("RGB", (20, 10), (0, 0, 255))
    animated = encoded(red, "GIF", save_all=True, append_images=[blue])
    assert open_picture(animated).getpixel((3, 3)) == (255, 0, 0)
    clear = Image.new("RGBA", (20, 10), (10, 20, 30, 0))
    assert open_picture(encoded(clear)).getpixel((3, 3)) == (10, 20, 30)
    exif = Image.Exif()
    exif[0x0112] = 6
    assert open_picture(encoded(red, "JPEG", exif=exif)).size == (20, 10)
    assert open_picture(encoded(Image.new("L", (4, 4), 9))).getpixel((0, 0)) == (9, 9, 9)


def test_what_is_no_picture_is_refused() -> None:
    good = encoded(Image.effect_noise((64, 64), 90).convert("RGB"))
    assert open_picture(good).size == (64, 64)
    for data in (b"", b"GIF89a", b"<svg/>", good[: len(good) // 2], good[:40] + bytes(80) + good[120:]):
        with pytest.raises(PictureError, match="cannot be decoded") as told:
            open_picture(data)
        assert " object at " not in str(told.value)


def test_a_picture_too_large_to_decode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.new("RGB", (300, 300)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 90_000)
    assert open_picture(data).size == (300, 300)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 44_000)
    with pytest.raises(PictureError, match="cannot be decoded"):
        open_picture(data)
