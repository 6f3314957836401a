"""The INT8 indexer inside SGLang's control flow: keys from the compressor, queries, scores, top-k."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.jit_kernel.dsv4 import CompressorDecodePlan, CompressorPrefillPlan
from sglang.srt.layers.attention.dsv4 import compressor_v2
from sglang.srt.layers.attention.dsv4.indexer import C4IndexerBackendMixin
from sglang.srt.layers.attention.dsv4.metadata import PagedIndexerMetadata

from dsv4convert.errors import Refused
from dsv4convert.runtime.patches import kv
from tests.sglang.world import Loaded, make_pool
from tests.tolerances import HALF_A_STEP, INDEX_BORDER, INDEX_FOUND

_U32_NONE = 0xFFFFFFFF


def _hadamard() -> torch.Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < 128:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h * 128**-0.5


def _rotated(x: torch.Tensor, freqs: torch.Tensor, position: int) -> torch.Tensor:
    """[..., 128] float64: pairs of the last 64 turned by a position, then the Hadamard transform."""
    pairs = torch.view_as_complex(x[..., 64:].reshape(*x.shape[:-1], 32, 2)) * freqs[position].to(
        torch.complex128
    )
    return torch.cat([x[..., :64], torch.view_as_real(pairs).flatten(-2)], -1) @ _hadamard()


def _words(rows: list[tuple[int, int]]) -> torch.Tensor:
    """Return a plan tensor [N, 16] uint8: two little-endian words, then eight bytes nobody here reads."""
    return (
        torch.tensor([[a, b, 7, 7] for a, b in rows], dtype=torch.int64)
        .to(torch.int32)
        .view(torch.uint8)
        .view(-1, 16)
    )


def _key(page: torch.Tensor, row: int) -> torch.Tensor:
    codes = page[row * 128 : row * 128 + 128].view(torch.int8).double()
    return codes * page[8192 + 4 * row : 8196 + 4 * row].clone().view(torch.float32).double()


def _steps_off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference in steps of an INT8 scale that fits the largest number."""
    return float((found - wanted).abs().max() / (wanted.abs().max() / 127))


def _store(
    plan: Any, keys: torch.Tensor, out_loc: torch.Tensor, freqs: torch.Tensor, pages: torch.Tensor
) -> None:
    compressor_v2.compress_norm_rope_store(
        keys,
        plan,
        norm_weight=torch.ones(128),
        norm_eps=1e-6,
        freq_cis=freqs,
        out_loc=out_loc,
        kvcache=pages,
        page_size=64,
        use_fp4=False,
        bf16_store=False,
    )


@pytest.fixture(scope="module")
def freqs() -> torch.Tensor:
    angle = torch.arange(4096)[:, None] * 10000.0 ** (-torch.arange(32) / 32)
    return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)


def _normed(key: torch.Tensor) -> torch.Tensor:
    x = key.double()
    return x / (x.square().mean() + 1e-6).sqrt()


def test_decode_stores_a_key_when_a_group_of_four_is_complete(freqs: torch.Tensor) -> None:
    """C1 with a decode plan: lengths 8, 9, 12 and an idle row; only 8 and 12 end a group."""
    plan = CompressorDecodePlan(4, _words([(8, 0), (9, 0), (12, 0), (0, 0)]))
    keys, pages = torch.randn(4, 128), torch.zeros(3, 8448, dtype=torch.uint8)
    _store(plan, keys, torch.tensor([130, 7, 63, 9]), freqs, pages)
    for token, page, row, position in ((0, 2, 2, 4), (2, 0, 63, 8)):
        wanted = _rotated(_normed(keys[token]), freqs, position)
        assert _steps_off(_key(pages[page], row), wanted) < HALF_A_STEP
        pages[page, row * 128 : row * 128 + 128] = 0
        pages[page, 8192 + 4 * row : 8196 + 4 * row] = 0
    assert not pages.any()


def test_prefill_stores_the_rows_of_its_plan(freqs: torch.Tensor) -> None:
    """C1 with a prefill plan: a slot stands at the index in a low half word; spare rows are skipped."""
    plan = CompressorPrefillPlan(
        4, _words([(4, 0xABCD0003), (8, 0x00010007), (_U32_NONE, 0)]), torch.empty(0)
    )
    keys, pages = torch.randn(3, 128), torch.zeros(2, 8448, dtype=torch.uint8)
    out_loc = torch.tensor([0, 0, 0, 64, 0, 0, 0, 65])
    _store(plan, keys, out_loc, freqs, pages)
    for token, row, position in ((0, 0, 0), (1, 1, 4)):
        wanted = _rotated(_normed(keys[token]), freqs, position)
        assert _steps_off(_key(pages[1], row), wanted) < HALF_A_STEP
    assert not pages[0].any() and not pages[1, 256:8192].any()


