"""Sparse attention without FlashMLA: one kernel for decode, prefill and verification.

SGLang has a branch for cards without FlashMLA, made for SM120: no scheduling metadata, no prefill kernel of
its own, one call for all. A1 takes it, A2 is what it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dsv4convert.runtime import ops
from dsv4convert.runtime.patches.kv import ROW


def without_flash_mla(stock: Any, module: ModuleType) -> bool:
    """A1: take the branch."""
    return True


def sparse(stock: Any, module: ModuleType) -> Callable[..., tuple[Tensor, None]]:
    """A2: attention over the window and the rows selected from a compressed pool."""

    def flash_mla_with_kvcache_sm120(
        *,
        q: Tensor,
        k_cache: Tensor,
        head_dim_v: int,
        softmax_scale: float,
        indices: Tensor,
        topk_length: Tensor,
        attn_sink: Tensor,
        extra_k_cache: Tensor | None = None,
        extra_indices_in_kvcache: Tensor | None = None,
        extra_topk_length: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        extra = {}
        if extra_k_cache is not None and extra_indices_in_kvcache is not None:
            extra = {
                "extra_cache": extra_k_cache.view(-1, ROW),
                "extra_indices": extra_indices_in_kvcache[:, 0],
                "extra_lengths": extra_topk_length,
            }
        out: Tensor = ops.kernel("sparse_attention", q.device)(
            q[:, 0], k_cache.view(-1, ROW), indices[:, 0], topk_length, attn_sink, softmax_scale, **extra
        )
        # The second value is the log-sum-exp of FlashMLA, which the caller drops.
        return out[:, None], None

    return flash_mla_with_kvcache_sm120


def local_heads(stock: Any, module: ModuleType) -> Callable[..., Tensor]:
    """A3: cut queries and sinks to the heads of this rank; the caller keeps no others of the result."""

    def forward(
        self: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        compress_ratio: int,
        save_kv_cache: bool = True,
        attn_sink: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        heads = layer.tp_q_head_num
        out: Tensor = stock(
            self,
            q[:, :heads],
            k,
            v,
            layer,
            forward_batch,
            compress_ratio,
            save_kv_cache=save_kv_cache,
            attn_sink=None if attn_sink is None else attn_sink[:heads],
            **others,
        )
        return out

    return forward


def poison(stock: Any, module: ModuleType) -> Callable[..., Tensor]:
    """D1, a test of the rest: NaN in the heads that were padded to, and in the queries of padded tokens.

    Nothing that a client sees may change. Keys that padded tokens write in later layers become NaN by
    themselves; they land in the slot that SGLang keeps for padding.
    """

    def forward(
        self: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        compress_ratio: int,
        save_kv_cache: bool = True,
        attn_sink: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        q[:, layer.tp_q_head_num :] = torch.nan
        slots = forward_batch.out_cache_loc
        if len(slots) != len(q):
            # Steps of a draft share one buffer; each has its part of it here.
            slots = self.forward_metadata.core_attn_metadata.raw_out_loc
        q.masked_fill_(_padded_tokens(slots, len(q))[:, None, None], torch.nan)
        out: Tensor = stock(
            self,
            q,
            k,
            v,
            layer,
            forward_batch,
            compress_ratio,
            save_kv_cache=save_kv_cache,
            attn_sink=attn_sink,
            **others,
        )
        return out

    return forward


def _padded_tokens(slots: Tensor, tokens: int) -> Tensor:
    """Return which tokens pad a batch, [tokens] bool: their keys go to slot 0, which no request ever gets.

    Works on the device, so that a captured graph asks again at every replay. A batch of nothing else is one
    that only warms up.
    """
    padded = slots.new_ones(tokens, dtype=torch.bool)
    known = slots[:tokens] == 0
    padded[: len(known)] = known
    return padded & ~padded.all()
