"""Rows of the routed experts: the whole layer, BF16 in and out, beside the public peer and BF16 experts.

H = 4096, 256 experts, 6 a token; I = 2048 (one rank) and 512 (a rank of four). Random MXFP4 codes with
scale bytes 119..122; the peer repacks them for itself, ours are repacked by our kernel. Routings rotate, so
that weights come from memory; grids are the worst case. Bytes are codes and scales of the experts that are
used, in our format, for each row; operations do not count padding. Errors are those of six tokens against
float64 from the MXFP4 bytes. Nothing includes the router, the shared expert or a collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import Call, Context, Row, relative_error, time_calls
from benchmarks.peers.plain import plain_moe
from kernels_ref.moe import limited_swiglu
from kernels_ref.sm80.align import align_experts
from kernels_ref.sm80.convert import repack_mxfp4
from kernels_ref.sm80.few_tokens import reduce_kernel
from kernels_ref.sm80.moe import fused_moe, grouped_gemm
from kernels_ref.sm80.quantize import quantize_rows
from kernels_ref.sm80.tiles import choose
from kernels_ref.tensors import Int8Shift

HIDDEN, EXPERTS, TOPK, LIMIT = 4096, 256, 6, 10.0
RANKS = {"TP1": 2048, "TP4": 512}
#: Tokens -> routings in turn. One token: disjoint sets of experts.
ROUTINGS = {1: 42, 6: 16, 64: 4, 512: 2, 4096: 1, 16384: 1}
#: What a result may be wrong by before it gets no time.
BOUND = {"w4a16": 0.006, "w4a8": 0.03}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Experts:
    """The experts of one rank: official bytes, and the same repacked."""

    packed: tuple[Tensor, Tensor]
    scales: tuple[Tensor, Tensor]
    w13: Int8Shift
    w2: Int8Shift

    @classmethod
    def random(cls, intermediate: int) -> Experts:
        """Draw them."""
        shapes = (2 * intermediate, HIDDEN), (HIDDEN, intermediate)
        packed = tuple(_bytes(0, 256, n, k // 2) for n, k in shapes)
        scales = tuple(_bytes(119, 123, n, k // 32) for n, k in shapes)
        w13, w2 = (repack_mxfp4(*pair) for pair in zip(packed, scales, strict=True))
        return cls(packed, scales, w13, w2)

    def matrix(self, which: int, expert: int) -> Tensor:
        """Return one matrix in float64 from its MXFP4 bytes."""
        packed, scale = self.packed[which][expert], self.scales[which][expert]
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()
        values = torch.tensor([*_E2M1, *(-v for v in _E2M1)], dtype=torch.float64, device="cuda")
        return values[codes] * torch.exp2(scale.double() - 127).repeat_interleave(32, 1)

    def exact(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Return the layer in float64 for a few tokens."""
        out = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
        for token, experts in enumerate(ids.tolist()):
            for j, expert in enumerate(experts):
                gate, up = (self.matrix(0, expert) @ x[token].double()).chunk(2)
                activated = limited_swiglu(gate, up, LIMIT)
                out[token] += weights[token, j].double() * (self.matrix(1, expert) @ activated)
        return out


def _bytes(low: int, high: int, n: int, width: int) -> Tensor:
    return torch.randint(low, high, (EXPERTS, n, width), dtype=torch.uint8, device="cuda")


def rows(context: Context) -> Iterator[Row]:
    """Yield the rows."""
    for rank, intermediate in RANKS.items():
        experts = Experts.random(intermediate)
        peer = context.marlin.prepare(
            experts.packed[0].view(torch.int8), experts.scales[0], experts.packed[1].view(torch.int8),
            experts.scales[1],
        ) if context.marlin else None  # fmt: skip
        for tokens in (1, 64, 4096) if context.quick else ROUTINGS:
            case = _Case(rank, tokens, experts)
            plan = choose(tokens, intermediate)
            yield from case.ours(plan.arithmetic)
            if tokens <= 4096:
                yield from case.ours("w4a8" if plan.arithmetic == "w4a16" else "w4a16")
            if peer is not None:
                yield from case.row("B marlin W4A16", partial(_peer, context.marlin, peer), 0.01)
            yield from case.row("plain Triton W4A8", partial(_plain, experts), BOUND["w4a8"])
            yield from case.parts()
        del experts, peer
        torch.cuda.empty_cache()
    if not context.quick and hasattr(torch, "_grouped_mm"):
        yield from _bf16()


