"""One block: attention and experts of a layer, each between a read from and a write to the streams.

A block fetches a weight where it is used and keeps none, so that one matrix is in memory at a time. Tensors
carry no batch dim: one call is one sequence, or the next piece of it. Draft layers use the parts
(`Block.sublayer`, `latents`, `queries`, `output`, `experts`) with an attention of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels_ref import mhc
from kernels_ref.arithmetic import Numerics, digit_linear, linear, rms_norm
from kernels_ref.compressor import OVERLAPPING, CompressorState, CompressorWeights, compress
from kernels_ref.config import ModelConfig
from kernels_ref.decisions import Decisions
from kernels_ref.moe import limited_swiglu
from kernels_ref.pictures import window_positions
from kernels_ref.quantize import KV_GROUP, fake_e2m1, fake_e4m3, index_int8
from kernels_ref.rotary import apply_rotary, hadamard, layer_frequencies, rotary_table
from kernels_ref.router import choose_by_score, choose_by_token, route_weights, router_scores
from kernels_ref.source import Expert, Source

# Queries per step of the attention; bounds the gathered keys.
_QUERIES = 32


@dataclass
class BlockState:
    """What a block remembers of the positions before.

    Attributes:
        position: Tokens seen.
        window: [n, d] latents of the last n <= W positions, oldest first.
        compressed: [m, d] entries of the compressor.
        index_keys: [m, index_dim] entries of the indexer's compressor, rotated and rounded.
        compressor, index_compressor: Remainders; None where a layer has no such part.
    """

    position: int
    window: Tensor
    compressed: Tensor
    index_keys: Tensor
    compressor: CompressorState | None
    index_compressor: CompressorState | None


class Block:
    """A layer of the trunk, or a draft stage.

    Args:
        config: Numbers of the model.
        source: Weights.
        numerics: What is rounded.
        prefix: ``layers.N`` or ``mtp.N``.
        ratio: Compress ratio, 0 for window only.
        hashed: Whether tokens choose experts by their id.
        decisions: Record or replay choices of experts and entries; None for neither.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: Source,
        numerics: Numerics,
        prefix: str,
        *,
        ratio: int = 0,
        hashed: bool = False,
        decisions: Decisions | None = None,
    ) -> None:
        self.config = config
        self.numerics = numerics
        self.prefix = prefix
        self._source = source
        self._ratio = ratio
        self._hashed = hashed
        self._decisions = decisions
        self._freqs = layer_frequencies(config, ratio)

    def weight(self, name: str) -> Tensor:
        """Return a tensor of this block, for instance ``attn.wkv.weight``."""
        return self._source.tensor(f"{self.prefix}.{name}")

    def state(self) -> BlockState:
        """Return the state before the first token."""
        c, dtype = self.config, self.numerics.dtype
        return BlockState(
            position=0,
            window=torch.zeros(0, c.head_dim, dtype=dtype),
            compressed=torch.zeros(0, c.head_dim, dtype=dtype),
            index_keys=torch.zeros(0, c.index_dim),
            compressor=CompressorState.fresh(self._ratio, c.head_dim) if self._ratio else None,
            index_compressor=(
                CompressorState.fresh(self._ratio, c.index_dim) if self._ratio == OVERLAPPING else None
            ),
        )

    def __call__(self, h: Tensor, ids: Tensor, state: BlockState) -> Tensor:
        """Run the block on the next tokens.

        Args:
            h: [T, hc, D] streams in ``numerics.dtype``.
            ids: [T] int64 token ids.
            state: Of the positions before; changed in place.

        Returns:
            [T, hc, D].
        """
        start = state.position
        h = self.sublayer("attn", h, lambda x: self.attention(x, ids, state))
        return self.sublayer("ffn", h, lambda x: self.experts(x, ids, start))

    def sublayer(self, kind: str, h: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Collapse the streams, norm, compute, and write the result to the streams.

        Args:
            kind: ``attn`` or ``ffn``.
            h: [T, hc, D] streams.
            function: Maps the normed input [T, D] to the output [T, D].
        """
        x, mixing = self.collapse(kind, h)
        y = function(rms_norm(x, self.weight(f"{kind}_norm.weight"), self.config.norm_eps))
        return mhc.expand(y, h, mixing)

    def collapse(self, kind: str, h: Tensor) -> tuple[Tensor, mhc.Mixing]:
        """Return what a sublayer reads, [T, D] before its norm, and how it writes to the streams."""
        fn, scale, base = (self.weight(f"hc_{kind}_{part}") for part in ("fn", "scale", "base"))
        return mhc.collapse(h, fn, scale, base, self.config)

    # ---- attention

    def attention(self, x: Tensor, ids: Tensor, state: BlockState) -> Tensor:
        """Attend to the window and to compressed entries, in one softmax with the sink.

        Args:
            x: [T, D] normed input at positions ``state.position`` and following.
            ids: [T] int64 token ids: a picture sees itself whole.
            state: Changed in place.

        Returns:
            [T, D].
        """
        positions = torch.arange(state.position, state.position + len(x))
        low_rank, q = self.queries(x, positions)
        keys = torch.cat((state.window, self.latents(x, positions)))
        # Row i of `keys` is position `oldest` + i.
        oldest = state.position - len(state.window)
        seen = window_positions(ids, state.position, self.config.vocab, self.config.window)
        rows = torch.where(seen >= 0, seen - oldest, -1)
        if self._ratio:
            entries = self._visible_entries(x, low_rank, positions, state)
            rows = torch.cat((rows, torch.where(entries >= 0, entries + len(keys), -1)), 1)
        state.window = keys[-self.config.window :]
        state.position += len(x)
        return self.output(self.attend(q, torch.cat((keys, state.compressed)), rows), positions)

    def table(self, positions: Tensor) -> Tensor:
        """Return cosine and sine of this layer's angles, [T, rope_dim] float32."""
        return rotary_table(self._freqs, positions)

    def queries(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the low-rank query [T, q_lora], which the indexer needs, and the rotated heads [T, H, d]."""
        eps = self.config.norm_eps
        low_rank = rms_norm(
            linear(x, self.weight("attn.wq_a.weight"), self.numerics), self.weight("attn.q_norm.weight"), eps
        )
        q = linear(low_rank, self.weight("attn.wq_b.weight"), self.numerics)
        q = rms_norm(q.unflatten(1, (self.config.heads, -1)), None, eps)
        return low_rank, apply_rotary(q, self.table(positions))

    def latents(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the shared key and value of each token, [T, d], rotated to its position."""
        kv = linear(x, self.weight("attn.wkv.weight"), self.numerics)
        kv = rms_norm(kv, self.weight("attn.kv_norm.weight"), self.config.norm_eps)
        return self._round_kv(apply_rotary(kv, self.table(positions)))

    def _round_kv(self, kv: Tensor) -> Tensor:
        if self.numerics.kv == "none":
            return kv
        plain = kv.shape[-1] - self.config.rope_dim
        return torch.cat((fake_e4m3(kv[..., :plain], KV_GROUP), kv[..., plain:]), -1)

    def attend(self, q: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
        """Return the attention of each head over the given rows of `keys`, which are key and value at once.

        The sink takes part in the denominator only. The weights are rounded to ``numerics.dtype`` before
        they meet the values, their sum is not.

        Args:
            q: [T, H, d].
            keys: [S, d].
            rows: [T, K] int64; negative ones are holes. At least one per token is none.

        Returns:
            [T, H, d], still rotated.
        """
        sink = self.weight("attn.attn_sink").float()[:, None]
        done = []
        for q_part, rows_part in zip(q.split(_QUERIES), rows.split(_QUERIES), strict=True):
            gathered = keys[rows_part.clamp(min=0)].float()
            scores = torch.einsum("thd,tkd->thk", q_part.float(), gathered) * self.config.head_dim**-0.5
            scores = scores.masked_fill((rows_part < 0)[:, None], -torch.inf)
            top = scores.amax(-1, keepdim=True)
            p = torch.exp(scores - top)
            total = p.sum(-1, keepdim=True) + torch.exp(sink - top)
            o = torch.einsum("thk,tkd->thd", p.to(self.numerics.dtype).float(), gathered)
            done.append((o / total).to(self.numerics.dtype))
        return torch.cat(done)

    def output(self, o: Tensor, positions: Tensor) -> Tensor:
        """Rotate back by the query's position and project: per group of heads, then together.

        Values carry the rotation of their keys; after this one they depend on the distance alone.

        Args:
            o: [T, H, d] of `attend`.
            positions: [T] of the queries.

        Returns:
            [T, D].
        """
        groups = self.config.o_groups
        o = apply_rotary(o, self.table(positions), inverse=True).reshape(len(o), groups, -1)
        # FP8 in the file, but the official code multiplies by its BF16 values, with unrounded inputs.
        wo_a = self.weight("attn.wo_a.weight").float().unflatten(0, (groups, -1))
        low_rank = torch.einsum("tgc,grc->tgr", o.float(), wo_a).to(self.numerics.dtype)
        return linear(low_rank.flatten(1), self.weight("attn.wo_b.weight"), self.numerics)

    # ---- compressed entries

    def _visible_entries(self, x: Tensor, low_rank: Tensor, positions: Tensor, state: BlockState) -> Tensor:
        """Add the entries that `x` completes; return those that each query sees, [T, K] int64, -1 holes."""
        if state.compressor is None:
            raise ValueError(f"{self.prefix}: the state is that of a layer without compressor")
        entries = self._compress("attn.compressor", x, state.compressor)
        state.compressed = torch.cat((state.compressed, self._round_kv(entries)))
        # A query sees an entry when its group is complete.
        complete = (positions + 1) // self._ratio
        if self._ratio != OVERLAPPING:
            every = torch.arange(len(state.compressed)).expand(len(x), -1)
            return torch.where(every < complete[:, None], every, -1)
        scores = self._index_scores(x, low_rank, positions, state)
        picked = pick_entries(scores, complete, self.config.index_topk)
        if self._decisions is None:
            return picked
        return self._decisions.settle(f"{self.prefix}.attn.indexer", state.position, picked)

    def _compress(self, name: str, x: Tensor, state: CompressorState) -> Tensor:
        parts = ("wkv.weight", "wgate.weight", "ape", "norm.weight")
        weights = CompressorWeights(*(self.weight(f"{name}.{part}") for part in parts))
        return compress(x, weights, state, self._ratio, self._freqs, self.config.norm_eps)

    def _index_scores(self, x: Tensor, low_rank: Tensor, positions: Tensor, state: BlockState) -> Tensor:
        """Add index keys for the groups that `x` completes and score all keys, [T, m] float32."""
        c = self.config
        if state.index_compressor is None:
            raise ValueError(f"{self.prefix}: the state is that of a layer without indexer")
        new = self._compress("attn.indexer.compressor", x, state.index_compressor)
        state.index_keys = torch.cat((state.index_keys, self._round_index(new)))
        q = linear(low_rank, self.weight("attn.indexer.wq_b.weight"), self.numerics)
        q = apply_rotary(q.unflatten(1, (c.index_heads, -1)), self.table(positions))
        weight = linear(x, self.weight("attn.indexer.weights_proj.weight"), self.numerics, fp8=False).float()
        weight = weight * (c.index_dim**-0.5 * c.index_heads**-0.5)
        return index_scores(self._round_index(q), state.index_keys, weight)

    def _round_index(self, x: Tensor) -> Tensor:
        """Rotate and round queries or keys of the indexer, [..., index_dim] float32."""
        if self.numerics.index == "none":
            return x.float()
        if self.numerics.index == "e2m1":
            return fake_e2m1(hadamard(x)).float()
        codes, scale = index_int8(hadamard(x.float()))
        return codes.float() * scale[..., None]

    # ---- experts

    def experts(self, x: Tensor, ids: Tensor, start: int = 0) -> Tensor:
        """Return the weighted sum of the chosen experts plus the shared expert.

        Args:
            x: [T, D] normed input.
            ids: [T] int64 token ids: they choose the experts of the first layers, and tell pictures apart.
            start: Position of the first token, for recorded decisions.

        Returns:
            [T, D]; summed in float32, rounded once.
        """
        return (self.routed(x, ids, start) + self.shared(x).float()).to(self.numerics.dtype)

    def routed(self, x: Tensor, ids: Tensor, start: int = 0) -> Tensor:
        """Return the weighted sum of the chosen experts, [T, D] float32; arguments as those of `experts`."""
        return self.combine(x, *self.route(x, ids, start))

    def combine(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of experts [T, k] int64 by their weights [T, k] float32, [T, D] float32."""
        total = torch.zeros(x.shape, dtype=torch.float32)
        for index in chosen.unique().tolist():
            token, slot = torch.where(chosen == index)
            y = self.expert(x[token], self._source.expert(self.prefix, index), weights[token, slot, None])
            total.index_add_(0, token, y)
        return total

    def shared(self, x: Tensor) -> Tensor:
        """Return the output of the shared expert, [T, D] in ``numerics.dtype``."""
        w1, w2, w3 = (self.weight(f"ffn.shared_experts.{w}.weight") for w in ("w1", "w2", "w3"))
        gate, up = linear(x, w1, self.numerics), linear(x, w3, self.numerics)
        a = limited_swiglu(gate.float(), up.float(), self.config.swiglu_limit).to(self.numerics.dtype)
        return linear(a, w2, self.numerics)

    def route(self, x: Tensor, ids: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Return the experts of each token, [T, k] int64, and their weights, [T, k] float32."""
        scores = router_scores(x, self.weight("ffn.gate.weight"))
        picture = ids >= self.config.vocab
        if self._hashed:
            chosen = choose_by_token(self.weight("ffn.gate.tid2eid"), ids.masked_fill(picture, 0))
        else:
            chosen = choose_by_score(scores, self.weight("ffn.gate.bias"), self.config.top_k)
        if bool(picture.any()):
            # Pictures have a bias of their own, and in every layer they are routed by score.
            by_score = choose_by_score(scores, self.weight("ffn.gate.bias_vl"), self.config.top_k)
            chosen = torch.where(picture[:, None], by_score, chosen)
        if self._decisions is not None:
            chosen = self._decisions.settle(f"{self.prefix}.ffn.gate", start, chosen)
        return chosen, route_weights(scores, chosen, self.config.route_scale)

    def expert(self, x: Tensor, expert: Expert, weight: Tensor) -> Tensor:
        """Return ``weight * expert(x)``, [n, D] float32.

        Args:
            x: [n, D] normed inputs of the tokens that chose this expert.
            expert: Its matrices.
            weight: [n, 1] float32 route weights.
        """
        w1, w2, w3 = expert.values()
        limit, numerics = self.config.swiglu_limit, self.numerics
        if numerics.experts == "float":
            gate, up = linear(x, w1, numerics).float(), linear(x, w3, numerics).float()
            a = limited_swiglu(gate, up, limit) * weight
            return linear(a.to(numerics.dtype), w2, numerics).float()
        digits = 1 if numerics.experts == "w4a8" else 2
        gate, up = digit_linear(x, w1, digits), digit_linear(x, w3, digits)
        a = limited_swiglu(gate, up, limit).to(numerics.dtype)
        return digit_linear(a, w2, digits) * weight


def index_scores(q: Tensor, keys: Tensor, weight: Tensor) -> Tensor:
    """Return ``sum_h relu(<q[t, h], keys[s]>) * weight[t, h]``, [T, m] float32.

    Args:
        q: [T, h, d] float32.
        keys: [m, d] float32.
        weight: [T, h] float32, both square roots of the scale applied.
    """
    scores = [
        torch.einsum("thm,th->tm", torch.relu(q_part @ keys.T), weight_part)
        for q_part, weight_part in zip(q.split(_QUERIES), weight.split(_QUERIES), strict=True)
    ]
    return torch.cat(scores)


def pick_entries(scores: Tensor, visible: Tensor, topk: int) -> Tensor:
    """Return the entries with the largest scores, [T, topk] int64; -1 where there are no more.

    Of entries with equal scores any may be picked.

    Args:
        scores: [T, m] float32.
        visible: [T] int64; a query sees entries below this number.
        topk: ``index_topk``.
    """
    hidden = torch.arange(scores.shape[1]) >= visible[:, None]
    count = min(topk, scores.shape[1])
    picked = scores.masked_fill(hidden, -torch.inf).topk(count, dim=-1).indices
    picked = torch.where(picked < visible[:, None], picked, -1)
    return torch.nn.functional.pad(picked, (0, topk - count), value=-1)
