"""Scheduling that leaves pictures whole: no prefill step stops inside one, and no cached prefix ends there.

The positions of a picture see each other, so that all of them have to be computed in one step. A request
without pictures passes through all of this untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from dsv4convert.runtime.vision.blocks import start_around

#: Tokens that a step must have room for before a part of a request with pictures is taken. A picture has at
#: most 381, so that such a step ends behind its first picture or in front of it, and always goes on.
ROOM: Final = 512
#: Attribute of a request: longest prefix that may be taken from the cache.
_LIMIT: Final = "dsv4_longest_prefix"


def match_prefix(stock: Any, module: ModuleType) -> Callable[..., None]:
    """V3: look a prefix up; if it ends inside a picture, look again for one that ends before it."""

    def init_next_round_input(self: Any, tree_cache: Any = None, cow_mamba: bool | None = None) -> None:
        setattr(self, _LIMIT, None)
        stock(self, tree_cache, cow_mamba)
        while tree_cache is not None:
            start = start_around(self.multimodal_inputs, len(self.prefix_indices) + self.host_hit_length)
            if start is None:
                return
            setattr(self, _LIMIT, start)
            stock(self, tree_cache, cow_mamba)

    return init_next_round_input


def longest_prefix(stock: Any, module: ModuleType) -> Callable[..., int]:
    """V3b: tokens that may be looked up."""

    def _compute_max_prefix_len(self: Any, input_len: int) -> int:
        longest: int = stock(self, input_len)
        limit: int | None = getattr(self, _LIMIT, None)
        return longest if limit is None else min(longest, limit)

    return _compute_max_prefix_len


def end_of_step(stock: Any, module: ModuleType) -> Callable[..., None]:
    """V4: an end inside a picture moves to the picture's start."""

    def set_extend_range(self: Any, start: int, end: int) -> None:
        cut = start_around(self.multimodal_inputs, end)
        # A step that would be empty is left as it is: patch V1 reports it. `ROOM` keeps that from happening.
        stock(self, start, end if cut is None or cut <= start else cut)

    return set_extend_range


def admit(stock: Any, module: ModuleType) -> Callable[..., Any]:
    """V4b: a new request with pictures waits when the step has room for less than `ROOM` of its tokens."""

    def add_one_req(self: Any, req: Any, has_chunked_req: bool, truncation_align_size: int | None) -> Any:
        left = len(req.full_untruncated_fill_ids) - len(req.prefix_indices)
        if req.multimodal_inputs is not None and _too_short(self, req, left):
            return module.AddReqResult.OTHER
        return stock(self, req, has_chunked_req, truncation_align_size)

    return add_one_req


def _too_short(adder: Any, req: Any, left: int) -> bool:
    """Tell whether SGLang would cut the request, and to less than `ROOM` tokens."""
    room = adder.rem_chunk_tokens
    if room is None:
        return False
    left = adder.ceil_paged_tokens(left)
    if adder.is_hybrid_swa:
        # SGLang holds the cached prefix while it looks, so that less of the pool counts as free.
        with adder._lock_node(req.last_node):
            needed = adder._swa_budget_for_req(left, req.swa_host_hit_length)
            if needed >= adder.rem_swa_tokens:
                room = min(room, adder._swa_chunk_cap(req.swa_host_hit_length))
    return bool(left > room and room < ROOM)


def go_on(stock: Any, module: ModuleType) -> Callable[..., Any]:
    """V4c: the same for a request that earlier steps began; SGLang offers it again in the next one."""

    def add_chunked_req(self: Any, req: Any) -> Any:
        if req.multimodal_inputs is None:
            return stock(self, req)
        unfinished = req if _cannot_go_on(self, req) else stock(self, req)
        if unfinished is not None:
            # Its step ended early, or waits. What is left of the step must not begin another request, because
            # SGLang follows one unfinished request at a time.
            self.rem_chunk_tokens = 0
        return unfinished

    return add_chunked_req


def _cannot_go_on(adder: Any, req: Any) -> bool:
    left = len(req.full_untruncated_fill_ids) - len(req.prefix_indices)
    room = min(adder.rem_chunk_tokens, int(adder.rem_total_tokens))
    if adder.is_hybrid_swa:
        room = min(room, int(adder.rem_swa_tokens) - adder.page_size)
    return bool(left > room and room < ROOM)
