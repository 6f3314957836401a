"""Bytes of tensors that look like a release: drawn at random, with the statistics of real 0731 weights.

E8M0 bytes of experts are 120..122 with a row span of 1 or 2, of dense weights 115..117; router biases are
near 8.7; all sixteen E2M1 codes occur, negative zero among them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4convert.formats.spec import Shape, nbytes
from dsv4convert.geometry import Geometry
from dsv4convert.names import Unit
from dsv4convert.table import Role, Storage

Bytes = NDArray[np.uint8]

_STRIP = 8 << 20
_POOL = 1 << 20


def tensor_bytes(
    name: str, shape: Shape, unit: Unit, g: Geometry, seed: int, varied: bool
) -> Iterator[Bytes]:
    """Yield the bytes of one tensor in strips.

    Args:
        name: Its name; values depend on it and on the seed alone.
        shape: Its shape.
        unit: The tensor in the table of the release.
        g: Geometry of the model.
        seed: Any number.
        varied: Let scales vary more, and some rows of experts so much that a repack to INT8 has to round.
    """
    rng = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
    storage = unit.row.storage
    if storage is not Storage.PLAIN and name.endswith(".scale"):
        yield _scale_bytes(rng, shape, storage, varied)
        return
    if storage is Storage.EXPERT_MXFP4:
        yield from _from_pool(rng, _e2m1_pool(), nbytes("I8", shape))
        return
    if storage is not Storage.PLAIN:
        yield from _from_pool(rng, _e4m3_pool(), nbytes("F8_E4M3", shape))
        return
    if name.endswith(".tid2eid"):
        yield _as_bytes(np.argsort(rng.random((shape[0], g.experts)), axis=1)[:, : shape[1]].astype("<i8"))
        return
    yield from _float_values(rng, shape, unit)


def _from_pool(rng: np.random.Generator, pool: Bytes, size: int) -> Iterator[Bytes]:
    # A random rotation of a fixed pool: fast, and no two tensors are alike.
    while size > 0:
        strip = np.roll(pool, -32 * int(rng.integers(len(pool) // 32)))[: min(size, _STRIP)]
        yield strip
        size -= len(strip)


@cache
def _e2m1_pool() -> Bytes:
    """Packed E2M1 codes of Gaussian blocks of 32, each divided by the power of two at or above amax / 6."""
    rng = np.random.Generator(np.random.PCG64(2))
    x = rng.standard_normal((2 * _POOL // 32, 32)).astype(np.float32)
    scale = np.exp2(np.ceil(np.log2(np.abs(x).max(axis=1, keepdims=True) / 6)))
    magnitude = np.searchsorted([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.abs(x / scale)).astype(np.uint8)
    codes = (magnitude | (np.signbit(x) << 3).astype(np.uint8)).reshape(-1)
    packed: Bytes = codes[0::2] | codes[1::2] << 4
    return packed


@cache
def _e4m3_pool() -> Bytes:
    """E4M3 codes of Gaussian values whose largest are near 448."""
    rng = np.random.Generator(np.random.PCG64(3))
    x = rng.standard_normal(_POOL).astype(np.float32) * 100
    codes = np.arange(127, dtype=np.float64)
    exponent = codes // 8
    table = np.where(exponent == 0, codes * 2.0**-9, (1 + codes % 8 / 8) * np.exp2(exponent - 7))
    magnitude = np.searchsorted((table[:-1] + table[1:]) / 2, np.abs(x)).astype(np.uint8)
    result: Bytes = magnitude | (np.signbit(x) << 7).astype(np.uint8)
    return result


def _scale_bytes(rng: np.random.Generator, shape: Shape, storage: Storage, varied: bool) -> Bytes:
    if storage is Storage.EXPERT_MXFP4:
        scales = np.full(shape, 121, np.uint8)
        draw = rng.random(shape, dtype=np.float32)
        scales -= draw < 0.3167
        scales += draw > 0.999
        if varied and rng.random() < 0.25:
            # A few rows of some experts are wide enough that the INT8 repack has to round.
            wide = rng.random(shape[0]) < 0.05
            scales[wide] -= rng.integers(0, 9, (int(wide.sum()), shape[1]), dtype=np.uint8)
        return _as_bytes(scales)
    low, high = (112, 121) if varied else (115, 118)
    return _as_bytes(rng.integers(low, high, shape, dtype=np.uint8))


def _float_values(rng: np.random.Generator, shape: Shape, unit: Unit) -> Iterator[Bytes]:
    center, width = _statistics(unit)
    rows, cols = shape[0], int(np.prod(shape[1:], dtype=np.int64))
    step = max(1, _STRIP // (4 * cols))
    for row in range(0, rows, step):
        x = rng.standard_normal((min(step, rows - row), cols), dtype=np.float32) * np.float32(
            width
        ) + np.float32(center)
        if unit.row.dtype == "BF16":
            yield _as_bytes((x.view(np.uint32) >> 16).astype("<u2"))
        else:
            yield _as_bytes(x.astype("<f4"))


def _statistics(unit: Unit) -> tuple[float, float]:
    """Return (mean, standard deviation) of a plain tensor."""
    if unit.row.role is Role.NORM or unit.base.endswith(("norm.weight", "norm1.weight", "norm2.weight")):
        return 1.0, 0.1
    if unit.base.endswith((".bias", ".bias_vl")) and unit.row.role is Role.ROUTER:
        return 8.7, 0.1
    if unit.row.role is Role.HYPER_CONNECTION:
        return 0.0, 0.02 if unit.base.endswith("_fn") else 0.5
    return 0.0, 0.02 if unit.row.dtype == "BF16" else 0.2


def _as_bytes(array: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
