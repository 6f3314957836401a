"""FP8_BLOCK to BF16 and MXFP4 to INT8_SHIFT on the GPU, bit for bit what the CPU does.

Both are bound by memory: a code is read once, decided upon with integer operations (and two exact FP32
products for FP8), and written once. Beside the tensors they can count, in exact integers, what a conversion
reports.

Source: ``docs/formats.md``, sections FP8_BLOCK and INT8_SHIFT.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4convert.formats.spec import INT8_SHIFT, MXFP4, fp8_block
from kernels_ref.arguments import expect
from kernels_ref.sm80.figures import RepackFigures, remapping
from kernels_ref.tensors import Int8Shift

#: Codes of an FP8 tile, most of its rows, its warps.
FP8_TILE, FP8_ROWS, FP8_WARPS = 4096, 16, 4
#: Packed bytes of a repack tile for each of its warps.
REPACK_BYTES = 2048
#: Registers of a thread of the repack, without and with figures. By itself the compiler takes 168, for the
#: rare path; so many threads that the memory stays busy need fewer.
REPACK_REGISTERS = {False: 128, True: 144}


def dequantize_fp8_block(
    codes: Tensor,
    scales: Tensor,
    block: tuple[int, int] = (128, 128),
    *,
    out: Tensor | None = None,
    nan_codes: Tensor | None = None,
) -> Tensor:
    """Decode block-scaled E4M3 weights to BF16; the bits of `kernels_ref.convert.dequantize_fp8_block`.

    Args:
        codes: [N, K] uint8 or float8_e4m3fn, contiguous.
        scales: [ceil(N / bn), ceil(K / bk)] uint8 or float8_e8m0fnu, contiguous.
        block: (bn, bk) elements per scale, powers of two.
        out: [N, K] bfloat16 or int16, contiguous, to be written; a new tensor by default.
        nan_codes: [1] int32 to which the number of NaN codes is added.

    Returns:
        `out`; NaN is 0x7FC0, or 0xFFC0 for a code with a sign.

    Raises:
        ValueError: a tensor of another shape, dtype or layout, or a block side that is not a power of two.
    """
    expect("codes", codes, (torch.uint8, torch.float8_e4m3fn), (None, None), gaps="nowhere")
    expect("scales", scales, (torch.uint8, torch.float8_e8m0fnu), (None, None), gaps="nowhere")
    n, k = codes.shape
    bn, bk = block
    if bn < 1 or bn & (bn - 1) or bk & (bk - 1) or bk < 4:
        raise ValueError(f"block sides must be powers of two and columns at least 4, got {bn} x {bk}")
    if tuple(scales.shape) != fp8_block(bn, bk).grid((n, k)):
        raise ValueError(f"scales must be {list(fp8_block(bn, bk).grid((n, k)))}, got {list(scales.shape)}")
    if out is not None:
        expect("out", out, (torch.bfloat16, torch.int16), (n, k), gaps="nowhere")
    out = torch.empty(n, k, dtype=torch.bfloat16, device=codes.device) if out is None else out
    if not codes.numel():
        return out
    source, target = codes.view(torch.uint8), out.view(torch.int16)
    if k % 4:  # Words of four codes need whole words in a row; no weight of a release comes here.
        source = torch.nn.functional.pad(source, (0, 4 - k % 4))
        target = torch.empty(source.shape, dtype=torch.int16, device=source.device)
    tile = fp8_tile(block, scales.shape[1])
    # One axis: the second of a grid ends at 65535, and blocks of one row may be more.
    tiles = triton.cdiv(scales.shape[1], tile["BLOCKS"]) * triton.cdiv(n, tile["ROWS"])
    _fp8_kernel[(tiles,)](
        source.view(torch.int32),
        scales.view(torch.uint8),
        target.view(torch.int64),
        nan_codes,
        n,
        source.shape[1] // 4,
        scales.shape[1],
        BLOCK_ROWS=bn,
        **tile,
        COUNT=nan_codes is not None,
        num_warps=FP8_WARPS,
    )
    if k % 4:
        out.view(torch.int16).copy_(target[:, :k])
    return out


def fp8_tile(block: tuple[int, int], grid_columns: int) -> dict[str, int]:
    """Return the tile for blocks of (bn, bk) codes: rows, blocks side by side, words of a block."""
    rows = min(block[0], FP8_ROWS)
    blocks = max(1, min(FP8_TILE // (rows * block[1]), triton.next_power_of_2(grid_columns)))
    return {"ROWS": rows, "BLOCKS": blocks, "WORDS": block[1] // 4}


def repack_tile(groups: int) -> dict[str, int]:
    """Return the tile for rows of so many groups, a power of two: whole rows."""
    return {"ROWS": max(1, REPACK_BYTES // (64 * groups)), "GROUPS": groups}


def repack_warps(tile: dict[str, int]) -> int:
    """Return the warps of a tile of `repack_tile`."""
    return max(1, 64 * tile["ROWS"] * tile["GROUPS"] // REPACK_BYTES)


@triton.jit
def _fp8_kernel(
    codes,
    scales,
    out,
    nan_codes,
    n,
    words,
    grid_columns,
    BLOCK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Decode a tile of ROWS x BLOCKS x WORDS words of four codes that lies in one row of blocks."""
    across = tl.cdiv(grid_columns, BLOCKS)
    first_row = tl.program_id(0) // across * ROWS
    block = tl.program_id(0) % across * BLOCKS + tl.arange(0, BLOCKS)
    row = (first_row + tl.arange(0, ROWS))[:, None, None]
    column = (block[:, None] * WORDS + tl.arange(0, WORDS)[None, :])[None, :, :]
    grid_row = first_row // BLOCK_ROWS
    scale = tl.load(scales + grid_row * grid_columns + block, mask=block < grid_columns, other=127)
    scale = scale.to(tl.int32)
    place = row.to(tl.int64) * words + column
    inside = (row < n) & (column < words)
    x = tl.load(codes + place, mask=inside, other=0)
    # Magnitude 0x7F, which is NaN, carries into the top bit of its byte.
    nan = ((x & 0x7F7F7F7F) + 0x01010101).to(tl.uint32, bitcast=True) & 0x80808080
    odd_scales = tl.max(((scale < 3) | (scale > 134)).to(tl.int32), 0)
    odd = tl.max(tl.max(tl.max((nan != 0).to(tl.int32), 2), 1), 0) | odd_scales
    scale = scale[None, :, None]
    if odd == 0:
        # One exact product: 2^(byte - 7), because the fields in FP32 stand for the value times 2^-120.
        factor = ((scale + 120) << 23).to(tl.float32, bitcast=True)
        low = _exact(x, 0, factor) >> 16 | (_exact(x, 1, factor) & 0xFFFF0000)
        high = _exact(x, 2, factor) >> 16 | (_exact(x, 3, factor) & 0xFFFF0000)
    else:
        low = _rounded(x, 0, scale) | (_rounded(x, 1, scale) << 16)
        high = _rounded(x, 2, scale) | (_rounded(x, 3, scale) << 16)
        if COUNT:
            total = (nan >> 7 & 1) + (nan >> 15 & 1) + (nan >> 23 & 1) + (nan >> 31)
            tl.atomic_add(nan_codes, tl.sum(tl.sum(tl.sum(total.to(tl.int32), 2), 1), 0))
    tl.store(out + place, low.to(tl.int64) | (high.to(tl.int64) << 32), mask=inside)


