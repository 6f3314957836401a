"""Inputs of the attention and indexer kernels, with poison wherever nothing may be read, and float64 judges.

The judges go over one query, one head and one key at a time and share nothing with `kernels_ref`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels_ref.rotary import frequencies, rotary_table

NAN = float("nan")
#: A value that no uint8 cache holds by chance in a whole row.
POISON = 0xA5


@dataclass(frozen=True)
class Attention:
    """Arguments of `sparse_attention`; `extra` is None or the second source."""

    q: Tensor
    cache: Tensor
    indices: Tensor
    lengths: Tensor
    sink: Tensor
    scale: float
    extra: tuple[Tensor, Tensor, Tensor] | None = None

    def keywords(self) -> dict[str, Tensor]:
        """Return the keyword arguments of the second source."""
        names = ("extra_cache", "extra_indices", "extra_lengths")
        return dict(zip(names, self.extra, strict=True)) if self.extra else {}

    def args(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
        """Return the positional arguments."""
        return self.q, self.cache, self.indices, self.lengths, self.sink, self.scale

    def to(self, device: str) -> Attention:
        """Return the same problem on a device; `q` stays a view of its padded tensor."""
        heads = self.q.shape[1]
        padded = self.q if self.q._base is None else self.q._base
        moved = [x.to(device) for x in (self.cache, self.indices, self.lengths, self.sink)]
        extra = tuple(x.to(device) for x in self.extra) if self.extra else None
        return replace(
            self,
            q=padded.to(device)[:, :heads],
            **dict(zip(("cache", "indices", "lengths", "sink"), moved, strict=True)),
            extra=extra,
        )

    def float64(self) -> Attention:
        """Return the same problem with float64 queries and rows."""
        extra = (self.extra[0].double(), *self.extra[1:]) if self.extra else None
        return replace(self, q=self.q.double(), cache=self.cache.double(), extra=extra)


def _source(
    gen: torch.Generator,
    tokens: int,
    width: int,
    rows: int,
    lengths: list[int],
    holes: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a cache whose unlisted rows are NaN, its lists and their lengths; behind a length lies bait."""
    length = torch.tensor([lengths[t % len(lengths)] for t in range(tokens)], dtype=torch.int32)
    indices = torch.randint(0, rows // 2, (tokens, width), generator=gen, dtype=torch.int32)
    indices[torch.rand(tokens, width, generator=gen) < holes] = -1
    behind = torch.arange(width) >= length[:, None]
    # Half of what lies behind a length points to poisoned rows, the other half to no row at all.
    bait = torch.where(torch.rand(tokens, width, generator=gen) < 0.5, rows - 1, 2**30)
    indices = torch.where(behind, bait.int(), indices)
    cache = torch.full((rows, 512), NAN, dtype=dtype)
    listed = indices[(~behind) & (indices >= 0)].long().unique()
    cache[listed] = torch.randn(len(listed), 512, generator=gen).to(dtype)
    return cache, indices, length


def draw_attention(
    seed: int,
    *,
    tokens: int,
    heads: int,
    width: int,
    extra: int = 0,
    lengths: list[int] | None = None,
    extra_lengths: list[int] | None = None,
    holes: float = 0.2,
    rows: int = 512,
    dtype: torch.dtype = torch.bfloat16,
) -> Attention:
    """Draw a problem: `q` is a view of [T, 64, 512] whose other heads are NaN."""
    gen = torch.Generator().manual_seed(seed)
    padded = torch.full((tokens, max(64, heads), 512), NAN, dtype=dtype)
    padded[:, :heads] = torch.randn(tokens, heads, 512, generator=gen).to(dtype)
    first = _source(gen, tokens, width, rows, lengths or [width], holes, dtype)
    second = _source(gen, tokens, extra, rows, extra_lengths or [extra], holes, dtype) if extra else None
    sink = torch.randn(heads, generator=gen)
    return Attention(padded[:, :heads], *first, sink, 512**-0.5, second)


def exact_attention(problem: Attention) -> Tensor:
    """Return the result in float64, [T, h, 512], one query and head at a time."""
    sources = [(problem.cache, problem.indices, problem.lengths)]
    sources += [problem.extra] if problem.extra else []
    out = torch.zeros(problem.q.shape, dtype=torch.float64)
    for t in range(len(problem.q)):
        listed = [
            cache[index]
            for cache, indices, lengths in sources
            for index in indices[t, : max(int(lengths[t]), 0)].tolist()
            if index >= 0
        ]
        if not listed:
            continue
        keys = torch.stack(listed).double()
        for head in range(problem.q.shape[1]):
            scores = keys @ problem.q[t, head].double() * problem.scale
            # softmax over keys and sink, of which the sink has value 0
            weights = torch.cat((scores, problem.sink[head].double()[None])).softmax(0)
            out[t, head] = weights[:-1] @ keys
    return out


def table(positions: int = 300) -> Tensor:
    """Return cosines and sines of the first positions, [positions, 64] float32."""
    return rotary_table(frequencies(64, 10000.0), torch.arange(positions))


def exact_latent(kv: Tensor, weight: Tensor, eps: float, angles: Tensor) -> Tensor:
    """Return norm and rotation of one row in float64; `angles` [64] as in `table`."""
    x = kv.double()
    x = x / math.sqrt(float((x * x).mean()) + eps) * weight.double()
    tail = torch.view_as_complex(x[-64:].reshape(32, 2).contiguous())
    turn = torch.view_as_complex(angles.double().reshape(32, 2).contiguous())
    return torch.cat((x[:-64], torch.view_as_real(tail * turn).flatten()))


def hadamard_matrix() -> Tensor:
    """Return the orthonormal 128 x 128 Hadamard matrix by its bit rule, float64."""
    at = torch.arange(128)
    ones = at[:, None] & at[None, :]
    parity = sum((ones >> bit) & 1 for bit in range(7)) % 2
    return (1.0 - 2.0 * parity.double()) / math.sqrt(128)


@dataclass(frozen=True)
class Index:
    """Arguments of `index_logits`: integers small enough that every float32 sum is exact."""

    q8: Tensor
    cache: Tensor
    weight: Tensor
    seq_lens: Tensor
    page_table: Tensor
    max_len: int

    def args(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
        """Return the positional arguments."""
        return self.q8, self.cache, self.weight, self.seq_lens, self.page_table, self.max_len

    def to(self, device: str) -> Index:
        """Return the same problem on a device."""
        return Index(*(x.to(device) for x in self.args()[:-1]), self.max_len)


def draw_index(seed: int, lengths: list[int], max_len: int, *, exact: bool = True) -> Index:
    """Draw a problem; pages behind a length are missing from the cache or hold 0xA5.

    With `exact` the head weights are integers and the key scales powers of two, so that any order of sums
    gives the same float32.
    """
    gen = torch.Generator().manual_seed(seed)
    tokens, width = len(lengths), -(-max_len // 64)
    used = [-(-length // 64) for length in lengths]
    pages = sum(used) + 1
    order = torch.randperm(pages - 1, generator=gen).int()
    page_table = torch.full((tokens, width), 2**30, dtype=torch.int32)
    start = 0
    for t, count in enumerate(used):
        page_table[t, :count] = order[start : start + count]
        start += count
    cache = torch.full((pages, 64 * 132), POISON, dtype=torch.uint8)
    codes = torch.randint(-127, 128, (pages - 1, 64 * 128), generator=gen, dtype=torch.int8)
    exponents = torch.randint(-3, 4, (pages - 1, 64), generator=gen).float()
    scales = torch.exp2(exponents) if exact else torch.rand(pages - 1, 64, generator=gen) / 127
    cache[: pages - 1, : 64 * 128] = codes.view(torch.uint8)
    cache[: pages - 1, 64 * 128 :] = scales.view(torch.uint8)
    q8 = torch.randint(-127, 128, (tokens, 64, 128), generator=gen, dtype=torch.int8)
    # A product sum is at most 128 * 127 * 127, and 8 of those stay below 2^24.
    few = torch.randint(-1, 2, (tokens, 64), generator=gen).float() * (torch.arange(64) % 8 == 0)
    weight = few if exact else torch.randn(tokens, 64, generator=gen) / 64
    return Index(q8, cache, weight, torch.tensor(lengths, dtype=torch.int32), page_table, max_len)


def exact_logits(problem: Index) -> Tensor:
    """Return the scores in float64, [T, max_len], key by key."""
    out = torch.full((len(problem.q8), problem.max_len), -torch.inf, dtype=torch.float64)
    for t, length in enumerate(problem.seq_lens.tolist()):
        for j in range(min(length, problem.max_len)):
            page = problem.cache[problem.page_table[t, j // 64]]
            row = j % 64
            key = page[row * 128 : row * 128 + 128].view(torch.int8).long()
            scale = page[64 * 128 + 4 * row :][:4].view(torch.float32).double()
            products = (problem.q8[t].long() * key).sum(-1).clamp(min=0).double()
            out[t, j] = (products * problem.weight[t].double()).sum() * scale
    return out
