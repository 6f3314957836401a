"""The indexer in INT8: 64 query heads against one key head of 128, weighted ReLU, one score per key.

SGLang's control flow is that of FP8; a query row, like a key row, is 128 bytes and one F32 scale, and the
scale of the query is folded into its head's weight.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from dsv4convert.runtime import ops
from dsv4convert.runtime.patches.kv import as_pairs


def quantize_queries(stock: Any, module: ModuleType) -> Callable[..., tuple[Tensor, Tensor]]:
    """I1: rotary embedding, Hadamard transform and INT8 of queries, [T, 64, 128]; weights [T, 64, 1] f32."""

    def fused_q_indexer_rope_hadamard_quant(
        q_input: Tensor,
        weight: Tensor,
        weight_scale: float,
        freqs_cis: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        tokens, heads, _ = q_input.shape
        codes, scaled = ops.kernel("quantize_index_queries", q_input.device)(
            q_input, weight.view(tokens, heads), weight_scale, as_pairs(freqs_cis), positions[:tokens]
        )
        return codes, scaled

    return fused_q_indexer_rope_hadamard_quant


def logits(stock: Any, module: ModuleType) -> Callable[..., Tensor]:
    """I2: scores [T, max_seq_len] f32 of every key of a request; top-k reads none beyond its length."""

    def fp8_paged_mqa_logits_torch(
        q_fp8: Tensor,
        kvcache_fp8: Tensor,
        weight: Tensor,
        seq_lens: Tensor,
        page_table: Tensor,
        deep_gemm_metadata: Any,
        max_seq_len: int,
        clean_logits: bool = True,
    ) -> Tensor:
        tokens = q_fp8.shape[0]
        found: Tensor = ops.kernel("index_logits", q_fp8.device)(
            q_fp8[:, 0],
            kvcache_fp8.view(len(kvcache_fp8), -1),
            weight.view(tokens, -1),
            # The caller has a row per token; what it was written for had a vector.
            seq_lens.reshape(tokens),
            page_table,
            max_seq_len,
            clean=clean_logits,
        )
        return found

    return fp8_paged_mqa_logits_torch
