"""Padding before attention: heads up to 64, tokens up to the size of a captured graph, filled with NaN.

A port of this runtime once took heads `rank * n` to `rank * n + n` of the padded queries: rank 0 was right,
the others read padding, the server answered 200 and the text was wrong. The heads of a rank come first.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention import deepseek_v4_backend as backend_module
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from dsv4convert.runtime.patches import attention
from tests.sglang.steps import attention_backend
from tests.sglang.world import make_pool
from tests.tolerances import ATTENTION_BF16

_HEADS, _PADDED, _REAL, _TOKENS = 4, 64, 3, 5
#: Layer 2 of the pool has ratio 4.
_LAYER, _RATIO = 2, 4
_OURS = backend_module.DeepseekV4AttnBackend.forward
_POISONED = attention.poison(_OURS, backend_module)

Forward = Callable[..., torch.Tensor]


class _Step:
    """Three tokens and two that a graph pads to; keys in real pools, queries of all heads.

    Padded tokens look as SGLang makes them: slot 0, one key, and entries 0 or -1 behind it. Row 0 of every
    pool, where their keys go, is NaN.
    """

    def __init__(self) -> None:
        pool = make_pool()
        for rows in (pool.swa_kv_pool.kv_buffer[_LAYER], pool.c4_kv_pool.kv_buffer[0]):
            rows.copy_(torch.randn(rows.shape).to(torch.bfloat16))
            rows.view(-1, 512)[0] = torch.nan
        window = torch.full((_TOKENS, 128), -1, dtype=torch.int32)
        window[:_REAL, :100] = 1 + torch.randperm(900)[: _REAL * 100].view(_REAL, 100).int()
        window[_REAL:] = 0
        c4 = torch.full((_TOKENS, 512), -1, dtype=torch.int32)
        c4[:_REAL, :150] = 1 + torch.randperm(1000)[: _REAL * 150].view(_REAL, 150).int()
        lengths = torch.tensor([100, 37, 1, 1, 1], dtype=torch.int32)
        self.slots = torch.tensor([300, 5, 77, 0, 0])
        c128 = torch.full((_TOKENS, 64), -1, dtype=torch.int32)
        self.backend = attention_backend(pool, window, lengths, c4, c128)
        self.q = torch.randn(_TOKENS, _HEADS, 512).to(torch.bfloat16)
        self.sink = torch.randn(_HEADS)
        self.given = self.q

    def run(self, forward: Forward, rank: int, size: int) -> torch.Tensor:
        """Return what the caller keeps of a rank's attention, [tokens, heads of the rank, 512]."""
        heads = _HEADS // size
        mine = slice(rank * heads, rank * heads + heads)
        q = torch.full((_TOKENS, _PADDED, 512), 7.0, dtype=torch.bfloat16)
        q[:, :heads] = self.q[:, mine]
        sink = torch.zeros(_PADDED)
        sink[:heads] = self.sink[mine]
        self.given = q
        found = forward(
            self.backend,
            q=q,
            k=q,
            v=q,
            layer=SimpleNamespace(layer_id=_LAYER, tp_q_head_num=heads, v_head_dim=512),
            forward_batch=SimpleNamespace(forward_mode=ForwardMode.DECODE, out_cache_loc=self.slots),
            compress_ratio=_RATIO,
            save_kv_cache=False,
            attn_sink=sink,
        )
        return found[:, :heads]


@pytest.fixture
def step() -> _Step:
    return _Step()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_padding_that_is_nan_changes_no_answer(step: _Step, size: int) -> None:
    whole = step.run(_OURS, 0, 1)[:_REAL]
    parts = []
    for rank in range(size):
        plain, poisoned = step.run(_OURS, rank, size), step.run(_POISONED, rank, size)
        assert torch.equal(plain[:_REAL], poisoned[:_REAL])
        assert poisoned[_REAL:].isnan().all()
        assert step.given[:, _HEADS // size :].isnan().all() and step.given[_REAL:].isnan().all()
        assert torch.equal(step.given[:_REAL, : _HEADS // size], step.q[:_REAL].chunk(size, 1)[rank])
        parts.append(poisoned[:_REAL])
    joined = torch.cat(parts, 1)
    assert float((joined.double() - whole).norm() / whole.double().norm()) < ATTENTION_BF16


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_heads_taken_by_rank_are_padding(step: _Step, rank: int) -> None:
    """The old fault, which poison makes visible: only rank 0 finds its heads there."""

    def by_rank(self: Any, q: Any, k: Any, v: Any, layer: Any, *others: Any, **more: Any) -> torch.Tensor:
        heads = layer.tp_q_head_num
        more["attn_sink"] = more["attn_sink"][:heads]
        mine = q[:, rank * heads : rank * heads + heads]
        out: torch.Tensor = _OURS.__wrapped__(self, mine, k, v, layer, *others, **more)
        return out

    found = step.run(attention.poison(by_rank, backend_module), rank, 4)[:_REAL]
    assert bool(found.isnan().any()) == (rank != 0)


def test_a_step_of_padding_only_is_a_warm_up(step: _Step) -> None:
    step.slots.zero_()
    assert not step.run(_POISONED, 0, 1)[:_REAL].isnan().any()


def test_steps_that_share_a_buffer_of_slots(step: _Step) -> None:
    """Then each step's part is in its metadata; rows that are missing there are padding, as SGLang has it."""
    core = step.backend.forward_metadata.core_attn_metadata
    core.raw_out_loc, step.slots = step.slots[:_REAL], torch.ones(2 * _TOKENS)
    step.run(_POISONED, 0, 1)
    assert step.given[:, :_HEADS].isnan().flatten(1).any(1).tolist() == [False] * _REAL + [True] * 2
