"""The SM80 kernels of attention and indexer, interpreted, against references and float64; and their plans.

Interpreted products of bf16 are wrong and casts to it truncate, so rows and results are float32 here.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels_ref import attention as reference
from kernels_ref import indexer as index_reference
from kernels_ref.sm80 import attention, indexer
from kernels_ref.sm80.tiles import AttentionPlan, ScoresPlan, Walk
from tests import tolerances
from tests.kernels.interpreted import InterpretedError, call
from tests.kernels.listed import POISON, draw_attention, draw_index, exact_attention, exact_logits, table
from tests.kernels.test_attention_reference import WEIGHT_SCALE, relative

LENGTHS, EXTRA_LENGTHS = [64, 1, 33], [0, 96, 7]


def stored(kv: Tensor, weight: Tensor, eps: float, *places: Tensor) -> Tensor:
    """Return the cache after `store_kv`."""
    *_, cache = places
    attention.store_kv(kv, weight, eps, *places)
    return cache


def stored_keys(k: Tensor, weight: Tensor, eps: float, *places: Tensor) -> Tensor:
    """Return the cache after `store_index_keys`."""
    *_, cache = places
    indexer.store_index_keys(k, weight, eps, *places)
    return cache


@pytest.mark.parametrize(
    ("heads", "extra", "places"),
    [(3, 0, 1), (3, 96, 1), (17, 96, 1), (3, 96, 1000), (17, 0, 1000)],
    ids=["one source", "two sources", "two groups of heads", "split", "split, one source"],
)
def test_attention(heads: int, extra: int, places: int, seed: int) -> None:
    drawn = {"width": 64, "extra": extra, "lengths": LENGTHS, "extra_lengths": EXTRA_LENGTHS}
    problem = draw_attention(seed, tokens=3, heads=heads, dtype=torch.float32, **drawn)
    result = call(attend_with_places, places, *problem.args(), **problem.keywords())
    limit = tolerances.FLOAT32_SUMS if places == 1 else tolerances.FLOAT16_PARTS
    assert relative(result, exact_attention(problem)) < limit


def test_the_window_of_a_picture_is_wider_and_leaves_text_alone(seed: int) -> None:
    """A step with pictures has lists of up to 512; its rows of text are those of a step without."""
    extra = {"extra": 96, "extra_lengths": EXTRA_LENGTHS}
    problem = draw_attention(
        seed, tokens=3, heads=3, dtype=torch.float32, width=512, lengths=[509, 128, 1], **extra
    )
    problem.indices[1:, 128:] = -1
    wide = call(attend_with_places, 1, *problem.args(), **problem.keywords())
    assert relative(wide, exact_attention(problem)) < tolerances.FLOAT32_SUMS
    narrow = replace(
        problem, indices=problem.indices[:, :128].contiguous(), lengths=problem.lengths.clamp(max=128)
    )
    text = call(attend_with_places, 1, *narrow.args(), **narrow.keywords())
    assert torch.equal(wide[1:], text[1:]) and not torch.equal(wide[0], text[0])


def attend_with_places(places: int, *args: Tensor, **kwargs: Tensor) -> Tensor:
    """Return `sparse_attention` into a poisoned tensor, as on a card that runs `places` blocks at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "blocks_at_once", lambda *_: places)
        return attention.sparse_attention(*args, out=torch.full(args[0].shape, float("nan")), **kwargs)


def test_attention_without_keys(seed: int) -> None:
    problem = draw_attention(seed, tokens=3, heads=2, width=32, lengths=[1, 0, 1], dtype=torch.float32)
    problem.indices[0], problem.indices[2, 0] = -1, 5
    problem.cache[5] = torch.arange(512) / 512
    for places in (1, 1000):
        out = call(attend_with_places, places, *problem.args())
        assert torch.equal(out[:2], torch.zeros_like(out[:2]))
        assert relative(out, exact_attention(problem)) < tolerances.FLOAT16_PARTS
    problem.sink.fill_(-torch.inf)
    out = call(attend_with_places, 1, *problem.args())
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert relative(out[2], problem.cache[5].expand(2, 512)) < tolerances.FLOAT32_SUMS


def test_attention_refuses_what_it_cannot_address(seed: int) -> None:
    problem = draw_attention(seed, tokens=1, heads=1, width=32, dtype=torch.float32)
    with pytest.raises(InterpretedError, match="expected all of them or none"):
        call(attention.sparse_attention, *problem.args(), extra_cache=problem.cache)
    strided = problem.cache.repeat(1, 2)[:, :512]
    with pytest.raises(InterpretedError, match=r"`cache`: expected .* contiguous"):
        call(cut_cache_attention, strided.repeat(1, 2), *problem.args())


