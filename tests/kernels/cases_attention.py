"""The shipped configurations of `kernels_ref.sm80.attention`."""

from __future__ import annotations

from typing import Any

from kernels_ref.sm80 import attention
from kernels_ref.sm80.tiles import ATTENTION, Walk
from tests.kernels.case import BF16_MMA, Case

_ATTEND = {
    **dict.fromkeys(("Q", "C1", "C2", "OUT"), "*bf16"),
    **dict.fromkeys(("I1", "L1", "I2", "L2"), "*i32"),
    **dict.fromkeys(("SINK", "STATS"), "*fp32"),
    "PARTIAL": "*fp16",
    "scale": "fp32",
    **dict.fromkeys(("heads", "groups", "splits", "q_row", "q_head", "o_row", "o_head"), "i32"),
    **dict.fromkeys(("width1", "row1", "width2", "row2"), "i32"),
}


def _attend(two: bool, split: bool, walk: Walk) -> Case:
    sources, keys = "two sources" if two else "one source", ", split" if split else ""
    values: dict[str, Any] = {"TWO": two, "SPLIT": split, "H": attention.HEADS, "D": 512}
    return Case(
        f"sparse_attention of {sources}{keys}, {walk.tiles}x{walk.slices} s{walk.stages}",
        attention._attend,
        _ATTEND,
        values
        | {"KEYS": attention.KEYS, "TILES": walk.tiles, "STAGES": walk.stages, "SLICES": walk.slices}
        | {"UP": False},
        {"q_row", "q_head", "o_row", "o_head"},
        num_warps=4,
        mma=frozenset({BF16_MMA}),
    )


CASES = [
    *(
        _attend(two, split, walk)
        for two in (False, True)
        for split in (False, True)
        for walk in dict.fromkeys(plan.split if split else plan.whole for plan in ATTENTION)
    ),
    *(
        Case(
            f"sparse_attention join of up to {most}",
            attention._join,
            {
                **dict.fromkeys(("STATS", "SINK"), "*fp32"),
                **{"PARTIAL": "*fp16", "OUT": "*bf16"},
                **dict.fromkeys(("heads", "splits", "o_row", "o_head"), "i32"),
            },
            {"MOST": most, "D": 512},
            {"o_row", "o_head"},
            num_warps=warps,
        )
        for most, warps in ((4, 1), (32, 4))
    ),
    Case(
        "store_kv",
        attention._store_kv,
        {
            **{"KV": "*bf16", "WEIGHT": "*bf16", "FREQS": "*fp32", "POSITIONS": "*i64", "SLOTS": "*i32"},
            **{"CACHE": "*bf16", "tokens": "i32", "eps": "fp32", "kv_row": "i32"},
        },
        {"R": 1, "D": 512, "ROPE": 64},
        {"kv_row"},
        num_warps=1,
    ),
]