@triton.jit
def _fields(x, i: tl.constexpr):
    """Return the fields of code `i` of a word at their places in FP32, which give its value times 2^-120."""
    return ((x << (24 - 8 * i)) >> 4).to(tl.uint32, bitcast=True) & 0x87F00000


@triton.jit
def _exact(x, i: tl.constexpr, factor):
    value = _fields(x, i).to(tl.float32, bitcast=True) * factor
    return value.to(tl.uint32, bitcast=True)


@triton.jit
def _rounded(x, i: tl.constexpr, scale):
    """Return the BF16 bits of code `i`, rounded to nearest even, in the lower half of a word."""
    # 2^(byte - 127) as FP32: byte 0 is the subnormal 2^-127. Both products are exact or infinite.
    factor = tl.where(scale == 0, 0x00400000, scale << 23).to(tl.float32, bitcast=True)
    value = _fields(x, i).to(tl.float32, bitcast=True) * 1.329227995784916e36 * factor
    bits = value.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    code = (x >> (8 * i)).to(tl.uint32, bitcast=True)
    no_number = ((code & 0x7F) == 0x7F) | (scale == 255)
    return tl.where(no_number, (code & 0x80) << 8 | 0x7FC0, bits)


def repack_mxfp4(
    packed: Tensor, scale: Tensor, *, out: Int8Shift | None = None, figures: RepackFigures | None = None
) -> Int8Shift:
    """Repack MXFP4 weights to INT8_SHIFT; the bits of `kernels_ref.convert.repack_mxfp4`.

    Args:
        packed: [..., N, K / 2] uint8 or int8, contiguous; the low nibble holds the even k.
        scale: [..., N, K / 32] uint8 or float8_e8m0fnu, contiguous. With a byte of 255 the result means
            nothing.
        out: Contiguous tensors to be written; new ones by default.
        figures: Also say what was met; its `exponents` have one column for each row of `packed`.

    Returns:
        `out`: codes [..., N, ceil(K / 128) * 64], shift2 [..., N, ceil(K / 128)], channel_scale [..., N].

    Raises:
        ValueError: `scale` is not the grid of `packed`, or a tensor of another dtype or layout.
    """
    sizes = (None,) * max(packed.dim(), 2)
    expect("packed", packed, (torch.uint8, torch.int8), sizes, gaps="nowhere")
    expect("scale", scale, (torch.uint8, torch.float8_e8m0fnu), sizes, gaps="nowhere")
    n, k = MXFP4.logical_shape((packed.shape[-2], packed.shape[-1]))
    if k % 32 or tuple(scale.shape) != (*packed.shape[:-2], *MXFP4.grid((n, k))):
        raise ValueError(f"scale must be the grid of packed {list(packed.shape)}, got {list(scale.shape)}")
    lead, groups = packed.shape[:-1], INT8_SHIFT.groups(k)
    if out is None:
        device = packed.device
        out = Int8Shift(
            torch.empty(*lead, groups * 64, dtype=torch.uint8, device=device),
            torch.empty(*lead, groups, dtype=torch.uint8, device=device),
            torch.empty(*lead, dtype=torch.float32, device=device),
        )
    rows = lead.numel()
    if not rows or not k:
        return out
    tile = repack_tile(triton.next_power_of_2(groups))
    _repack_kernel[(triton.cdiv(rows, tile["ROWS"]),)](
        packed.view(torch.int32),
        scale.view(torch.uint8),
        out.codes.view(torch.int64),
        out.shift2,
        out.channel_scale.view(torch.int32),
        figures.exponents if figures else None,
        figures.counts if figures else None,
        rows,
        k // 32,
        groups,
        **tile,
        FIGURES=figures is not None,
        num_warps=repack_warps(tile),
        maxnreg=REPACK_REGISTERS[figures is not None],
    )
    if figures is not None:
        figures.add_blocks(packed, scale)
    return out


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _repack_kernel(
    packed,
    scales,
    codes,
    shift2,
    channel_scale,
    exponents,
    counts,
    n,
    blocks,
    groups,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    FIGURES: tl.constexpr,
):
    """Repack ROWS whole rows; a word holds eight codes, a block is four words, a group four blocks."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    alive = row < n
    place = row.to(tl.int64)
    word = tl.arange(0, GROUPS * 16)
    inside = alive[:, None] & (word[None, :] < blocks * 4)
    x = tl.load(packed + place[:, None] * (blocks * 4) + word[None, :], mask=inside, other=0)
    x = x.to(tl.uint32, bitcast=True)
    block = tl.arange(0, GROUPS * 4)
    within = alive[:, None] & (block[None, :] < blocks)
    scale = tl.load(scales + place[:, None] * blocks + block[None, :], mask=within, other=0).to(tl.int32)

    magnitude = x & 0x77777777
    # Per code: bits 0..2 of the magnitude, and bit 3 for a code of 6 or 7, which are 4 and 6.
    marks = magnitude | (((magnitude & (magnitude << 1)) & 0x44444444) << 1)
    marks = tl.reduce(tl.reshape(marks, (ROWS, GROUPS * 4, 4)), 2, _or)
    marks = marks | (marks >> 16)
    marks = marks | (marks >> 8)
    marks = (marks | (marks >> 4)) & 15
    present = (marks & 7) != 0
    spare = tl.where(marks >= 8, 0, tl.where(marks >= 4, 1, tl.where(marks >= 2, 2, 3)))
    e_max = tl.max(tl.where(present, scale - spare, -9), 1)
    delta = e_max[:, None] - scale
    shift = tl.where(present, tl.minimum(tl.maximum(3 - delta, 0), 3), 0)

    # Magnitude plus seven has bit 3 set where the code is not zero, which is where the sign may stay.
    y = magnitude | (x & ((magnitude + 0x77777777) & 0x88888888))
    special = present & ((delta < 0) | (delta > 3))
    if tl.max(tl.max(special.to(tl.int32), 1), 0) > 0:
        table = tl.where(special, remapping(delta), 0x76543210)
        y = _remap(tl.reshape(y, (ROWS, GROUPS * 4, 4)), table[:, :, None])
        y = tl.reshape(y, (ROWS, GROUPS * 16))

    # A stored word takes half a word of either half of its group.
    halves = tl.permute(tl.reshape(y, (ROWS, GROUPS, 2, 8)), (0, 1, 3, 2))
    low, high = tl.split(halves)
    even = (low & 0xFFFF) | (high << 16)
    odd = (low >> 16) | (high & 0xFFFF0000)
    pair = even.to(tl.int64) | (odd.to(tl.int64) << 32)
    group = tl.arange(0, GROUPS)
    double = tl.reshape(group[:, None] * 8 + tl.arange(0, 8)[None, :], (GROUPS * 8,))
    stored = alive[:, None] & (double[None, :] < groups * 8)
    pair = tl.reshape(pair, (ROWS, GROUPS * 8))
    tl.store(codes + place[:, None] * (groups * 8) + double[None, :], pair, mask=stored)

    fields = tl.reshape(shift << (2 * (block[None, :] & 3)), (ROWS, GROUPS, 4))
    of_group = alive[:, None] & (group[None, :] < groups)
    tl.store(shift2 + place[:, None] * groups + group[None, :], tl.sum(fields, 2).to(tl.uint8), mask=of_group)
    top = tl.max(tl.where(present, scale + 1, 0), 1)
    # 2^(e_max - 131), a subnormal below e_max = 5.
    bits = tl.where(e_max >= 5, (e_max - 4) << 23, 1 << (tl.minimum(e_max, 4) + 18))
    tl.store(channel_scale + place, tl.where(top > 0, bits, 0), mask=alive)
    if FIGURES:
        lowest = tl.min(tl.where(present, scale + 1, 256), 1)
        tl.store(exponents + place, tl.where(top > 0, e_max + 1, 0).to(tl.int16), mask=alive)
        tl.store(exponents + n + place, top.to(tl.int16), mask=alive)
        tl.store(exponents + 2 * n + place, lowest.to(tl.int16), mask=alive)
        zeros = tl.sum(tl.sum((within & (present == 0)).to(tl.int32), 1), 0)
        if zeros > 0:
            tl.atomic_add(counts, zeros.to(tl.int64))


@triton.jit
def _remap(words, table):
    result = words & 0
    for i in tl.static_range(0, 32, 4):
        new = (table >> ((words >> i & 7).to(tl.int32) * 4)) & 7
        sign = tl.where(new > 0, words >> i & 8, 0)
        result = result | (new.to(tl.uint32, bitcast=True) | sign) << i
    return result
