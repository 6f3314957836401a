"""Inputs of attention and index scores as a server has them: larger than an L2, for tuning and benchmarks.

Lists are full: 128 rows of a window, which lie together, and 512 rows picked from all of a second cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels_ref.indexer import INDEX_DIM, INDEX_HEADS, PAGE, PAGE_BYTES
from kernels_ref.sm80 import attention
from kernels_ref.sm80.tiles import AttentionPlan

WINDOW, PICKED, SCALE = 128, 512, 512**-0.5
#: Bytes that the calls of one graph touch between them: several times the L2 of any card so far.
TOUCHED = 384 << 20
#: Most pages of an index cache, 0.5 GB.
_MOST_PAGES = 65536


def sets(nbytes: int) -> int:
    """Return how many sets of inputs a graph rotates over when a call touches `nbytes`."""
    return max(2, min(256, TOUCHED // nbytes))


@dataclass(frozen=True)
class Attention:
    """Arguments of `sparse_attention`."""

    q: Tensor
    window: Tensor
    near: Tensor
    near_length: Tensor
    sink: Tensor
    extra: dict[str, Tensor]

    def call(self, out: Tensor, plan: AttentionPlan | None = None) -> Tensor:
        """Run the kernel."""
        return attention.sparse_attention(
            self.q,
            self.window,
            self.near,
            self.near_length,
            self.sink,
            SCALE,
            **self.extra,
            out=out,
            plan=plan,
        )


@dataclass(frozen=True)
class Pools:
    """Rows of the window cache and of the compressed entries, far more than an L2 holds."""

    window: Tensor
    far: Tensor

    @staticmethod
    def draw(window: int = 1 << 19, far: int = 1 << 21, device: str = "cuda") -> Pools:
        """Draw rows: 0.5 GiB and 2 GiB."""
        return Pools(*(torch.randn(n, 512, device=device, dtype=torch.bfloat16) for n in (window, far)))

    def problem(self, tokens: int, heads: int, lengths: tuple[Tensor, Tensor]) -> Attention:
        """Draw queries and lists; lengths are shared, as by the layers of a model."""
        device = self.window.device
        first = torch.randint(0, len(self.window) - WINDOW, (tokens, 1), device=device)
        far = torch.randint(0, len(self.far), (tokens, PICKED), device=device, dtype=torch.int32)
        return Attention(
            torch.randn(tokens, heads, 512, device=device, dtype=self.window.dtype),
            self.window,
            (first + torch.arange(WINDOW, device=device)).int(),
            lengths[0],
            torch.randn(heads, device=device),
            {"extra_cache": self.far, "extra_indices": far, "extra_lengths": lengths[1]},
        )

    def problems(self, tokens: int, heads: int) -> list[Attention]:
        """Draw problems for the calls of one graph."""
        lengths = [
            torch.full((tokens,), n, dtype=torch.int32, device=self.far.device) for n in (WINDOW, PICKED)
        ]
        count = sets(tokens * (WINDOW + PICKED) * 1024)
        return [self.problem(tokens, heads, (lengths[0], lengths[1])) for _ in range(count)]


@dataclass(frozen=True)
class Scores:
    """Arguments of `index_logits`."""

    q8: Tensor
    cache: Tensor
    weight: Tensor
    seq_lens: Tensor
    page_table: Tensor
    max_len: int

    @staticmethod
    def draw(cache: Tensor, tokens: int, keys: int, shared: bool = False) -> Scores:
        """Draw queries; with `shared` all of them look at the pages of one request."""
        device, pages = cache.device, keys // PAGE
        table = torch.stack(
            [torch.randperm(len(cache), device=device)[:pages] for _ in range(1 if shared else tokens)]
        )
        return Scores(
            torch.randint(-127, 128, (tokens, INDEX_HEADS, INDEX_DIM), dtype=torch.int8, device=device),
            cache,
            torch.randn(tokens, INDEX_HEADS, device=device) / 1e4,
            torch.full((tokens,), keys, dtype=torch.int32, device=device),
            table.int().expand(tokens, -1).contiguous(),
            keys,
        )

    def args(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
        """Return the positional arguments."""
        return self.q8, self.cache, self.weight, self.seq_lens, self.page_table, self.max_len


def index_cache(pages: int, device: str = "cuda") -> Tensor:
    """Draw pages of codes with scales near 1/127."""
    cache = torch.randint(0, 256, (pages, PAGE_BYTES), dtype=torch.uint8, device=device)
    scales = (torch.rand(pages, PAGE, device=device) + 0.5) / 127
    cache[:, PAGE * INDEX_DIM :] = scales.view(torch.uint8)
    return cache


def scores(tokens: int, keys: int, shared: bool = False, device: str = "cuda") -> list[Scores]:
    """Draw problems for the calls of one graph, each with pages of its own as far as the cache goes."""
    once = (1 if shared else tokens) * keys * PAGE_BYTES // PAGE
    count = sets(once)
    cache = index_cache(min(_MOST_PAGES, count * once // PAGE_BYTES), device)
    return [Scores.draw(cache, tokens, keys, shared) for _ in range(count)]
