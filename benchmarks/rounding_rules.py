"""What three ways to bring MXFP4 rows to one scale per row lose: ``python benchmarks/rounding_rules.py``.

Matrices are drawn, quantised to MXFP4 and repacked; errors are relative (root of squares) to the MXFP4
weights, not to what was drawn. The first rule is that of `convert`, run through its own code; the others are
written here from their description. The table of ``docs/rounding.md`` is what this prints.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dsv4convert.formats.codes import E2M1, pack_e2m1
from dsv4convert.formats.int8_shift import codes_shape, decode_int8_shift
from dsv4convert.formats.repack import Repacker

ROWS, K, BLOCK = 1024, 4096, 32
Floats = NDArray[np.float64]
U8 = NDArray[np.uint8]
GRID = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float64)


def gaussian(rng: np.random.Generator) -> Floats:
    """All weights of one size."""
    return rng.standard_normal((ROWS, K))


def spread_blocks(rng: np.random.Generator) -> Floats:
    """Blocks of 32 whose size varies by 2^N(0, 1)."""
    size = np.exp2(rng.standard_normal((ROWS, K // BLOCK)))
    return rng.standard_normal((ROWS, K)) * np.repeat(size, BLOCK, axis=1)


def heavy_tails(rng: np.random.Generator) -> Floats:
    """Student's t with three degrees of freedom."""
    return rng.standard_t(3, (ROWS, K))


def stale_scales(rng: np.random.Generator) -> Floats:
    """Gaussian; `mxfp4` gives one all-zero block of each row a scale byte that is 8 too large."""
    weights = rng.standard_normal((ROWS, K))
    weights[:, :BLOCK] = 0
    return weights


def mxfp4(weights: Floats) -> tuple[U8, U8]:
    """Quantise: per block the smallest power of two that reaches the largest weight, nearest even code."""
    blocks = weights.reshape(ROWS, -1, BLOCK)
    largest = np.abs(blocks).max(axis=2)
    exponent = np.ceil(np.log2(np.maximum(largest, 1e-30) / 6))
    exponent[largest == 0] = exponent[largest > 0].max() + 8
    scaled = np.abs(blocks) / np.exp2(exponent)[:, :, None]
    distance = np.abs(scaled[..., None] - E2M1[:8])
    # Of two equally near codes the even one.
    codes = np.lexsort((np.broadcast_to(np.arange(8) & 1, distance.shape), distance))[..., 0]
    codes = codes | np.where((blocks < 0) & (codes > 0), 8, 0)
    return codes.reshape(ROWS, K).astype(np.uint8), (exponent + 127).astype(np.uint8)


def ours(codes: U8, scales: U8) -> Floats:
    """Effective exponents, zero blocks do not count, one rounding: `convert`."""
    out = np.empty(codes_shape(ROWS, K), np.uint8), np.empty((ROWS, K // 128), np.uint8)
    channel = np.empty(ROWS, np.float32)
    Repacker(K).repack(pack_e2m1(codes), scales, *out, channel)
    return decode_int8_shift(*out, K) * channel[:, None].astype(np.float64)


def row_maximum(codes: U8, scales: U8, twice: Callable[[Floats], Floats] | None) -> Floats:
    """The largest scale byte of the row, every block counted; rounded once, or to an integer first."""
    top = scales.max(axis=1).astype(np.int64)
    delta = np.repeat(top[:, None] - scales, BLOCK, axis=1)
    target = np.abs(E2M1[codes]) * 2 * np.exp2(3.0 - np.maximum(delta, 3))
    if twice:
        target = np.where(delta > 3, twice(target), target)
    nearest = np.searchsorted((GRID[1:] + GRID[:-1]) / 2, target, side="left")  # ties to the smaller
    shift = np.clip(3 - delta, 0, 3)
    sign = np.where(codes & 8, -1, 1)
    return sign * GRID[nearest] * np.exp2(shift) * np.exp2(top - 131.0)[:, None]


def plain_int8(codes: U8, scales: U8) -> Floats:
    """No shifts at all: each row to 255 integers, scale = largest weight / 127."""
    weights = decoded(codes, scales)
    scale = np.abs(weights).max(axis=1, keepdims=True) / 127
    return np.rint(weights / scale) * scale


def decoded(codes: U8, scales: U8) -> Floats:
    """Return the MXFP4 weights."""
    return E2M1[codes] * np.exp2(np.repeat(scales, BLOCK, axis=1) - 127.0)


RULES: dict[str, Callable[[U8, U8], Floats]] = {
    "ours: nearest once": ours,
    "row maximum, nearest once": lambda c, s: row_maximum(c, s, None),
    "row maximum, twice, half up": lambda c, s: row_maximum(c, s, lambda t: np.floor(t + 0.5)),
    "row maximum, twice, half even": lambda c, s: row_maximum(c, s, np.rint),
    "INT8 by row, no shifts": plain_int8,
}


def main(seed: int) -> None:
    """Print one row per rule and one column per kind of matrix: error, and share of changed weights."""
    kinds = (gaussian, spread_blocks, heavy_tails, stale_scales)
    print(f"{'relative error (changed weights)':32}" + "".join(f"{k.__name__:>20}" for k in kinds))
    made = {k.__name__: mxfp4(k(np.random.default_rng(seed))) for k in kinds}
    for name, rule in RULES.items():
        cells = []
        for codes, scales in made.values():
            weights, found = decoded(codes, scales), rule(codes, scales)
            error = np.sqrt(((found - weights) ** 2).sum() / (weights**2).sum())
            cells.append(f"{error:.2e} ({(found != weights).sum() / (weights != 0).sum():.2%})")
        print(f"{name:32}" + "".join(f"{c:>20}" for c in cells))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seed", type=int, nargs="?", default=0, help="of what is drawn; default 0")
    main(parser.parse_args().seed)
