"""Rows of attention and indexer: decode and prefill, beside plain torch in the same process.

Lists are full: 128 rows of a window, which lie together, and 512 rows picked from all of a 2 GiB cache. Bytes
are what lists and lengths say must be read, and what must be written.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
from torch import Tensor

from benchmarks.gpu import Call, Context, Row, relative_error, time_calls
from kernels_ref import attention as reference
from kernels_ref import indexer as index_reference
from kernels_ref.indexer import INDEX_DIM, INDEX_HEADS, PAGE, PAGE_BYTES
from kernels_ref.rotary import frequencies, rotary_table
from kernels_ref.sm80 import attention, indexer
from kernels_ref.sm80.inputs import PICKED, SCALE, WINDOW, Attention, Pools, Scores, scores, sets

#: Keys of the indexer at a context of 131,072 tokens: one for four.
KEYS = 32768
#: Larger errors are refused: two roundings to bfloat16, and float32 sums.
ATTENTION_LIMIT, LOGITS_LIMIT = 4e-3, 1e-5
_JUDGED = 64


def rows(context: Context) -> Iterator[Row]:
    """Yield the rows."""
    sizes = [(1, 16), (8, 16), (64, 16), (512, 16), (4096, 16), (64, 8), (64, 64)]
    pools = Pools.draw()
    for tokens, heads in sizes[2:3] if context.quick else sizes:
        yield from _attention(pools, tokens, heads)
    del pools
    for tokens in (64,) if context.quick else (1, 8, 64):
        yield from _logits(tokens, KEYS)
    if not context.quick:
        yield from _logits(1024, 8192, shared=True)
        yield from _topk()
    for tokens in (64,) if context.quick else (64, 8192):
        yield from _stores(tokens)


# ---- attention


def _exact(problem: Attention, tokens: int) -> Tensor:
    """Return the first results in float64."""
    q, near, length = problem.q[:tokens], problem.near[:tokens], problem.near_length[:tokens]
    cache, far = problem.extra["extra_cache"], problem.extra["extra_indices"][:tokens]
    # Only listed rows become float64: the caches have gigabytes.
    rows = [cache[listed].flatten(0, 1).double() for cache, listed in ((problem.window, near), (cache, far))]
    renamed = [torch.arange(x.numel(), device=x.device).view(x.shape).int() for x in (near, far)]
    extra = {"extra_cache": rows[1], "extra_indices": renamed[1]}
    extra["extra_lengths"] = problem.extra["extra_lengths"][:tokens]
    return reference.sparse_attention(q.double(), rows[0], renamed[0], length, problem.sink, SCALE, **extra)


def _gathered(problem: Attention, mask: Tensor) -> Tensor:
    """Do the same in torch: gather both lists and a row of zeros whose score is the sink, then SDPA."""
    q, extra = problem.q, problem.extra
    zero = torch.zeros(len(q), 1, 512, dtype=q.dtype, device=q.device)
    keys = (problem.window[problem.near], extra["extra_cache"][extra["extra_indices"]], zero)
    keys = torch.cat(keys, 1)[:, None]
    mask = mask.expand(len(q), 1, -1, -1)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return sdpa(q[:, None], keys, keys, attn_mask=mask, scale=SCALE)[:, 0]


def _attention(pools: Pools, tokens: int, heads: int) -> Iterator[Row]:
    problems = pools.problems(tokens, heads)
    nbytes = tokens * (WINDOW + PICKED) * 1024
    out = torch.full_like(problems[0].q, float("nan"))
    calls: list[Call] = [partial(problem.call, out) for problem in problems]
    calls[0]()
    expected = _exact(problems[0], _JUDGED)
    error = relative_error(out[:_JUDGED], expected)
    _require(error < ATTENTION_LIMIT and not out.isnan().any(), f"attention of {tokens} tokens", error)
    group, case = "sparse attention, 128 + 512 keys", f"{tokens} tokens, {heads} heads"
    ops = tokens * heads * (WINDOW + PICKED) * 512 * 4
    yield Row(group, case, "ours", *time_calls(calls), nbytes, ops, error)
    mask = torch.zeros(heads, WINDOW + PICKED + 1, dtype=torch.bfloat16, device="cuda")
    mask[:, -1] = problems[0].sink
    error = relative_error(_gathered(problems[0], mask)[:_JUDGED], expected)
    base = [partial(_gathered, problem, mask) for problem in problems[:8]]
    yield Row(group, case, "torch gather + SDPA", *time_calls(base), nbytes, ops, error)


# ---- indexer


def _torch_scores(problem: Scores) -> Tensor:
    """Score in torch: gather the pages, products in bfloat16, relu, weighted sum, scale."""
    pages = problem.cache[problem.page_table]
    codes = pages[..., : PAGE * INDEX_DIM].view(torch.int8).to(torch.bfloat16)
    scales = pages[..., PAGE * INDEX_DIM :].contiguous().view(torch.float32).flatten(1)
    queries = problem.q8.bfloat16().transpose(1, 2)
    products = torch.bmm(codes.reshape(len(queries), -1, INDEX_DIM), queries)
    return torch.bmm(products.relu_().float(), problem.weight[..., None])[..., 0] * scales


def _logits_calls(
    tokens: int, keys: int, shared: bool = False
) -> tuple[list[Scores], list[Call], Tensor, int]:
    """Return problems, a call for each, where they write, and the bytes one must move."""
    once = (1 if shared else tokens) * keys * PAGE_BYTES // PAGE
    nbytes = once + tokens * (keys * 4 + INDEX_HEADS * INDEX_DIM)
    problems = scores(tokens, keys, shared)
    out = torch.full((tokens, keys), float("nan"), device="cuda")
    calls: list[Call] = [partial(indexer.index_logits, *p.args(), out=out, clean=False) for p in problems]
    return problems, calls, out, nbytes


def _logits(tokens: int, keys: int, shared: bool = False) -> Iterator[Row]:
    problems, calls, out, nbytes = _logits_calls(tokens, keys, shared)
    calls[0]()
    first = problems[0]
    judged = [x[:2] if isinstance(x, Tensor) and x is not first.cache else x for x in first.args()]
    expected = index_reference.index_logits(*judged)
    error = relative_error(out[:2], expected)
    _require(error < LOGITS_LIMIT and not out.isnan().any(), f"logits of {tokens} queries", error)
    group, case = "index logits", f"{tokens} queries, {keys} keys{', one request' if shared else ''}"
    ops = 2 * tokens * keys * INDEX_HEADS * INDEX_DIM
    yield Row(group, case, "ours", *time_calls(calls), nbytes, ops, error)
    error = relative_error(_torch_scores(first)[:2], expected)
    base = [partial(_torch_scores, problem) for problem in problems[:4]]
    yield Row(group, case, "torch, BF16 products", *time_calls(base), nbytes, ops, error)
    if tokens == 1:
        nothing: list[Call] = [partial(_nothing[tokens, keys // PAGE], out)] * len(calls)
        yield Row(group, case, "a kernel that does nothing, as many blocks", *time_calls(nothing))


@triton.jit
def _nothing(OUT):
    pass


def _topk() -> Iterator[Row]:
    group, topk = "index top-k of 512, logits included", 512
    for tokens, keys, rows_at_once in ((64, KEYS, None), (512, 131072, None)):
        problems, _, out, nbytes = _logits_calls(tokens, keys, shared=tokens > 64)
        calls = [partial(indexer.index_topk, *p.args(), topk=topk, rows=rows_at_once) for p in problems[:2]]
        indexer.index_logits(*problems[0].args(), out=out)
        wanted, found = out[0].topk(topk).values, out[0][calls[0]()[0].long()]
        error = relative_error(found, wanted)
        _require(error < LOGITS_LIMIT, f"top-k of {tokens} queries", error)
        case = f"{tokens} queries, {keys} keys"
        yield Row(group, case, "ours", *time_calls(calls), nbytes, error=error)
        alone = [partial(out.topk, topk)]
        yield Row(group, case, "of that, torch.topk", *time_calls(alone))


# ---- stores


def _stores(tokens: int) -> Iterator[Row]:
    freqs = rotary_table(frequencies(64, 1e4), torch.arange(4096)).cuda()
    positions = torch.randint(0, 4096, (tokens,), device="cuda")
    slots = torch.randperm(max(1 << 19, tokens), device="cuda")[:tokens]
    case, weight = f"{tokens} tokens", torch.rand(512, device="cuda") + 0.5
    count = min(32, sets(tokens * 2048))
    kv = torch.randn(count, tokens, 512, device="cuda", dtype=torch.bfloat16)
    cache = torch.zeros(1 << 19, 512, device="cuda", dtype=torch.bfloat16)
    calls: list[Call] = [
        partial(attention.store_kv, x, weight, 1e-6, freqs, positions, slots, cache) for x in kv
    ]
    calls[0]()
    exact = torch.zeros(tokens, 512, device="cuda")
    reference.store_kv(kv[0], weight, 1e-6, freqs, positions, torch.arange(tokens, device="cuda"), exact)
    error = relative_error(cache[slots], exact)
    _require(error < ATTENTION_LIMIT, "store_kv", error)
    yield Row("stores and query quantiser", case, "store_kv", *time_calls(calls), tokens * 2048, error=error)

    k = torch.randn(count, tokens, INDEX_DIM, device="cuda")
    pages = torch.zeros(1 << 13, PAGE_BYTES, device="cuda", dtype=torch.uint8)
    args = (weight[:INDEX_DIM].contiguous(), 1e-6, freqs, positions, slots)
    calls = [partial(indexer.store_index_keys, x, *args, pages) for x in k]
    nbytes = tokens * (INDEX_DIM * 5 + 4)
    yield Row("stores and query quantiser", case, "store_index_keys", *time_calls(calls), nbytes)

    q = torch.randn(count, tokens, INDEX_HEADS, INDEX_DIM, device="cuda", dtype=torch.bfloat16)
    head_weight = torch.randn(tokens, INDEX_HEADS, device="cuda", dtype=torch.bfloat16)
    args = (head_weight, 0.01, freqs, positions)
    calls = [partial(indexer.quantize_index_queries, x, *args) for x in q]
    # On the CPU: on a card, torch divides by a number through its reciprocal, which is another rounding.
    some = [x[:_JUDGED].cpu() for x in (q[0], head_weight, positions)]
    wanted = index_reference.quantize_index_queries(some[0], some[1], 0.01, freqs.cpu(), some[2])[0]
    found = indexer.quantize_index_queries(q[0], *args)[0][:_JUDGED].cpu()
    _require(torch.equal(found, wanted), "query codes", relative_error(found, wanted))
    nbytes = tokens * INDEX_HEADS * (INDEX_DIM * 3 + 4)
    us = time_calls(calls)
    yield Row("stores and query quantiser", case, "quantize_index_queries", *us, nbytes, error=0.0)
    base: list[Call] = [partial(index_reference.quantize_index_queries, x, *args) for x in q[:4]]
    yield Row("stores and query quantiser", case, "the same in torch", *time_calls(base), nbytes)


def _require(right: object, what: str, error: float) -> None:
    """Refuse to time a kernel whose result is wrong."""
    if not right:
        raise SystemExit(f"error: {what}: relative error {error:.1e} or unwritten output, so it is not timed")
