"""The shipped configurations of `kernels_ref.sm80.attention`."""

from __future__ import annotations

from typing import Any

from kernels_ref.sm80 import attention
from tests.kernels.case import BF16_MMA, Case

_ATTEND = {
    **dict.fromkeys(("Q", "C1", "C2", "OUT"), "*bf16"),
    **dict.fromkeys(("I1", "L1", "I2", "L2"), "*i32"),
    **dict.fromkeys(("SINK", "PARTIAL", "STATS"), "*fp32"),
    "scale": "fp32",
    **dict.fromkeys(("heads", "splits", "q_row", "q_head", "o_row", "o_head"), "i32"),
    **dict.fromkeys(("width1", "row1", "width2", "row2"), "i32"),
}
_MULTIPLES = {"q_row", "q_head", "o_row", "o_head"}


def _attend(two: bool, groups: int, split: bool) -> Case:
    values: dict[str, Any] = {"TWO": two, "SPLIT": split, "GROUPS": groups, "H": attention.HEADS}
    values |= {"D": 512, "KEYS": attention.KEYS, "STAGES": 3, "UP": False}
    sources, keys = "two sources" if two else "one source", ", split" if split else ""
    return Case(
        f"sparse_attention {attention.HEADS * groups} heads, {sources}{keys}",
        attention._attend,
        _ATTEND,
        values,
        _MULTIPLES,
        num_warps=4,
        mma=frozenset({BF16_MMA}),
    )


CASES = [
    *(_attend(two, groups, split) for two in (False, True) for groups in (1, 4) for split in (False, True)),
    Case(
        "sparse_attention join",
        attention._join,
        {
            **dict.fromkeys(("PARTIAL", "STATS", "SINK"), "*fp32"),
            "OUT": "*bf16",
            **dict.fromkeys(("heads", "splits", "o_row", "o_head"), "i32"),
        },
        {"MOST": 32, "STEP": 8, "D": 512},
        {"o_row", "o_head"},
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
        num_warps=2,
    ),
]