def test_compressed_kv_goes_to_the_bf16_form_of_the_stock_kernel() -> None:
    """C1 with rows of 512: SGLang's own kernel, told to write BF16; that kernel needs a card."""
    calls: list[tuple[Any, Any]] = []
    patched = kv.store_compressed(lambda *args, **kwargs: calls.append((args, kwargs)), compressor_v2)
    row, plan, cache = torch.zeros(2, 512), object(), torch.zeros(1, 1024, dtype=torch.uint8)
    options = {
        "norm_weight": 1,
        "norm_eps": 2,
        "freq_cis": 3,
        "out_loc": 4,
        "kvcache": cache,
        "page_size": 64,
    }
    patched(row, plan, **options, bf16_store=False)
    assert len(calls) == 1 and calls[0][0][0] is row and calls[0][0][1] is plan
    assert calls[0][1] == options | {"bf16_store": True}


def test_the_fp4_indexer_is_refused() -> None:
    with pytest.raises(Refused, match="SM80 has no FP4 indexer"):
        compressor_v2.compress_norm_rope_store(
            torch.zeros(1, 128),
            None,
            norm_weight=None,
            norm_eps=0.0,
            freq_cis=None,
            out_loc=None,
            kvcache=None,
            page_size=64,
            use_fp4=True,
        )


def test_the_whole_indexer_selects_the_best_keys(
    loaded: Callable[..., Loaded], freqs: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I1 and I2 inside `forward_c4_indexer`, with 700 keys and top-k 512, against scores in float64."""
    monkeypatch.setenv("SGLANG_TOPK_TRANSFORM_512_TORCH", "1")
    indexer = loaded("0731-int8").model.model.layers[2].self_attn.indexer
    tokens, keys, pool = 2, 700, make_pool()
    x = torch.randn(tokens, 256).to(torch.bfloat16)
    q_lora = torch.randn(tokens, 128).to(torch.bfloat16)
    positions = torch.tensor([2801, 39], dtype=torch.int32)
    lengths = torch.tensor([keys, 9], dtype=torch.int32)
    # Pages in another order than the keys, and shared by both tokens.
    table = torch.tensor([[3, 1, 4, 15, 9, 2, 6, 5, 8, 10, 11]] * tokens, dtype=torch.int32)
    pages = pool.get_index_k_with_scale_buffer(2)
    slots = torch.tensor([int(table[0, j // 64]) * 64 + j % 64 for j in range(keys)])
    plan = CompressorDecodePlan(4, _words([(4 * (j + 1), 0) for j in range(keys)]))
    _store(plan, torch.randn(keys, 128), slots, indexer.freqs_cis, pages)
    metadata = SimpleNamespace(
        core_metadata=SimpleNamespace(
            positions=positions,
            page_table=table,
            c4_sparse_page_indices=torch.full((tokens, 512), -1, dtype=torch.int32),
            c4_sparse_raw_indices=torch.full((tokens, 512), -1, dtype=torch.int32),
        ),
        indexer_metadata=PagedIndexerMetadata(page_size=256, page_table=table, c4_seq_lens=lengths),
    )
    backend = object.__new__(C4IndexerBackendMixin)
    backend.token_to_kv_pool, backend.forward_metadata = pool, metadata
    backend.debug_use_external_c4_sparse_indices, backend.hisparse_coordinator = False, None
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: False))
    indexer(x, q_lora, batch, backend, skip_compressor=True)

    stored = torch.stack([_key(pages[slot // 64], int(slot) % 64) for slot in slots])
    weights = (x @ indexer.weights_proj.weight.T).double() * (128**-0.5 * 64**-0.5)
    query = (q_lora @ indexer.wq_b.weight.T).view(tokens, 64, 128).double()
    table_of_turns = indexer.freqs_cis
    for token, length in enumerate(lengths.tolist()):
        turned = _rotated(query[token], table_of_turns, int(positions[token]))
        scores = (turned @ stored[:length].T).relu().T @ weights[token]
        chosen = metadata.core_metadata.c4_sparse_page_indices[token]
        chosen = chosen[chosen >= 0]
        assert len(chosen) == min(512, length)
        index_of = {int(slot): j for j, slot in enumerate(slots)}
        picked = {index_of[int(slot)] for slot in chosen}
        best = set(scores.topk(min(512, length)).indices.tolist())
        # INT8 queries move scores by little: what is left out or let in lies near the border.
        border = float(scores.sort(descending=True).values[min(512, length) - 1])
        spread = float(scores.std())
        assert len(picked & best) >= INDEX_FOUND * len(best)
        assert all(abs(float(scores[j]) - border) < INDEX_BORDER * spread for j in picked ^ best)
