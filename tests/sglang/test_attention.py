"""SGLang's own attention forward over real pools, with the reference kernels where Triton goes on a card."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention import deepseek_v4_backend as backend_module

from tests.sglang.steps import attention_backend
from tests.sglang.world import make_pool
from tests.tolerances import ATTENTION_BF16, BF16_ROUNDING

_TOKENS, _HEADS, _PADDED = 3, 2, 64


def _freqs(positions: int) -> torch.Tensor:
    angle = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(32) / 32)
    return torch.polar(torch.ones_like(angle), angle)


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def _stored_row(kv: torch.Tensor, weight: torch.Tensor, position: int) -> torch.Tensor:
    """RMSNorm, then rotate pairs of the last 64, in float64."""
    x = kv.double()
    x = x / (x.square().mean() + 1e-6).sqrt() * weight.double()
    pairs = torch.view_as_complex(x[448:].view(32, 2)) * _freqs(position + 1)[position].to(torch.complex128)
    return torch.cat([x[:448], torch.view_as_real(pairs).flatten()])


def test_window_rows_are_normed_rotated_and_written_to_their_slots() -> None:
    """K2, through the pool's own method: the one that target, NextN and both DSpark writers call."""
    pool = make_pool()
    # A slice of the fused projection: rows are strided.
    kv = torch.randn(4, 640).to(torch.bfloat16)[:, 128:]
    weight = torch.rand(512).to(torch.bfloat16) + 0.5
    slots, positions = torch.tensor([300, 5, -1, 0], dtype=torch.int32), torch.tensor([7, 0, 3, 1])
    freqs = _freqs(8).to(torch.complex64)
    pool.set_swa_key_buffer_radix_fused_norm_rope(1, slots, kv, weight, 1e-6, freqs, positions)
    rows = pool.swa_kv_pool.kv_buffer[1].view(-1, 512)
    for token, slot in ((0, 300), (1, 5), (3, 0)):
        wanted = _stored_row(kv[token], weight, int(positions[token]))
        assert _error(rows[slot], wanted) < BF16_ROUNDING
    untouched = torch.ones(len(rows), dtype=torch.bool)
    untouched[[300, 5, 0]] = False
    assert not rows[untouched].any()
    assert not any(buffer.any() for i, buffer in enumerate(pool.swa_kv_pool.kv_buffer) if i != 1)


def _dense(q: torch.Tensor, keys: list[torch.Tensor], sink: torch.Tensor) -> torch.Tensor:
    """Softmax over a token's keys and a sink that has no value, one head at a time, in float64."""
    rows = []
    for token, key in enumerate(keys):
        k = key.double()
        for head in range(_HEADS):
            weights = torch.cat([k @ q[token, head].double() * 512**-0.5, sink[head].double()[None]]).softmax(
                0
            )
            rows.append(weights[:-1] @ k)
    return torch.stack(rows).view(len(keys), _HEADS, 512)


@pytest.mark.parametrize(("ratio", "layer"), [(0, 0), (4, 2), (128, 3)])
def test_forward_attends_to_window_and_compressed_rows(ratio: int, layer: int) -> None:
    pool = make_pool()
    swa = pool.swa_kv_pool.kv_buffer[layer].view(-1, 512)
    window_rows = torch.randn(len(swa), 512).to(torch.bfloat16)
    swa.copy_(window_rows)
    window = torch.full((_TOKENS, 128), -1, dtype=torch.int32)
    # Entry 1 of the first token is a hole; the third token has a single key.
    window[0, :3] = torch.tensor([700, -1, 3])
    window[1, :128] = torch.arange(200, 328)
    window[2, 0] = 9
    lengths = torch.tensor([3, 128, 1], dtype=torch.int32)
    c4 = torch.full((_TOKENS, 512), -1, dtype=torch.int32)
    c4[0, :150], c4[1, :2], c4[2, 5] = torch.arange(150), torch.tensor([1000, 64]), 77
    c128 = torch.full((_TOKENS, 64), -1, dtype=torch.int32)
    c128[0, :4], c128[1, :1] = torch.tensor([0, 1, 2, 30]), 31
    extra_rows, listed, length = None, None, 0
    if ratio:
        single, listed, length = (pool.c4_kv_pool, c4, 150) if ratio == 4 else (pool.c128_kv_pool, c128, 4)
        extra = single.kv_buffer[0].view(-1, 512)
        extra_rows = torch.randn(len(extra), 512).to(torch.bfloat16)
        extra.copy_(extra_rows)
    keys = []
    for token in range(_TOKENS):
        ids = [i for i in window[token, : lengths[token]].tolist() if i >= 0]
        key = window_rows[ids]
        if listed is not None:
            key = torch.cat([key, extra_rows[[i for i in listed[token, :length].tolist() if i >= 0]]])
        keys.append(key)
    # What SGLang hands over: 64 heads, of which only those of the rank were written.
    q = torch.full((_TOKENS, _PADDED, 512), torch.nan, dtype=torch.bfloat16)
    q[:, :_HEADS] = torch.randn(_TOKENS, _HEADS, 512).to(torch.bfloat16)
    sink = torch.zeros(_PADDED)
    sink[:_HEADS] = torch.tensor([0.5, -1.0])
    k = torch.empty(_TOKENS, 512)
    found = attention_backend(pool, window, lengths, c4, c128).forward(
        q=q,
        k=k,
        v=k,
        layer=SimpleNamespace(layer_id=layer, tp_q_head_num=_HEADS, v_head_dim=512),
        forward_batch=SimpleNamespace(
            forward_mode=SimpleNamespace(is_idle=lambda: False, is_extend_without_speculative=lambda: True)
        ),
        compress_ratio=ratio,
        save_kv_cache=False,
        attn_sink=sink,
    )
    assert found.shape == (_TOKENS, _HEADS, 512)
    assert _error(found, _dense(q, keys, sink)) < ATTENTION_BF16


def test_the_flag_keeps_flash_mla_out() -> None:
    """A1: no scheduling metadata, whose maker imports a library that has no code for SM80."""
    assert backend_module._is_sm120 is True
    assert backend_module._create_flashmla_metadata() is None
