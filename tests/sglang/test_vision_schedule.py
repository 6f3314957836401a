"""SGLang's own requests, prefix cache and admission of prefills, when requests hold pictures."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from sglang.srt.managers.schedule_batch import MultimodalInputs, Req
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.managers.scheduler_components.logprob_result_processor import SchedulerLogprobResultProcessor
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import IncLockRefResult, InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_radix_cache import SWARadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

from tests.sglang import pictures, world

_PAGE = 256
#: The largest block: 3 PADs and 378 positions.
_LARGEST = 381

Blocks = list[tuple[int, int]]


def _request(length: int, blocks: Blocks, *, ids: list[int] | None = None, **sampling: Any) -> Req:
    params = SamplingParams(max_new_tokens=16, **sampling)
    made = Req("r", "", array("q", ids or range(length)), params, vocab_size=1 << 31)
    made.multimodal_inputs = pictures.spanned(*blocks) if blocks else None
    return made


def _packed(first: int, number: int, tokens: int = 378) -> Blocks:
    """Return blocks back to back."""
    found: Blocks = []
    for _ in range(number):
        first = found[-1][1] if found else first
        found.append((first, first + 3 - first % 4 + tokens))
    return found


def _is_inside(position: int, blocks: Blocks) -> bool:
    return any(first < position < stop for first, stop in blocks)


# ---- prefixes


def _cache(*prompts: list[int]) -> SWARadixCache:
    """Return the prefix cache that SGLang makes for this model, with pages of 256, holding prompts."""
    allocator = SWATokenToKVPoolAllocator(
        8192, 8192, _PAGE, torch.bfloat16, "cpu", world.make_pool(), need_sort=False
    )
    cache = SWARadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=allocator,
            page_size=_PAGE,
            sliding_window_size=128,
        )
    )
    for prompt in prompts:
        whole = array("q", prompt[: len(prompt) // _PAGE * _PAGE])
        # Both kinds of slots, as `alloc_extend` gives them, whose kernel needs a GPU.
        slots = allocator.full_attn_allocator.alloc(len(whole))
        allocator.full_to_swa_index_mapping[slots] = allocator.swa_attn_allocator.alloc(len(whole))
        cache.insert(InsertParams(key=RadixKey(whole), value=slots, prev_prefix_len=0))
    return cache


@pytest.mark.parametrize(
    ("blocks", "hit"),
    [
        ([], 1024),
        ([(100, 400)], 1024),
        # It would end inside; the next page boundary before it lies at 768.
        ([(800, 1100)], 768),
        # In front of the first page boundary: nothing of the prompt is left.
        ([(200, 1100)], 0),
        # Shortened twice: 768 lies in the picture before.
        ([(700, 900), (900, 1100)], 512),
        # At its first position, and behind its last one, nothing is divided.
        ([(1024, 1100)], 1024),
        ([(700, 1024)], 1024),
    ],
)
def test_a_cached_prefix_does_not_end_inside_a_picture(blocks: Blocks, hit: int) -> None:
    prompt = list(range(1200))
    cache = _cache(prompt)
    request = _request(1200, blocks)
    request.init_next_round_input(cache)
    assert len(request.prefix_indices) == hit
    # A request is asked about its prefix in every round.
    request.init_next_round_input(cache)
    assert len(request.prefix_indices) == hit


def test_a_limit_is_that_of_its_round(monkeypatch: pytest.MonkeyPatch) -> None:
    request = _request(1200, [(800, 1100)])
    request.init_next_round_input(_cache(list(range(1200))))
    assert len(request.prefix_indices) == 768
    # What the cache holds decides anew: nothing is divided when less is cached.
    request.init_next_round_input(_cache(list(range(600))))
    assert len(request.prefix_indices) == 512
    assert request._compute_max_prefix_len(1200) == 1199


def test_stock_ends_a_prefix_inside_a_picture() -> None:
    """The twin."""
    request = _request(1200, [(800, 1100)])
    Req.init_next_round_input.__wrapped__(request, _cache(list(range(1200))))
    assert len(request.prefix_indices) == 1024


def test_another_picture_is_another_prefix() -> None:
    """Trap 4: ids of a picture are made of its hash, so that nothing of the other one is found."""
    block = (520, 900)
    red, blue = ([*range(520), *[value] * 380, *range(900, 1300)] for value in (1_000_001, 1_000_002))
    cache = _cache(red)
    same, other = _request(1300, [block], ids=red), _request(1300, [block], ids=blue)
    same.init_next_round_input(cache)
    other.init_next_round_input(cache)
    assert len(same.prefix_indices) == 1280 and len(other.prefix_indices) == 512


# ---- steps


@pytest.mark.parametrize(
    ("blocks", "start", "end", "expected"),
    [
        ([], 0, 512, 512),
        ([(300, 681)], 0, 512, 300),
        ([(300, 512)], 0, 512, 512),
        ([(512, 893)], 0, 512, 512),
        ([(300, 681)], 300, 1000, 1000),
        # It cannot be left whole; the attention's metadata reports it.
        ([(300, 681)], 300, 512, 512),
    ],
)
def test_an_end_inside_a_picture_moves_to_its_start(
    blocks: Blocks, start: int, end: int, expected: int
) -> None:
    request = _request(1000, blocks)
    request.set_extend_range(start, end)
    assert (request.extend_range.start, request.extend_range.end) == (start, expected)


def _adder(chunk: int | None, *, total: int = 1 << 20, window: int = 1 << 20) -> PrefillAdder:
    """Return SGLang's admission of one step over a pool of the given tokens."""
    allocator = MagicMock(spec=SWATokenToKVPoolAllocator)
    allocator.full_available_size.return_value = total
    allocator.swa_available_size.return_value = window
    cache = MagicMock(sliding_window_size=128, disable=False)
    cache.supports_mamba.return_value = False
    cache.full_evictable_size.return_value = cache.swa_evictable_size.return_value = 0
    cache.inc_lock_ref.return_value = IncLockRefResult()
    return PrefillAdder(_PAGE, cache, allocator, None, 1.0, 16384, chunk)