def _peer(marlin: Any, layer: torch.nn.Module, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    result: Tensor = marlin(x, layer, weights, ids, LIMIT)
    return result


def _plain(experts: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return plain_moe(x, experts.packed, experts.scales, weights, ids, LIMIT)


class _Case:
    """One number of tokens on one rank."""

    def __init__(self, rank: str, tokens: int, experts: Experts) -> None:
        self.rank, self.tokens, self.experts = rank, tokens, experts
        self.intermediate = RANKS[rank]
        self.x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.weights = torch.rand(tokens, TOPK, device="cuda")
        self.ids = routings(tokens)
        self.few = slice(0, 6)
        self.expected = experts.exact(self.x[self.few], self.weights[self.few], self.ids[0][self.few])
        used = sum(len(ids.unique()) for ids in self.ids) / len(self.ids)
        weights = 3 * self.intermediate * HIDDEN
        self.nbytes = int(used * (weights * (1 / 2 + 1 / 128) + 4 * (2 * self.intermediate + HIDDEN)))
        self.ops = 2 * tokens * TOPK * weights

    def ours(self, arithmetic: str) -> Iterator[Row]:
        """Yield our layer's row in one arithmetic."""
        plan = choose(self.tokens, self.intermediate, arithmetic)
        experts = self.experts

        def run(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            return fused_moe(x, experts.w13, experts.w2, weights, ids, limit=LIMIT, arithmetic=arithmetic)

        note = f"{plan.columns} columns; {plan.w13.label}; {plan.w2.label}"
        yield from self.row(f"ours {arithmetic.upper()}", run, BOUND[arithmetic], note)

    def row(self, name: str, run: Any, bound: float, note: str = "") -> Iterator[Row]:
        """Check six tokens of a layer, then time it."""
        error = relative_error(run(self.x, self.weights, self.ids[0])[self.few], self.expected)
        if not error < bound:
            raise SystemExit(f"error: {self.rank}, {self.tokens} tokens, {name}: wrong, error {error}")
        calls = [partial(run, self.x, self.weights, ids) for ids in self.ids]
        us, spread = time_calls(calls)
        group, case = f"moe {self.rank}", f"{self.tokens} tokens"
        yield Row(group, case, name, us, spread, self.nbytes, self.ops, error, note)

    def parts(self) -> Iterator[Row]:
        """Yield the parts of our layer, each timed on its own."""
        plan = choose(self.tokens, self.intermediate)
        digits = 1 if plan.arithmetic == "w4a8" else 2
        block = plan.columns // digits
        ids = self.ids[0]
        activated = torch.randn(ids.numel(), self.intermediate, device="cuda", dtype=torch.bfloat16)
        outputs = torch.randn(ids.numel(), HIDDEN, device="cuda", dtype=torch.bfloat16)
        aligned = [align_experts(one, block, EXPERTS)[:2] if block else (None, one) for one in self.ids]
        q, q2 = quantize_rows(self.x, digits), quantize_rows(activated, digits)
        w13, w2, columns = self.experts.w13, self.experts.w2, plan.columns

        def first(sorted_ids: Tensor | None, expert_ids: Tensor) -> None:
            grouped_gemm(
                *q, w13, sorted_ids, expert_ids, activated, plan.w13, TOPK, columns=columns, gated=True,
                limit=LIMIT,
            )  # fmt: skip

        def second(sorted_ids: Tensor | None, expert_ids: Tensor) -> None:
            grouped_gemm(*q2, w2, sorted_ids, expert_ids, outputs, plan.w2, 1, columns=columns)

        def reduce() -> None:
            reduce_kernel[(self.tokens, HIDDEN // 1024)](
                outputs, self.weights, ids, self.x, N=HIDDEN, TOPK=TOPK, COLUMNS=1024, num_warps=4
            )

        calls: dict[str, list[Call]] = {
            "W13 and SwiGLU": [partial(first, *one) for one in aligned],
            "W2": [partial(second, *one) for one in aligned],
            "quantise": [partial(quantize_rows, self.x, digits)] * 4,
            "quantise again": [partial(quantize_rows, activated, digits, ids)] * 4,
            "sum": [reduce] * 4,
        }
        if block:
            calls["align"] = [partial(align_experts, ids, block, EXPERTS)] * 4
        for name, list_of_calls in calls.items():
            us, spread = time_calls(list_of_calls, milliseconds=20)
            yield Row(f"moe {self.rank}, parts", f"{self.tokens} tokens", name, us, spread)


def routings(tokens: int) -> list[Tensor]:
    """Return the routings of one case."""
    count = ROUTINGS[tokens]
    if tokens == 1:
        order = torch.randperm(EXPERTS, device="cuda")[: count * TOPK]
        return list(order.view(count, 1, TOPK).to(torch.int32))
    ids = [torch.rand(tokens, EXPERTS, device="cuda").argsort(1) for _ in range(count)]
    return [one[:, :TOPK].to(torch.int32).contiguous() for one in ids]


def _bf16() -> Iterator[Row]:
    """Yield torch's grouped product over BF16 experts, both products without anything around them.

    On a Hopper card this runs Hopper's instructions: a yardstick, not a kernel for SM80.
    """
    intermediate = RANKS["TP4"]
    w13 = torch.randn(EXPERTS, HIDDEN, 2 * intermediate, device="cuda", dtype=torch.bfloat16)
    w2 = torch.randn(EXPERTS, intermediate, HIDDEN, device="cuda", dtype=torch.bfloat16)
    for tokens in ROUTINGS:
        counts = torch.bincount(routings(tokens)[0].flatten(), minlength=EXPERTS)
        ends = counts.cumsum(0).to(torch.int32)
        x = torch.randn(tokens * TOPK, HIDDEN, device="cuda", dtype=torch.bfloat16)
        activated = torch.randn(tokens * TOPK, intermediate, device="cuda", dtype=torch.bfloat16)

        def run(x: Tensor = x, activated: Tensor = activated, ends: Tensor = ends) -> None:
            torch._grouped_mm(x, w13, offs=ends)
            torch._grouped_mm(activated, w2, offs=ends)

        us, spread = time_calls([run])
        ops = 2 * tokens * TOPK * 3 * intermediate * HIDDEN
        note = "two products only, one routing"
        yield Row("moe TP4", f"{tokens} tokens", "BF16 _grouped_mm", us, spread, None, ops, None, note)
