"""Configurations of the conversion kernels: official blocks and widths."""

from __future__ import annotations

import triton

from kernels_ref.sm80 import convert, figures
from tests.kernels.case import Case


def _fp8(block: tuple[int, int]) -> Case:
    tile = convert.fp8_tile(block, 32)
    return Case(
        f"fp8 {block[0]}x{block[1]}",
        convert._fp8_kernel,
        {
            "codes": "*i32",
            "scales": "*u8",
            "out": "*i64",
            "nan_codes": "*i32",
            "n": "i32",
            "words": "i32",
            "grid_columns": "i32",
        },
        {"BLOCK_ROWS": block[0], **tile, "COUNT": True},
        divisible={"n", "words", "grid_columns"},
        num_warps=convert.FP8_WARPS,
    )


_PACKED = {"packed": "*i32", "scales": "*u8"}
_STORED = {"codes": "*i64", "shift2": "*u8", "channel_scale": "*i32"}
_FIGURES = {"exponents": "*i16", "counts": "*i64"}


def _repack(k: int, counted: bool) -> Case:
    tile = convert.repack_tile(triton.next_power_of_2(-(-k // 128)))
    absent = {} if counted else dict.fromkeys(_FIGURES)
    sizes = {"n": "i32", "blocks": "i32", "groups": "i32"}
    return Case(
        f"repack K={k}{' figures' if counted else ''}",
        convert._repack_kernel,
        _PACKED | _STORED | (_FIGURES if counted else {}) | sizes,
        {**absent, **tile, "FIGURES": counted},
        divisible=set(sizes),
        num_warps=convert.repack_warps(tile),
        maxnreg=convert.REPACK_REGISTERS[counted],
    )


CASES = [
    *map(_fp8, ((128, 128), (32, 32), (1, 32))),
    *(_repack(k, counted) for k in (2048, 4096, 7168) for counted in (False, True)),
    Case(
        "figures",
        figures._figures_kernel,
        _PACKED | _FIGURES | {"total": "i32", "blocks": "i32"},
        {"TILE": figures.FIGURES_TILE},
        divisible={"total", "blocks"},
    ),
]