def prefill(request: Req, chunk: int, first: int = 0) -> list[int]:
    """Prefill a request step by step, as the scheduler does, and return where the steps ended."""
    request.prefix_indices = torch.arange(first)
    request._refresh_fill_ids()
    request.last_node = None
    adder = _adder(chunk)
    adder.add_one_req(request, False, None)
    unfinished, ends = adder.new_chunked_req, [request.extend_range.end]
    while unfinished is not None:
        request.prefix_indices = torch.arange(ends[-1])
        request.init_next_round_input()
        adder = _adder(chunk)
        unfinished = adder.add_chunked_req(request)
        assert adder.can_run_list == [request]
        ends.append(request.extend_range.end)
    return ends


@pytest.mark.parametrize("chunk", [1024, 2048, 8192])
def test_96_packed_pictures_are_prefilled_whole(chunk: int) -> None:
    """There is hardly a page boundary between packed pictures, so that steps have to end elsewhere."""
    blocks = _packed(7, 96)
    length = blocks[-1][1] + 50
    ends = prefill(_request(length, blocks), chunk)
    assert ends[-1] == length and not any(_is_inside(end, blocks) for end in ends)
    steps = [b - a for a, b in zip([0, *ends], ends, strict=False)]
    assert min(steps) > 0 and max(steps) <= chunk
    # A step gives up less than a picture.
    assert all(step > chunk - _LARGEST for step in steps[1:-1])


def test_any_arrangement_makes_progress() -> None:
    choose = random.Random(11)
    for _ in range(300):
        blocks: Blocks = []
        position = choose.randrange(600)
        for _ in range(choose.randrange(1, 12)):
            position += choose.choice((0, 0, 1, choose.randrange(700)))
            blocks += _packed(position, 1, 90 + 4 * choose.randrange(73))
            position = blocks[-1][1]
        length = position + choose.randrange(1, 300)
        # From a cached prefix: whole pages that end in no picture.
        first = choose.choice([p for p in range(0, length - 1, _PAGE) if not _is_inside(p, blocks)])
        ends = prefill(_request(length, blocks), choose.choice((1024, 1536, 8192)), first)
        assert ends[-1] == length and not any(_is_inside(end, blocks) for end in ends)
        assert all(a < b for a, b in zip([first, *ends], ends, strict=False))


@pytest.mark.parametrize("chunk", [1024, 8192])
def test_text_is_cut_as_stock_cuts_it(chunk: int) -> None:
    ends = prefill(_request(20_000, []), chunk)
    assert ends == [*range(chunk, 20_000, chunk), 20_000]


def test_a_new_request_waits_when_little_of_a_step_is_left() -> None:
    with_pictures, text = _request(3000, _packed(3, 5)), _request(3000, [])
    for request, expected in ((with_pictures, AddReqResult.OTHER), (text, AddReqResult.CONTINUE)):
        request._refresh_fill_ids()
        adder = _adder(300)
        assert adder.add_one_req(request, False, None) is expected
        # Text is begun with the page that fits; pictures wait.
        assert adder.can_run_list == ([request] if request is text else [])
    # One that fits whole is taken.
    short = _request(200, [(3, 99)])
    short._refresh_fill_ids()
    adder = _adder(300)
    adder.add_one_req(short, False, None)
    assert adder.can_run_list == [short] and adder.new_chunked_req is None


