"""The indexer in INT8: 64 query heads against one key head of 128, weighted ReLU, one score per key.

SGLang's control flow is that of FP8; a query row, like a key row, is 128 bytes and one F32 scale, and the
scale of the query is folded into its head's weight.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, Final

from torch import Tensor

from dsv4convert.runtime import ops, settings
from dsv4convert.runtime.patches.kv import as_pairs

_LOG: Final = logging.getLogger("dsv4convert.runtime")


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


def split_queries(stock: Any, module: ModuleType) -> Callable[..., None]:
    """I3: in a long prefill, let each rank of the attention group score and select for its queries only.

    Rank r of n takes queries r, r + n, ...: later queries of a prompt see more keys, so that halves would
    not be equal work. It scores them against all keys and has SGLang select; then the places are gathered.
    Queries are projected on every rank, because a matrix product of fewer rows may round otherwise; what
    follows works row by row. So the places are those of one rank that does everything.
    """

    least, told = settings.least_scores(), False

    def forward_c4_indexer(
        self: Any,
        x: Tensor,
        q_lora: Tensor,
        c4_indexer: Any,
        forward_batch: Any,
        alt_streams: Any = None,
        enable_multi_stream: bool = False,
        q_lora_ready: Any = None,
        skip_compressor: bool = False,
    ) -> None:
        scores = 0 if enable_multi_stream else _scores(self, module, forward_batch, len(x), len(q_lora))
        if scores < least:
            stock(
                self,
                x,
                q_lora,
                c4_indexer,
                forward_batch,
                alt_streams=alt_streams,
                enable_multi_stream=enable_multi_stream,
                q_lora_ready=q_lora_ready,
                skip_compressor=skip_compressor,
            )
            return
        nonlocal told
        if not told:
            told = True
            _LOG.info("index queries of a prefill are split: %s tokens, %s scores", len(x), scores)
        core = self.forward_metadata.core_metadata
        prepared = self._forward_prepare_normal(
            x=x,
            q_lora=q_lora,
            c4_indexer=c4_indexer,
            positions=core.positions,
            forward_batch=forward_batch,
            skip_compressor=skip_compressor,
        )
        group = attention_group()
        mine = slice(group.rank_in_group, len(x), group.world_size)
        places = core.c4_sparse_page_indices
        # As many rows on every rank; what the last ones lack stays -1 and is cut off.
        found = places.new_full((-(-len(x) // group.world_size), places.shape[1]), -1)
        rows = x[mine]
        if len(rows):
            view = _view(self, mine, prepared, found[: len(rows)])
            stock(view, rows, q_lora[mine], c4_indexer, forward_batch, skip_compressor=True)
        gathered = found.new_empty(group.world_size, *found.shape)
        group.all_gather_into_tensor(gathered.flatten(0, 1), found)
        places.copy_(gathered.transpose(0, 1).flatten(0, 1)[: len(x)])

    return forward_c4_indexer


def attention_group() -> Any:
    """Return the ranks that compute attention for the same tokens, SGLang's `GroupCoordinator`."""
    from sglang.srt.distributed.parallel_state import get_attn_tp_group

    return get_attn_tp_group()


def _scores(backend: Any, module: Any, batch: Any, tokens: int, queries: int) -> int:
    """Return the scores of a step, 0 if it cannot be split.

    Only what all ranks know alike may enter: one that decided otherwise would leave the others waiting.
    """
    if not (batch.forward_mode.is_extend_without_speculative() and attention_group().world_size > 1):
        return 0
    metadata = backend.forward_metadata
    core, indexer = metadata.core_metadata, metadata.indexer_metadata
    known = (core.positions, core.c4_sparse_page_indices, indexer.c4_seq_lens, indexer.page_table)
    is_plain = tokens == queries and all(len(rows) == tokens for rows in known)
    is_graph = (
        indexer.use_prefill_cuda_graph
        or module.is_in_tc_piecewise_cuda_graph()
        or module.is_in_breakable_cuda_graph()
    )
    # SGLang would hand the places of all tokens to whoever looks at them here.
    is_watched = backend.debug_use_external_c4_sparse_indices or module.get_global_indexer_capturer()
    found: int = tokens * indexer.max_c4_seq_len
    return found if is_plain and not is_graph and not is_watched else 0


def _view(backend: Any, mine: slice, prepared: tuple[Tensor, Tensor], found: Tensor) -> Any:
    """Return a backend that knows the queries `mine` only, and writes their places to `found`."""
    queries, weights = prepared
    metadata = backend.forward_metadata
    core, indexer = copy.copy(metadata.core_metadata), metadata.indexer_metadata
    lengths = indexer.c4_seq_lens[mine].contiguous()
    indexer = replace(indexer, c4_seq_lens=lengths, page_table=indexer.page_table[mine])
    core.page_table, core.c4_sparse_page_indices = indexer.page_table, found
    # Places in the request are for a prefill kernel that SM80 does not have.
    core.c4_sparse_raw_indices = None
    view = copy.copy(backend)
    view.forward_metadata = SimpleNamespace(core_metadata=core, indexer_metadata=indexer)
    view._forward_prepare_normal = lambda **_: (queries[mine].contiguous(), weights[mine])
    return view
