"""The shipped configurations of `kernels_ref.sm80.indexer`."""

from __future__ import annotations

from kernels_ref.sm80 import indexer
from kernels_ref.sm80.tiles import SCORES
from tests.kernels.case import INT8_MMA, Case

_PLACES = {"FREQS": "*fp32", "POSITIONS": "*i64"}
_PAGE = {"KEYS": 64, "BYTES": 64 * 132}

CASES = [
    *(
        Case(
            f"index_logits{', clean' if clean else ''}, s{stages} w{warps}",
            indexer._logits,
            {
                **{"Q": "*i8", "CODES": "*i8", "SCALES": "*fp32", "WEIGHT": "*fp32"},
                **{"LENGTHS": "*i32", "TABLE": "*i32", "OUT": "*fp32", "max_len": "i32", "share": "i32"},
                **dict.fromkeys(("w_row", "length_row", "table_row", "out_row"), "i32"),
            },
            {"CLEAN": clean, "STAGES": stages, "HEADS": 64, "D": 128, **_PAGE},
            num_warps=warps,
            mma=frozenset({INT8_MMA}),
        )
        for clean in (False, True)
        for warps, stages in dict.fromkeys((plan.warps, plan.stages) for plan in SCORES)
    ),
    Case(
        "store_index_keys",
        indexer._store_keys,
        {
            **{"K": "*fp32", "WEIGHT": "*fp32", **_PLACES, "SLOTS": "*i64", "CODES": "*i8"},
            **{"SCALES": "*fp32", "tokens": "i32", "eps": "fp32", "k_row": "i32"},
        },
        {"R": 4, "D": 128, "BITS": 7, "ROPE": 64, **_PAGE},
        {"k_row"},
        num_warps=1,
    ),
    Case(
        "quantize_index_queries",
        indexer._quantize_queries,
        {
            **{"Q": "*bf16", "WEIGHT": "*bf16", **_PLACES, "CODES": "*i8", "SCALED": "*fp32"},
            **{"weight_scale": "fp32", "q_row": "i32", "q_head": "i32", "w_row": "i32"},
        },
        {"R": 8, "HEADS": 64, "D": 128, "BITS": 7, "ROPE": 64},
        {"q_row", "q_head", "w_row"},
        num_warps=1,
    ),
]