def test_a_new_request_waits_for_the_window_pool() -> None:
    """SGLang would cut it to what the pool of window rows has left, here one page."""
    request = _request(3000, _packed(3, 5))
    request._refresh_fill_ids()
    assert _adder(8192, window=128 + 3 * _PAGE - 1)._swa_chunk_cap() == _PAGE
    adder = _adder(8192, window=128 + 3 * _PAGE - 1)
    assert adder.add_one_req(request, False, None) is AddReqResult.OTHER and adder.can_run_list == []
    adder = _adder(8192, window=128 + 4 * _PAGE)
    adder.add_one_req(request, False, None)
    assert adder.can_run_list == [request] and not _is_inside(request.extend_range.end, _packed(3, 5))


def test_a_new_request_waits_for_what_its_own_prefix_holds() -> None:
    """While SGLang decides, it holds the cached prefix, whose window rows no longer count as free."""
    blocks = _packed(256, 5)
    request = _request(3000, blocks)
    request._refresh_fill_ids()
    request.prefix_indices = torch.arange(_PAGE)
    adder = _adder(8192, window=128 + 3 * _PAGE - 1)
    cache = adder.tree_cache
    cache.swa_evictable_size.return_value = 1 << 20
    held = {"inc_lock_ref": 0, "dec_lock_ref": 1 << 20}
    for name, evictable in held.items():

        def hold(*args: Any, evictable: int = evictable) -> IncLockRefResult:
            cache.swa_evictable_size.return_value = evictable
            return IncLockRefResult()

        getattr(cache, name).side_effect = hold
    assert adder.add_one_req(request, False, None) is AddReqResult.OTHER and adder.can_run_list == []
    # The twin: stock begins it with one page, which divides the first picture.
    PrefillAdder.add_one_req.__wrapped__(adder, request, False, None)
    assert adder.can_run_list == [request] and request.extend_range.length == _PAGE


def test_an_unfinished_request_waits_and_lets_nothing_else_begin() -> None:
    """SGLang follows one unfinished request at a time, and asserts that."""
    blocks = _packed(3, 8)
    request, other = _request(4000, blocks), _request(5000, [])
    other._refresh_fill_ids()
    request._refresh_fill_ids()
    request.prefix_indices = torch.arange(blocks[2][0])
    adder = _adder(8192, window=_PAGE + 400)
    assert adder.add_chunked_req(request) is request and adder.can_run_list == []
    assert adder.add_one_req(other, True, None) is AddReqResult.OTHER and adder.new_chunked_req is None
    # With room it goes on, ends in front of a picture, and what is left of the step begins nothing.
    adder = _adder(1024)
    assert adder.add_chunked_req(request) is request
    assert adder.can_run_list == [request] and request.extend_range.end == blocks[4][0]
    assert adder.add_one_req(other, True, None) is AddReqResult.OTHER and adder.new_chunked_req is None


def test_a_last_step_leaves_room_for_others() -> None:
    blocks = _packed(3, 2)
    request, other = _request(blocks[-1][1] + 5, blocks), _request(100, [])
    for made in (request, other):
        made._refresh_fill_ids()
    request.prefix_indices = torch.arange(blocks[1][0])
    adder = _adder(1024)
    assert adder.add_chunked_req(request) is None
    adder.add_one_req(other, False, None)
    assert adder.can_run_list == [request, other]


# ---- what else SGLang does with the ids of a request


def test_log_probabilities_of_a_prompt_name_tokens_that_exist() -> None:
    """Trap 19: ids of pictures are beyond every table."""
    ids = [5, 6, *[1_000_007] * 380, 8]
    request = _request(len(ids), [(2, 382)], ids=ids)
    request.logprob = SimpleNamespace(input_token_logprobs_idx=None)
    request.logprob_start_len = 0
    processor = SchedulerLogprobResultProcessor(
        server_args=SimpleNamespace(enable_mis=False), model_config=SimpleNamespace(vocab_size=512)
    )
    processor._process_input_token_logprobs(request, [0.0] * len(ids))
    assert request.logprob.input_token_logprobs_idx == [5, 6, *[0] * 380, 8]


def test_a_retracted_request_keeps_its_pictures() -> None:
    """Trap 22: it is prefilled again with what it has said, and pictures stay whole."""
    blocks = _packed(5, 4)
    request = _request(blocks[-1][1] + 10, blocks)
    inputs: MultimodalInputs = request.multimodal_inputs
    request.output_ids.extend([1, 2, 3])
    request.reset_for_retract()
    assert request.multimodal_inputs is inputs
    ends = prefill(request, 1024)
    assert ends[-1] == blocks[-1][1] + 13 and not any(_is_inside(end, blocks) for end in ends)
