"""The references of attention and indexer, against float64 and against what they must not read."""

from __future__ import annotations

import pytest
import torch

from kernels_ref import attention, indexer
from tests import tolerances
from tests.kernels.listed import (
    POISON,
    draw_attention,
    draw_index,
    exact_attention,
    exact_latent,
    exact_logits,
    hadamard_matrix,
    table,
)

WEIGHT_SCALE = 128**-0.5 * 64**-0.5


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ``|found - expected| / |expected|`` in float64; NaN anywhere gives NaN."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("extra", [0, 96], ids=["one source", "two sources"])
def test_attention_equals_the_definition(extra: int, seed: int) -> None:
    problem = draw_attention(
        seed, tokens=6, heads=3, width=64, extra=extra, lengths=[64, 1, 7], extra_lengths=[0, 96, 33]
    )
    wide = problem.float64()
    expected = exact_attention(problem)
    result = attention.sparse_attention(*wide.args(), **wide.keywords())
    assert result.dtype == torch.float64
    assert relative(result, expected) < tolerances.FLOAT64_SUMS
    narrow = attention.sparse_attention(*problem.args(), **problem.keywords())
    assert narrow.dtype == torch.bfloat16
    assert relative(narrow, expected) < tolerances.BF16_ROUNDING


def test_a_query_without_keys_gets_zero_and_the_sink_takes_a_share_otherwise(seed: int) -> None:
    problem = draw_attention(seed, tokens=3, heads=2, width=4, lengths=[1, 0, 1], holes=0.0)
    problem.indices[0] = -1
    out = attention.sparse_attention(*problem.args())
    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    # One key: weight exp(s) / (exp(s) + exp(sink)).
    key = problem.cache[problem.indices[2, 0]].double()
    score = problem.q[2].double() @ key * problem.scale
    share = torch.sigmoid(score - problem.sink.double())
    assert relative(out[2], share[:, None] * key) < tolerances.BF16_ROUNDING
    problem.sink.fill_(-torch.inf)
    assert torch.equal(attention.sparse_attention(*problem.args())[0], torch.zeros_like(out[0]))


def test_attention_writes_where_told(seed: int) -> None:
    problem = draw_attention(seed, tokens=2, heads=2, width=8)
    out = torch.full((2, 2, 512), float("nan"), dtype=torch.bfloat16)
    assert attention.sparse_attention(*problem.args(), out=out) is out
    assert torch.equal(out, attention.sparse_attention(*problem.args()))


def test_attention_wants_the_whole_second_source(seed: int) -> None:
    problem = draw_attention(seed, tokens=1, heads=1, width=8)
    with pytest.raises(ValueError, match="expected all of them or none; found a tensor, None, None"):
        attention.sparse_attention(*problem.args(), extra_cache=problem.cache)


