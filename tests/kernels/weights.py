"""Quantised weights that hold every way a conversion can go, as torch tensors."""

from __future__ import annotations

import torch
from torch import Tensor

#: (N, K, block): whole and partial blocks, words that are not whole, a single code.
FP8_SHAPES = [
    (128, 256, (128, 128)),
    (130, 516, (128, 128)),
    (72, 100, (32, 32)),
    (3, 288, (1, 32)),
    (33, 131, (32, 32)),
    (1, 1, (128, 128)),
]

#: (N, K): one block, groups with 1 to 4 blocks in the last, widths that are no power of two.
MXFP4_SHAPES = [(1, 32), (7, 96), (5, 128), (9, 160), (6, 448), (3, 1216)]


def every_fp8_product(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return codes [128, 512] and scales [16, 16] of 8 x 32 blocks: each code once under each scale byte."""
    scales = torch.randperm(256, generator=generator).to(torch.uint8).reshape(16, 16)
    blocks = torch.stack([torch.randperm(256, generator=generator) for _ in range(256)]).to(torch.uint8)
    codes = blocks.reshape(16, 16, 8, 32).permute(0, 2, 1, 3)
    return codes.reshape(128, 512).contiguous(), scales


def fp8(shape: tuple[int, int], block: tuple[int, int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random codes without NaN, and scale bytes as in official releases."""
    n, k = shape
    codes = torch.randint(0, 256, (n, k), generator=generator, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    grid = -(-n // block[0]), -(-k // block[1])
    return codes, torch.randint(110, 125, grid, generator=generator, dtype=torch.uint8)


def mxfp4(
    n: int, k: int, generator: torch.Generator, low: int = 110, high: int = 124
) -> tuple[Tensor, Tensor]:
    """Return packed codes and scales with blocks of zeros, of small codes and of zeros of both signs.

    Scale bytes lie in low..high; a span above 3 makes blocks round. Row 0 is all zeros, of both signs.
    """
    codes = torch.randint(0, 16, (n, k // 32, 32), generator=generator, dtype=torch.uint8)
    # The largest magnitude of a block decides how often it can be doubled: draw that too.
    largest = torch.randint(0, 8, (n, k // 32, 1), generator=generator, dtype=torch.uint8)
    codes = (codes & 8) | torch.minimum(codes & 7, largest)
    codes[0] &= 8
    codes = codes.reshape(n, k)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    scales = torch.randint(low, high + 1, (n, k // 32), generator=generator, dtype=torch.uint8)
    return packed.contiguous(), scales
