"""A BF16 KV cache: rows of 512 numbers in place of 584 bytes of FP8, BF16 and scales.

The sliding window (pages of 256 rows), the ratio-4 pool (64) and the ratio-128 pool (2) are one class. Its
buffers stay two-dimensional, [pages, page * 512], which is what SGLang asserts and slices.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from dsv4convert.runtime import ops
from dsv4convert.runtime.refusal import refusal

#: 448 numbers without and 64 with rotary embedding.
ROW: Final = 512
ROW_BYTES: Final = 2 * ROW
#: A row of the stock pool.
_STOCK_ROW_BYTES: Final = 584
#: An index key: 128 bytes of INT8 and an F32 scale, as many bytes as SGLang's FP8 form.
_INDEX_HEAD, _INDEX_PAGE = 128, 64


def create_buffer(stock: Any, module: ModuleType) -> Callable[..., Tensor]:
    """K1: allocate a pool of BF16 rows."""
    known = module.DeepSeekV4SingleKVPool

    def create_buffer(self: Any, *, num_pages: int) -> Tensor:
        if type(self) is not known:
            problem = "this KV pool of SGLang has no BF16 form"
            raise refusal("shim.option", type(self).__name__, problem, expected="no HiSparse")
        if self.store_dtype is not torch.bfloat16:
            problem = "the kernels read a BF16 KV cache"
            found = str(self.dtype).removeprefix("torch.")
            raise refusal("shim.option", "--kv-cache-dtype", problem, expected="bfloat16", found=found)
        self.kv_cache_total_dim = ROW
        self.bytes_per_page_padded = self.page_size * ROW_BYTES
        return torch.zeros(num_pages, self.page_size * ROW, dtype=torch.bfloat16, device=self.device)

    return create_buffer


def bytes_per_token(stock: Any, module: ModuleType) -> Callable[..., int]:
    """K1b: the size of a row."""

    def get_bytes_per_token(self: Any) -> int:
        return ROW_BYTES

    return get_bytes_per_token


def bytes_per_full_token(stock: Any, module: ModuleType) -> Callable[..., float]:
    """K3: what a token of context costs; everything but the three KV pools is as SGLang counts it."""

    def _get_bytes_per_full_token(self: Any) -> float:
        rows = (
            self.swa_ratio * self.num_layers_total
            + self.num_layers_ca4 / (4 * self.c4_shrink_factor)
            + self.num_layers_ca128 / 128
        )
        return float(stock(self) + (ROW_BYTES - _STOCK_ROW_BYTES) * rows)

    return _get_bytes_per_full_token


def store(stock: Any, module: ModuleType) -> Callable[..., None]:
    """K2: RMSNorm, rotary embedding and the write of window rows; also those of NextN and DSpark."""

    def fused_k_norm_rope_flashmla(
        kv: Tensor,
        kv_weight: Tensor,
        eps: float,
        freqs_cis: Tensor,
        positions: Tensor,
        out_loc: Tensor,
        kvcache: Tensor,
        page_size: int,
    ) -> None:
        tokens = kv.shape[0]
        write = ops.kernel("store_kv", kv.device)
        where = positions[:tokens], out_loc[:tokens], kvcache.view(-1, ROW)
        write(kv, kv_weight, eps, as_pairs(freqs_cis), *where)

    return fused_k_norm_rope_flashmla


def store_compressed(stock: Any, module: ModuleType) -> Callable[..., None]:
    """C1: the write of compressed rows. SGLang's kernel has a BF16 form for KV; index keys become INT8."""

    def compress_norm_rope_store(
        kv: Tensor,
        plan: Any,
        *,
        norm_weight: Tensor,
        norm_eps: float,
        freq_cis: Tensor,
        out_loc: Tensor,
        kvcache: Tensor,
        page_size: int,
        use_fp4: bool = False,
        bf16_store: bool = False,
    ) -> None:
        if use_fp4:
            found = "--enable-deepseek-v4-fp4-indexer"
            raise refusal("shim.option", found, "SM80 has no FP4 indexer", expected="without it", found="set")
        if kv.shape[-1] == _INDEX_HEAD:
            positions, slots = rows_to_store(plan, out_loc)
            pages = kvcache.view(-1, _INDEX_PAGE * (_INDEX_HEAD + 4))
            ops.kernel("store_index_keys", kv.device)(
                kv, norm_weight, norm_eps, as_pairs(freq_cis), positions, slots, pages
            )
            return
        stock(
            kv,
            plan,
            norm_weight=norm_weight,
            norm_eps=norm_eps,
            freq_cis=freq_cis,
            out_loc=out_loc,
            kvcache=kvcache,
            page_size=page_size,
            bf16_store=True,
        )

    return compress_norm_rope_store


def rows_to_store(plan: Any, out_loc: Tensor) -> tuple[Tensor, Tensor]:
    """Return the position and the slot of each compressed row; slot -1 where nothing is due.

    A plan row is 16 bytes, u32 length first. Decode has a row per request, due when its length is a multiple
    of the ratio. Prefill has a row per compressed row, with the index of its slot in the low half of the
    second word; spare rows have length 2^32 - 1.

    Args:
        plan: SGLang's ``CompressorDecodePlan`` or ``CompressorPrefillPlan``.
        out_loc: [T] slots, int32 or int64.
    """
    words = plan[1].view(torch.int32)
    length = words[:, 0]
    if plan.is_decode:
        due, slot = (length > 0) & (length % plan.compress_ratio == 0), out_loc[: len(words)]
    else:
        due, slot = length >= 0, out_loc[(words[:, 1] & 0xFFFF).clamp(max=len(out_loc) - 1).long()]
    return (length - plan.compress_ratio).clamp(min=0), torch.where(due, slot, -1)


def as_pairs(freqs_cis: Tensor) -> Tensor:
    """Return complex64 [P, 32] as float32 [P, 64], cosine and sine interleaved; no copy."""
    return torch.view_as_real(freqs_cis).flatten(-2)