@pytest.mark.parametrize("places", [torch.int32, torch.int64])
def test_latents_are_stored_where_their_slots_say(places: torch.dtype, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    kv = torch.randn(5, 640, generator=gen).bfloat16()[:, :512]
    weight = torch.rand(512, generator=gen) + 0.5
    positions = torch.tensor([0, 3, 128, 7, 299], dtype=places)
    slots = torch.tensor([9, -1, 2, 0, 11], dtype=places)
    cache = torch.full((12, 512), POISON, dtype=torch.bfloat16)
    attention.store_kv(kv, weight, 1e-6, table(), positions, slots, cache)
    for row in range(12):
        if row not in slots.tolist():
            assert (cache[row] == POISON).all(), f"row {row} belongs to no slot"
            continue
        t = slots.tolist().index(row)
        expected = exact_latent(kv[t], weight, 1e-6, table()[positions[t]])
        assert relative(cache[row], expected) < tolerances.BF16_ROUNDING


def test_index_keys_are_stored_as_codes_and_scales(seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    k = torch.randn(4, 128, generator=gen)
    k[2] = 0
    weight = torch.rand(128, generator=gen) + 0.5
    positions = torch.tensor([0, 3, 4, 299])
    slots = torch.tensor([63, -1, 64, 130])
    cache = torch.full((3, 64 * 132), POISON, dtype=torch.uint8)
    indexer.store_index_keys(k, weight, 1e-6, table(), positions, slots, cache)
    codes = cache[:, : 64 * 128].reshape(3 * 64, 128).view(torch.int8)
    scales = cache[:, 64 * 128 :].reshape(-1, 4).view(torch.float32).flatten()
    for t, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        rotated = exact_latent(k[t], weight, 1e-6, table()[positions[t]]) @ hadamard_matrix()
        step = max(float(rotated.abs().max()), 1e-8) / 127
        assert abs(float(scales[slot]) / step - 1) < tolerances.FLOAT32_SUMS
        # Half a step, and what float32 may shift of a value that lies between two codes.
        assert float((codes[slot].double() * step - rotated).abs().max()) <= 0.501 * step
        assert int(codes[slot].abs().max()) == (127 if rotated.abs().max() > 0 else 0)
    rest = torch.ones(3 * 64, dtype=torch.bool)
    rest[slots[slots >= 0]] = False
    poison = torch.full((4,), POISON, dtype=torch.uint8).view(torch.float32)
    assert (codes[rest].view(torch.uint8) == POISON).all()
    assert torch.equal(scales[rest], poison.expand(int(rest.sum())))


def test_queries_are_quantised_per_head_and_carry_their_weight(seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 64, 128, generator=gen).bfloat16()
    weight = torch.randn(2, 64, generator=gen).bfloat16()
    q8, w = indexer.quantize_index_queries(q, weight, WEIGHT_SCALE, table(), torch.tensor([0, 17]))
    assert (q8.shape, q8.dtype, w.shape, w.dtype) == (q.shape, torch.int8, (2, 64, 1), torch.float32)
    tail = torch.view_as_complex(q[1, :, 64:].double().reshape(64, 32, 2).contiguous())
    turn = torch.view_as_complex(table()[17].double().reshape(32, 2).contiguous())
    turned = torch.view_as_real(tail * turn).flatten(1)
    rotated = torch.cat((q[1, :, :64].double(), turned), 1) @ hadamard_matrix()
    step = rotated.abs().amax(-1) / 127
    assert relative(w[1, :, 0], weight[1].double() * WEIGHT_SCALE * step) < tolerances.FLOAT32_SUMS
    assert float((q8[1].double() * step[:, None] - rotated).abs().div(step[:, None]).max()) <= 0.501


def test_logits_are_exact_in_integers_and_end_at_the_length(seed: int) -> None:
    problem = draw_index(seed, [0, 1, 63, 64, 65, 200], max_len=193)
    result = indexer.index_logits(*problem.args())
    assert torch.equal(result.double(), exact_logits(problem))
    kept = torch.full(result.shape, 7.0)
    indexer.index_logits(*problem.args(), out=kept, clean=False)
    seen = torch.arange(193) < problem.seq_lens[:, None]
    assert torch.equal(kept, torch.where(seen, result, 7.0))


def test_logits_of_ordinary_weights(seed: int) -> None:
    problem = draw_index(seed, [70, 3], max_len=128, exact=False)
    expected = exact_logits(problem)
    seen = expected > -torch.inf
    assert relative(indexer.index_logits(*problem.args())[seen], expected[seen]) < tolerances.FLOAT32_SUMS


@pytest.mark.parametrize("rows", [None, 1, 2], ids=["default", "one", "two"])
def test_topk_finds_the_best_places_whatever_the_chunk(rows: int | None, seed: int) -> None:
    problem = draw_index(seed, [0, 5, 150, 130], max_len=150, exact=False)
    best = indexer.index_topk(*problem.args(), topk=16, rows=rows)
    assert (best.shape, best.dtype) == ((4, 16), torch.int32)
    expected = exact_logits(problem)
    for t, length in enumerate([0, 5, 150, 130]):
        order = expected[t].argsort(descending=True)[: min(16, length)]
        assert best[t].tolist() == order.tolist() + [-1] * (16 - len(order))


def test_topk_wider_than_the_context(seed: int) -> None:
    problem = draw_index(seed, [3], max_len=4, exact=False)
    best = indexer.index_topk(*problem.args(), topk=8)
    assert sorted(best[0, :3].tolist()) == [0, 1, 2]
    assert best[0, 3:].tolist() == [-1] * 5
