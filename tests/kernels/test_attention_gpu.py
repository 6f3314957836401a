"""The SM80 kernels of attention and indexer on a card, against the references in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels_ref import attention as reference
from kernels_ref import indexer as index_reference
from kernels_ref.sm80 import attention, indexer
from tests import tolerances
from tests.kernels.listed import POISON, Attention, Index, draw_attention, draw_index, table
from tests.kernels.test_attention import close_codes
from tests.kernels.test_attention_reference import WEIGHT_SCALE, relative

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("code")]

WINDOW, PICKED = 128, 512
# Ragged, full, the shortest a runtime passes, and longer than the list.
LENGTHS, EXTRA_LENGTHS = [WINDOW, 1, 33, 1000], [0, PICKED, 7, 300, 1]


def _judge(problem: Attention) -> Tensor:
    wide = problem.float64()
    return reference.sparse_attention(*wide.args(), **wide.keywords())


def _poisoned(problem: Attention) -> Tensor:
    return torch.full(problem.q.shape, float("nan"), dtype=problem.q.dtype, device=problem.q.device)


@pytest.mark.parametrize("heads", [1, 8, 16, 20, 64])
@pytest.mark.parametrize("extra", [0, PICKED], ids=["one source", "two sources"])
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_attention(tokens: int, extra: int, heads: int, seed: int) -> None:
    drawn = {"width": WINDOW, "extra": extra, "lengths": LENGTHS, "extra_lengths": EXTRA_LENGTHS}
    problem = draw_attention(seed, tokens=tokens, heads=heads, rows=4096, **drawn).to("cuda")
    out = _poisoned(problem)
    assert attention.sparse_attention(*problem.args(), **problem.keywords(), out=out) is out
    assert relative(out, _judge(problem)) < tolerances.ATTENTION_BF16


@pytest.mark.parametrize("tokens", [3, 700])
def test_attention_over_a_whole_picture(tokens: int, seed: int) -> None:
    """In a step with pictures the list of the window is up to 512 wide; most rows have 128 of it."""
    drawn = {"width": 512, "lengths": [509, 128, 1], "extra": PICKED, "extra_lengths": EXTRA_LENGTHS}
    problem = draw_attention(seed, tokens=tokens, heads=16, rows=4096, **drawn).to("cuda")
    out = attention.sparse_attention(*problem.args(), **problem.keywords(), out=_poisoned(problem))
    assert relative(out, _judge(problem)) < tolerances.ATTENTION_BF16


@pytest.mark.parametrize("extra", [64, 8192], ids=["64 entries", "8192 entries"])
def test_attention_over_every_compressed_entry(extra: int, seed: int) -> None:
    """Ratio 128 has no indexer: the list is as long as the context, its width a multiple of 64."""
    drawn = {"width": WINDOW, "extra": extra, "extra_lengths": [extra, 65, extra // 2], "holes": 0.0}
    problem = draw_attention(seed, tokens=3, heads=16, rows=20000, **drawn).to("cuda")
    out = attention.sparse_attention(*problem.args(), **problem.keywords(), out=_poisoned(problem))
    assert relative(out, _judge(problem)) < tolerances.ATTENTION_BF16


def test_attention_without_keys_is_zero(seed: int) -> None:
    for tokens in (2, 600):
        problem = draw_attention(seed, tokens=tokens, heads=16, width=64, lengths=[1]).to("cuda")
        problem.indices.fill_(-1)
        out = attention.sparse_attention(*problem.args(), out=_poisoned(problem))
        assert torch.equal(out, torch.zeros_like(out))


def _replay(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Return a graph of `work`, which ran once before, as compilation cannot be captured."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


@pytest.mark.parametrize("tokens", [4, 700], ids=["split", "whole"])
def test_a_captured_attention_follows_its_inputs(tokens: int, seed: int) -> None:
    drawn = {"width": WINDOW, "extra": PICKED, "rows": 4096}
    first = draw_attention(seed, tokens=tokens, heads=16, **drawn).to("cuda")
    other = draw_attention(
        seed + 1, tokens=tokens, heads=16, lengths=LENGTHS, extra_lengths=EXTRA_LENGTHS, **drawn
    ).to("cuda")
    out = _poisoned(first)
    graph = _replay(lambda: attention.sparse_attention(*first.args(), **first.keywords(), out=out))
    tensors = [*first.args()[:-1], *first.keywords().values()]
    for into, source in zip(tensors, [*other.args()[:-1], *other.keywords().values()], strict=True):
        into.copy_(source)
    out.fill_(float("nan"))
    graph.replay()
    assert relative(out, _judge(other)) < tolerances.ATTENTION_BF16


@pytest.mark.parametrize("places", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [1, 500])
def test_store_kv(tokens: int, places: torch.dtype, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    kv = torch.randn(tokens, 640, generator=gen).bfloat16().cuda()[:, :512]
    weight = (torch.rand(512, generator=gen) + 0.5).bfloat16().cuda()
    positions = torch.randint(0, 300, (tokens,), generator=gen).to(places).cuda()
    slots = torch.randperm(2 * tokens, generator=gen)[:tokens].to(places)
    slots[1::7] = -1
    args = (kv, weight, 1e-6, table().cuda(), positions, slots.cuda())
    cache = torch.full((2 * tokens, 512), POISON, dtype=torch.bfloat16, device="cuda")
    exact = cache.float()
    attention.store_kv(*args, cache)
    reference.store_kv(*args, exact)
    assert relative(cache, exact) < tolerances.BF16_ROUNDING
    rest = torch.ones(2 * tokens, dtype=torch.bool)
    rest[slots[slots >= 0].long()] = False
    assert torch.equal(cache[rest.cuda()], torch.full_like(cache[rest.cuda()], POISON))


@pytest.mark.parametrize("tokens", [1, 6, 333])
def test_store_index_keys(tokens: int, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    k = torch.randn(tokens, 128, generator=gen).cuda()
    weight = (torch.rand(128, generator=gen) + 0.5).cuda()
    positions = torch.randint(0, 300, (tokens,), generator=gen).cuda()
    slots = torch.randperm(64 * (tokens // 32 + 2), generator=gen)[:tokens]
    slots[1::5] = -1
    args = (k, weight, 1e-6, table().cuda(), positions, slots.cuda())
    found, expected = torch.full((2, tokens // 32 + 2, 64 * 132), POISON, dtype=torch.uint8, device="cuda")
    indexer.store_index_keys(*args, found)
    index_reference.store_index_keys(*args, expected)
    close_codes(found, expected, slots.cuda())


def test_store_index_keys_is_bit_equal_where_the_norm_is_exact(seed: int) -> None:
    """Rows of +-2 have mean square 4, whatever the order of the sum; position 0 turns nothing."""
    gen = torch.Generator().manual_seed(seed)
    k = 4.0 * torch.randint(0, 2, (40, 128), generator=gen) - 2
    weight = torch.randint(1, 4, (128,), generator=gen).float()
    none = torch.zeros(40, dtype=torch.int64)
    args = [x.cuda() for x in (none, torch.arange(40))]
    found, expected = torch.full((2, 1, 64 * 132), POISON, dtype=torch.uint8, device="cuda")
    indexer.store_index_keys(k.cuda(), weight.cuda(), 0.0, table().cuda(), *args, found)
    index_reference.store_index_keys(k.cuda(), weight.cuda(), 0.0, table().cuda(), *args, expected)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("tokens", [1, 65])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantize_index_queries_is_bit_equal(dtype: torch.dtype, tokens: int, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, 64, 128, generator=gen).bfloat16()
    q[0, 7] = 0
    weight = torch.randn(tokens, 64, generator=gen).to(dtype)
    positions = torch.randint(0, 300, (tokens,), generator=gen)
    args = (q, weight, WEIGHT_SCALE, table(), positions)
    moved = (x.cuda() if isinstance(x, Tensor) else x for x in args)
    for found, expected in zip(
        indexer.quantize_index_queries(*moved), index_reference.quantize_index_queries(*args), strict=True
    ):
        assert torch.equal(found.cpu(), expected)


def _logits(problem: Index, *, clean: bool = True, fill: float = float("nan")) -> Tensor:
    out = torch.full((len(problem.q8), problem.max_len), fill, device=problem.q8.device)
    return indexer.index_logits(*problem.args(), out=out, clean=clean)


@pytest.mark.parametrize(
    ("lengths", "max_len"),
    [([0, 1, 63, 64, 65, 200], 193), ([4000], 4096), ([5000, 3, 0] * 40, 5056)],
    ids=["ragged", "one query", "many queries"],
)
def test_index_logits_are_exact(lengths: list[int], max_len: int, seed: int) -> None:
    problem = draw_index(seed, lengths, max_len)
    expected = index_reference.index_logits(*problem.args())
    assert torch.equal(_logits(problem.to("cuda")).cpu(), expected)
    kept = _logits(problem.to("cuda"), clean=False, fill=7.0).cpu()
    seen = torch.arange(max_len) < problem.seq_lens[:, None]
    assert torch.equal(kept, torch.where(seen, expected, 7.0))


def test_index_logits_of_ordinary_weights(seed: int) -> None:
    problem = draw_index(seed, [3000, 70], max_len=3000, exact=False)
    expected = index_reference.index_logits(*problem.args())
    found = _logits(problem.to("cuda")).cpu()
    seen = expected > -torch.inf
    assert torch.equal(seen, found > -torch.inf)
    assert relative(found[seen], expected[seen]) < tolerances.FLOAT32_SUMS


def test_captured_logits_follow_their_inputs(seed: int) -> None:
    first = draw_index(seed, [1000] * 5, max_len=1024).to("cuda")
    other = draw_index(seed + 1, [0, 1000, 64, 7, 1000], max_len=1024)
    out = torch.full((5, 1024), float("nan"), device="cuda")
    graph = _replay(lambda: indexer.index_logits(*first.args(), out=out))
    for name in ("q8", "weight", "seq_lens", "page_table"):
        getattr(first, name).copy_(getattr(other, name))
    first.cache[: len(other.cache)].copy_(other.cache)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out.cpu(), index_reference.index_logits(*other.args()))


@pytest.mark.parametrize("rows", [None, 3])
def test_index_topk(rows: int | None, seed: int) -> None:
    problem = draw_index(seed, [0, 5, 3000, 700, 512], max_len=3008, exact=False)
    found = indexer.index_topk(*problem.to("cuda").args(), topk=512, rows=rows).cpu()
    logits = index_reference.index_logits(*problem.args())
    for t, length in enumerate(problem.seq_lens.tolist()):
        best = logits[t, :length].topk(min(512, length))
        kept = found[t, : len(best.indices)].long()
        assert found[t, len(kept) :].eq(-1).all()
        # Places of nearly equal scores may come in another order, or one instead of the other.
        assert relative(logits[t, kept], best.values) < tolerances.FLOAT32_SUMS or not length
        assert len(kept.unique()) == len(kept)