def cut_cache_attention(wide: Tensor, q: Tensor, cache: Tensor, *rest: Tensor) -> Tensor:
    """Return `sparse_attention` on a cache with gaps between its rows."""
    return attention.sparse_attention(q, wide[:, :512], *rest)


@pytest.mark.parametrize(
    ("blocks", "tiles", "places", "splits"),
    [
        (1, 20, 216, 20),  # one token, 640 keys: a block for each tile
        (64, 20, 264, 4),  # 64 tokens on 132 processors: one round of 256 blocks
        (64, 20, 216, 3),  # on 108 processors: one round of 192
        (512, 20, 264, 1),
        (8192, 20, 216, 1),  # prefill
        (1, 260, 216, 29),  # a long list: nine tiles a block, as with 32 splits, the most there are
        (1, 1, 216, 1),
        (1, 0, 216, 1),  # lists of width 0
    ],
)
def test_keys_are_split_where_the_card_has_room(blocks: int, tiles: int, places: int, splits: int) -> None:
    assert attention.splits_of(blocks, tiles, places) == splits


@pytest.mark.parametrize("places", [torch.int32, torch.int64])
def test_store_kv(places: torch.dtype, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    kv = torch.randn(5, 640, generator=gen).bfloat16()[:, :512]
    weight = (torch.rand(512, generator=gen) + 0.5).bfloat16()
    positions = torch.tensor([0, 3, 128, 7, 299], dtype=places)
    slots = torch.tensor([9, -1, 2, 0, 11], dtype=places)
    args = (kv, weight, 1e-6, table(), positions, slots)
    cache, expected = torch.full((2, 12, 512), POISON, dtype=torch.float32)
    reference.store_kv(*args, expected)
    result = call(stored, *args, cache)
    assert relative(result, expected) < tolerances.FLOAT32_SUMS
    rest = [1, 3, 4, 5, 6, 7, 8, 10]
    assert torch.equal(result[rest], cache[rest])


def test_store_index_keys(seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    k, weight = torch.randn(6, 128, generator=gen), torch.rand(128, generator=gen) + 0.5
    k[2] = 0
    positions, slots = torch.tensor([0, 3, 4, 299, 9, 8]), torch.tensor([63, -1, 64, 130, 0, 65])
    args = (k, weight, 1e-6, table(), positions, slots)
    cache, expected = torch.full((2, 3, 64 * 132), POISON, dtype=torch.uint8)
    index_reference.store_index_keys(*args, expected)
    result = call(stored_keys, *args, cache)
    close_codes(result, expected, slots)


def close_codes(result: Tensor, expected: Tensor, slots: Tensor) -> None:
    """Compare two index caches: codes may differ by one where a sum in another order met a tie."""
    codes, wanted = (x[:, : 64 * 128].reshape(-1, 128).view(torch.int8).int() for x in (result, expected))
    differ = (codes - wanted).abs()
    assert int(differ.max()) <= 1
    kept = slots[slots >= 0]
    assert float(differ[kept].float().mean()) < tolerances.CODE_FLIPS
    scales, steps = (x[:, 64 * 128 :].reshape(-1, 4).view(torch.float32)[:, 0] for x in (result, expected))
    assert relative(scales[kept], steps[kept]) < tolerances.FLOAT32_SUMS
    rest = torch.ones(len(scales), dtype=torch.bool, device=kept.device)
    rest[kept] = False
    assert torch.equal(codes[rest], wanted[rest])
    assert torch.equal(scales[rest], steps[rest])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantize_index_queries_is_bit_equal(dtype: torch.dtype, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(3, 64, 128, generator=gen).bfloat16()
    q[1, 7] = 0
    weight = torch.randn(3, 64, generator=gen).to(dtype)
    args = (q, weight, WEIGHT_SCALE, table(), torch.tensor([0, 17, 299]))
    for found, expected in zip(
        call(indexer.quantize_index_queries, *args),
        index_reference.quantize_index_queries(*args),
        strict=True,
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("share", [1, 2], ids=["a page a block", "two pages a block"])
def test_index_logits_are_exact(share: int, seed: int) -> None:
    problem = draw_index(seed, [0, 1, 63, 64, 65, 200], max_len=193)
    expected = exact_logits(problem)
    poison = torch.full(expected.shape, float("nan"))
    assert torch.equal(call(logits_of_share, share, True, poison, *problem.args()).double(), expected)
    kept = call(logits_of_share, share, False, torch.full_like(poison, 7.0), *problem.args())
    seen = torch.arange(193) < problem.seq_lens[:, None]
    assert torch.equal(kept.double(), torch.where(seen, expected, 7.0))


@pytest.mark.parametrize("rank", [0, 2])
def test_index_logits_of_every_third_query_are_the_same_bits(rank: int, seed: int) -> None:
    """What ranks that share the queries rely on; their rows are views into what belongs to all queries."""
    problem = draw_index(seed, [150, 3, 70, 128, 0, 64, 90], max_len=150, exact=False)
    q8, cache, weight, lengths, tables, most = problem.args()
    mine = slice(rank, None, 3)
    share = (q8[mine].contiguous(), cache, weight[mine], lengths[mine].contiguous(), tables[mine], most)
    out = [torch.full((rows, most), float("nan")) for rows in (len(q8), len(share[0]))]
    whole = call(logits_of_share, 1, True, out[0], *problem.args())
    found = call(logits_of_share, 2, True, out[1], *share)
    assert torch.equal(found.view(torch.int32), whole[mine].contiguous().view(torch.int32))


def logits_of_share(share: int, clean: bool, out: Tensor, *args: Tensor) -> Tensor:
    """Return `index_logits` with a given number of pages a block, lengths as a column."""
    q8, cache, weight, lengths, *rest = args
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexer, "pages_of_a_block", lambda *_: share)
        return indexer.index_logits(q8, cache, weight, lengths[:, None], *rest, out=out, clean=clean)


def test_index_topk(seed: int) -> None:
    problem = draw_index(seed, [0, 5, 150, 130], max_len=150, exact=False)
    best = call(indexer.index_topk, *problem.args(), topk=16, rows=3)
    assert torch.equal(best, index_reference.index_topk(*problem.args(), topk=16))


@pytest.mark.parametrize(
    ("tokens", "pages", "places", "share"),
    [
        *((1, 512, 1056, 1), (2, 528, 1056, 1), (3, 512, 1056, 2), (8, 512, 1056, 4)),
        # Two rounds either way.
        *((40, 512, 1056, 10), (64, 512, 1056, 16)),
        *((4096, 2048, 864, 16), (1, 1, 864, 1)),
    ],
)
def test_blocks_take_more_pages_when_there_are_many(tokens: int, pages: int, places: int, share: int) -> None:
    assert indexer.pages_of_a_block(tokens, pages, places, 16) == share


def test_an_index_cache_of_another_shape_is_refused(seed: int) -> None:
    q8, cache, *rest = draw_index(seed, [3], max_len=4).args()
    with pytest.raises(InterpretedError, match=r"`cache`: expected uint8 \[any, 8448\], contiguous"):
        call(indexer.index_logits, q8, cache[:, :-4], *rest)


# ---- plans: how a kernel runs changes its times, not its results


def attend_with_plan(split: bool, walk: Walk, *args: Tensor, **kwargs: Tensor) -> Tensor:
    """Return `sparse_attention` under a plan of one walk, on a card that has room for splits or has none."""
    plan = AttentionPlan(0, walk, walk, 2)
    return attend_with_places(1000 if split else 1, *args, plan=plan, **kwargs)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("walk", [Walk(1, 2, 1), Walk(2, 3, 2), Walk(1, 4, 4)], ids=str)
def test_attention_under_plans_that_tuning_may_choose(walk: Walk, split: bool, seed: int) -> None:
    drawn = {"width": 64, "extra": 96, "lengths": LENGTHS, "extra_lengths": EXTRA_LENGTHS}
    problem = draw_attention(seed, tokens=3, heads=2, dtype=torch.float32, **drawn)
    result = call(attend_with_plan, split, walk, *problem.args(), **problem.keywords())
    assert relative(result, exact_attention(problem)) < tolerances.FLOAT16_PARTS


@pytest.mark.parametrize("plan", [ScoresPlan(0, 4, 2, 1, 4), ScoresPlan(0, 2, 4, 32, 16)], ids=str)
def test_scores_under_plans_that_tuning_may_choose(plan: ScoresPlan, seed: int) -> None:
    problem = draw_index(seed, [0, 65, 200], max_len=200)
    found = call(indexer.index_logits, *problem.args(), plan=plan)
    assert torch.equal(found.double(), exact_logits(problem))
