"""Steps of SGLang's own indexer and attention, small enough for a CPU; see `ranks` for several processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention import deepseek_v4_backend as backend_module
from sglang.srt.layers.attention.dsv4 import indexer as indexer_module
from sglang.srt.layers.attention.dsv4.metadata import PagedIndexerMetadata
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from tests.sglang.world import make_pool

#: Name -> sequences of a step, each as tokens that it has already and tokens of this step. 4 tokens are one
#: key; with more than 512 of them the selection leaves some out.
CASES = {
    "one prompt, divisible": [(2400, 48)],
    "ragged": [(0, 7), (2600, 19), (2044, 11)],
    "from the first token": [(0, 50)],
    "one query": [(2800, 1)],
    "two queries": [(2500, 2)],
}


def make_backend(sequences: list[tuple[int, int]]) -> Any:
    """Return SGLang's backend with the state that its indexer reads, for one prefill step.

    Index keys are random bytes of codes and small scales. Sequences may share pages, as those with a common
    beginning do.
    """
    pool = make_pool()
    # Layer 2 is the first of ratio 4.
    pages = pool.get_index_k_with_scale_buffer(2)
    pages.copy_(torch.randint(0, 256, pages.shape, dtype=torch.uint8))
    pages[:, 8192:].view(torch.float32).uniform_(0.01, 0.1)
    lengths: list[int] = []
    table: list[list[int]] = []
    width = max(-(-(old + new) // 256) for old, new in sequences)
    for old, new in sequences:
        listed = torch.randperm(len(pages))[: -(-(old + new) // 256)].tolist()
        lengths += range(old + 1, old + new + 1)
        table += [listed + [0] * (width - len(listed))] * new
    integers = {"device": torch.device("cpu"), "dtype": torch.int32}
    seq_lens, page_table = torch.tensor(lengths, **integers), torch.tensor(table, **integers)
    keys = seq_lens // 4
    core = backend_module.DSV4AttnMetadata(
        page_size=256,
        page_table=page_table,
        raw_out_loc=torch.ones_like(seq_lens),
        cuda_int32_kwargs=integers,
        seq_lens_casual=seq_lens,
        positions_casual=seq_lens - 1,
        swa_page_indices=torch.full((len(seq_lens), 128), -1, **integers),
        swa_topk_lengths=seq_lens.clamp(max=128),
        c4_sparse_topk=512,
        c4_topk_lengths_raw=keys,
        c4_topk_lengths_clamp1=keys.clamp(min=1),
    )
    core.init_flashmla_related(is_prefill=True)
    backend = object.__new__(backend_module.DeepseekV4AttnBackend)
    backend.token_to_kv_pool, backend.hisparse_coordinator = pool, None
    backend.debug_use_external_c4_sparse_indices = False
    indexed = PagedIndexerMetadata(page_size=256, page_table=page_table, c4_seq_lens=keys)
    backend.forward_metadata = backend_module.DSV4Metadata(core, indexed)
    return backend


def attention_backend(
    pool: Any,
    window: torch.Tensor,
    lengths: torch.Tensor,
    c4: torch.Tensor,
    c128: torch.Tensor,
) -> Any:
    """Return the stock backend with just the state that its forward reads.

    Args:
        pool: KV pool of `make_pool`.
        window: [T, 128] int32, places in the window pool.
        lengths: [T] int32, how many of them count.
        c4: [T, 512] int32, places in the pool of ratio 4, of which 150 count.
        c128: [T, 64] int32, places in the pool of ratio 128, of which 4 count.
    """
    tokens, integers = len(window), {"device": torch.device("cpu"), "dtype": torch.int32}
    core = backend_module.DSV4AttnMetadata(
        page_size=256,
        page_table=torch.zeros(tokens, 4, **integers),
        raw_out_loc=torch.zeros(tokens, **integers),
        cuda_int32_kwargs=integers,
        seq_lens_casual=torch.full((tokens,), 600, **integers),
        positions_casual=torch.full((tokens,), 599, **integers),
        swa_page_indices=window,
        swa_topk_lengths=lengths,
        c4_sparse_topk=512,
        c4_topk_lengths_clamp1=torch.full((tokens,), 150, **integers),
        c128_page_indices=c128,
        c128_topk_lengths_clamp1=torch.full((tokens,), 4, **integers),
    )
    core.init_flashmla_related()
    core.c4_sparse_page_indices.copy_(c4)
    found = object.__new__(backend_module.DeepseekV4AttnBackend)
    found.mtp_enabled, found.softmax_scale, found.head_dim_v = False, 512**-0.5, 512
    found.token_to_kv_pool = pool
    found.forward_metadata = SimpleNamespace(core_attn_metadata=core)
    return found


def make_indexer(config: Any) -> Any:
    """Return the indexer of layer 2 with random weights."""
    angle = torch.arange(4096)[:, None] * 10000.0 ** (-torch.arange(32) / 32)
    freqs = torch.polar(torch.ones_like(angle), angle).to(torch.complex64)
    made = indexer_module.C4Indexer(config, 2, freqs)
    for name in ("wq_b", "weights_proj"):
        getattr(made, name).weight.data = torch.randn(getattr(made, name).weight.shape).to(torch.bfloat16)
    return made


class Step:
    """A prefill step that can be computed several times.

    Attributes:
        scored: Queries of every call of the logits kernel in the last run.
        compressed: Tokens of every call of the indexer's compressor in the last run.
    """

    def __init__(self, config: Any, sequences: list[tuple[int, int]]) -> None:
        self.backend, self.indexer = make_backend(sequences), make_indexer(config)
        self.scored: list[int] = []
        self.compressed: list[int] = []
        tokens = sum(new for _, new in sequences)
        self._x = torch.randn(tokens, config.hidden_size).to(torch.bfloat16)
        self._q_lora = torch.randn(tokens, config.q_lora_rank).to(torch.bfloat16)
        # Its kernels need a card; keys are in the pool already.
        self.backend.forward_indexer_compressor = lambda x, **_: self.compressed.append(len(x))

    def run(self, forward: Any, mode: ForwardMode = ForwardMode.EXTEND) -> torch.Tensor:
        """Return the places that a `forward_c4_indexer` selects, [tokens, 512]."""
        self.scored, self.compressed = [], []
        places = self.backend.forward_metadata.core_metadata.c4_sparse_page_indices
        places.fill_(-1)
        logits = indexer_module.fp8_paged_mqa_logits_torch

        def counting(q: torch.Tensor, *others: Any) -> torch.Tensor:
            self.scored.append(len(q))
            found: torch.Tensor = logits(q, *others)
            return found

        indexer_module.fp8_paged_mqa_logits_torch = counting
        try:
            batch = SimpleNamespace(forward_mode=mode)
            forward(self.backend, self._x, self._q_lora, self.indexer, batch)
        finally:
            indexer_module.fp8_paged_mqa_logits_torch = logits
        return places.clone()
