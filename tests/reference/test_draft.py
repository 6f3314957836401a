"""The draft: against a literal second reading of its definition, and its sight, what it may see and what not.

No public implementation runs on a CPU, so the judge is written here, from the formulas, token by token and
in float64; it shares the weights with the code under test and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels_ref.draft import Draft, NextToken, Taps
from kernels_ref.model import Model
from tests.reference import tiny
from tests.tolerances import FLOAT32_MODELS

PREVIEW = "deepseek-v4-flash"
LENGTH = 40


class Literal:
    """Draft layers token by token, in float64."""

    def __init__(self, made: tiny.Tiny) -> None:
        self.c, self.weights = made.config, made.weights
        self.w = cache(lambda name: made.weights.tensor(name).double())

    def norm(self, x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.c.norm_eps) * weight

    def rotate(self, x: Tensor, position: int, sign: int = 1) -> Tensor:
        dims = self.c.rope_dim
        pairs = torch.view_as_complex(x[..., -dims:].reshape(*x.shape[:-1], dims // 2, 2).contiguous())
        angle = sign * position * self.c.rope_theta ** (-2 * torch.arange(dims // 2).double() / dims)
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
        return torch.cat((x[..., :-dims], turned), -1)

    def mixing(self, h: Tensor, prefix: str) -> tuple[Tensor, Tensor, Tensor]:
        hc = self.c.hc_mult
        fn, base, scale = (self.w(f"{prefix}_{part}") for part in ("fn", "base", "scale"))
        m = fn @ h.flatten() / math.sqrt(float((h * h).mean()) + self.c.norm_eps)
        pre = torch.sigmoid(m[:hc] * scale[0] + base[:hc]) + self.c.hc_eps
        if len(m) == hc:
            return pre, pre, pre
        post = 2 * torch.sigmoid(m[hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
        matrix = torch.softmax((m[2 * hc :] * scale[2] + base[2 * hc :]).reshape(hc, hc), 1) + self.c.hc_eps
        matrix = matrix / (matrix.sum(0) + self.c.hc_eps)
        for _ in range(self.c.hc_iters - 1):
            matrix = matrix / (matrix.sum(1, keepdim=True) + self.c.hc_eps)
            matrix = matrix / (matrix.sum(0) + self.c.hc_eps)
        return pre, post, matrix

    def latent(self, x: Tensor, prefix: str, position: int) -> Tensor:
        kv = self.norm(self.w(f"{prefix}.attn.wkv.weight") @ x, self.w(f"{prefix}.attn.kv_norm.weight"))
        return self.rotate(kv, position)

    def attention(self, x: Tensor, keys: Tensor, prefix: str, position: int) -> Tensor:
        a = f"{prefix}.attn"
        low = self.norm(self.w(f"{a}.wq_a.weight") @ x, self.w(f"{a}.q_norm.weight"))
        heads = (self.w(f"{a}.wq_b.weight") @ low).reshape(self.c.heads, -1)
        found = []
        for q, sink in zip(self.rotate(self.norm(heads), position), self.w(f"{a}.attn_sink"), strict=True):
            p = torch.softmax(torch.cat((keys @ q / math.sqrt(self.c.head_dim), sink[None])), 0)[:-1]
            found.append(p @ keys)
        o = self.rotate(torch.stack(found), position, -1).reshape(self.c.o_groups, -1)
        wo_a = self.w(f"{a}.wo_a.weight").reshape(self.c.o_groups, -1, o.shape[1])
        return self.w(f"{a}.wo_b.weight") @ torch.cat([m @ part for m, part in zip(wo_a, o, strict=True)])

    def swiglu(self, x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        limit = self.c.swiglu_limit
        gate, up = (w1 @ x).clamp(max=limit), (w3 @ x).clamp(-limit, limit)
        return w2 @ (gate * torch.sigmoid(gate) * up)

    def experts(self, x: Tensor, prefix: str) -> Tensor:
        score = torch.sqrt(torch.log1p(torch.exp(self.w(f"{prefix}.ffn.gate.weight") @ x)))
        chosen = torch.topk(score + self.w(f"{prefix}.ffn.gate.bias"), self.c.top_k).indices
        share = score[chosen] / score[chosen].sum() * self.c.route_scale
        shared = (self.w(f"{prefix}.ffn.shared_experts.{part}.weight") for part in ("w1", "w2", "w3"))
        y = self.swiglu(x, *shared)
        for index, weight in zip(chosen.tolist(), share, strict=True):
            expert = self.weights.expert(prefix, index)
            y = y + weight * self.swiglu(x, *(m.double() for m in expert.values()))
        return y

    def sublayer(
        self, h: list[Tensor], prefix: str, kind: str, function: Callable[..., Tensor]
    ) -> list[Tensor]:
        """Apply one sublayer to the streams [hc, D] of each token; `function` maps all inputs at once."""
        mixed = [self.mixing(token, f"{prefix}.hc_{kind}") for token in h]
        norm = self.w(f"{prefix}.{kind}_norm.weight")
        inputs = [self.norm(pre @ token, norm) for token, (pre, _, _) in zip(h, mixed, strict=True)]
        outputs = function(inputs)
        return [
            torch.outer(post, y) + comb.T @ token
            for token, y, (_, post, comb) in zip(h, outputs, mixed, strict=True)
        ]

    def block(self, h: list[Tensor], prefix: str, past: Tensor, first: int) -> list[Tensor]:
        """Run a stage on a block of tokens at positions `first` and following, which all see each other."""

        def attention(inputs: list[Tensor]) -> list[Tensor]:
            own = torch.stack([self.latent(x, prefix, first + i) for i, x in enumerate(inputs)])
            keys = torch.cat((past, own))
            return [self.attention(x, keys, prefix, first + i) for i, x in enumerate(inputs)]

        h = self.sublayer(h, prefix, "attn", attention)
        return self.sublayer(h, prefix, "ffn", lambda inputs: [self.experts(x, prefix) for x in inputs])

    def head(self, h: Tensor, prefix: str) -> tuple[Tensor, Tensor]:
        """Return the collapsed streams [D] and the logits [V]."""
        x = self.mixing(h, f"{prefix}.hc_head")[0] @ h
        return x, self.w("head.weight") @ self.norm(x, self.w(f"{prefix}.norm.weight"))

    def propose(self, taps: Tensor, start: int, known: int) -> tuple[list[int], Tensor, list[float]]:
        """Return tokens, logits [B, V] and confidence of the block behind `start`."""
        d = self.c.draft
        h = [
            self.w("embed.weight")[token].expand(self.c.hc_mult, -1)
            for token in [known] + [d.noise_token] * (d.block_size - 1)
        ]
        main = self.w("mtp.0.main_proj.weight")
        seen = range(max(0, start - self.c.window + 1), start + 1)
        mx = {p: self.norm(main @ taps[p].double(), self.w("mtp.0.main_norm.weight")) for p in seen}
        for stage in range(d.stages):
            past = torch.stack([self.latent(mx[p], f"mtp.{stage}", p) for p in seen])
            h = self.block(h, f"mtp.{stage}", past, start + 1)
        last = f"mtp.{d.stages - 1}"
        tokens, logits, confidence = [], [], []
        for token in h:
            x, base = self.head(token, last)
            e = self.w(f"{last}.markov_head.markov_w1.weight")[known]
            base = base + self.w(f"{last}.markov_head.markov_w2.weight") @ e
            confidence.append(float(self.w(f"{last}.confidence_head.proj.weight")[0] @ torch.cat((x, e))))
            known = int(base.argmax())
            tokens.append(known)
            logits.append(base)
        return tokens, torch.stack(logits), confidence


@pytest.fixture(scope="module")
def traced(model: Callable[..., tiny.Tiny]) -> tuple[tiny.Tiny, Tensor, Tensor]:
    """Return a model, 40 ids and the taps of its trunk on them."""
    made = model("hard")
    trunk = Model(made.config, made.weights)
    ids, taps = tiny.prompt(LENGTH), Taps(trunk)
    trunk(ids[:25], state := trunk.state(), on_layer=taps)
    trunk(ids[25:], state, on_layer=taps)
    return made, ids, taps.together()


@pytest.mark.parametrize("start", [0, 7, 30])
def test_a_block_equals_the_literal_reading(traced: tuple[tiny.Tiny, Tensor, Tensor], start: int) -> None:
    """Before, at and beyond the length of the window."""
    made, ids, taps = traced
    known = ids[start + 1 : start + 2]
    found = Draft(Model(made.config, made.weights)).propose(taps, torch.tensor([start]), known)
    tokens, logits, confidence = Literal(made).propose(taps, start, int(known))
    assert found.tokens.tolist() == [tokens]
    assert tiny.relative(found.logits[0], logits) < FLOAT32_MODELS
    assert found.confidence[0].tolist() == pytest.approx(confidence, rel=1e-4)


def test_blocks_of_one_call_do_not_see_each_other(traced: tuple[tiny.Tiny, Tensor, Tensor]) -> None:
    made, ids, taps = traced
    draft = Draft(Model(made.config, made.weights))
    starts = torch.tensor([3, 20, 33])
    together = draft.propose(taps, starts, ids[starts + 1])
    for i, start in enumerate(starts):
        alone = draft.propose(taps, start[None], ids[start + 1][None])
        assert tiny.relative(alone.logits[0], together.logits[i]) < FLOAT32_MODELS


@pytest.mark.parametrize(("position", "seen"), [(14, False), (15, True), (30, True), (31, False)])
def test_a_block_sees_the_window_that_ends_at_its_start(
    traced: tuple[tiny.Tiny, Tensor, Tensor], position: int, seen: bool
) -> None:
    """The window of the tiny model holds 16 positions: 15..30 for a block behind 30."""
    made, ids, taps = traced
    draft = Draft(Model(made.config, made.weights))
    other = taps.clone()
    other[position] = torch.nan
    found = draft.propose(other, torch.tensor([30]), ids[31:32])
    assert bool(torch.isnan(found.logits).any()) is seen


def test_taps_of_other_layers_are_other_taps(traced: tuple[tiny.Tiny, Tensor, Tensor]) -> None:
    made, ids, taps = traced
    trunk = Model(made.config, made.weights)
    outputs = {}
    trunk(ids, on_layer=lambda layer, h: outputs.__setitem__(layer, h.mean(1)))
    assert taps.shape == (LENGTH, 3 * made.config.hidden)
    expected = torch.cat([outputs[layer] for layer in (2, 3, 4)], 1)
    assert tiny.relative(taps, expected) < FLOAT32_MODELS


def test_releases_without_a_draft_of_the_kind_are_refused(
    traced: tuple[tiny.Tiny, Tensor, Tensor], preview: tiny.Tiny
) -> None:
    made, _, _ = traced
    with pytest.raises(ValueError, match="no DSpark draft"):
        Draft(Model(preview.config, preview.weights))
    with pytest.raises(ValueError, match="no MTP layer"):
        NextToken(Model(made.config, made.weights))


# ---- the preview's MTP layer


@pytest.fixture(scope="module")
def preview(tmp_path_factory: pytest.TempPathFactory) -> tiny.Tiny:
    """Return a model of the preview release."""
    root: Path = tmp_path_factory.mktemp("preview")
    return tiny.Tiny.read(tiny.make(root, "hard", PREVIEW))


def test_the_mtp_layer_equals_the_literal_reading(preview: tiny.Tiny) -> None:
    trunk, ids, streams = Model(preview.config, preview.weights), tiny.prompt(9), []
    trunk(ids[:8], on_layer=lambda layer, h: streams.append(h))
    layer, h = NextToken(trunk), streams[-1]
    state = layer.state()
    found = torch.cat((layer(h[:5], ids[1:6], state), layer(h[5:], ids[6:9], state)))

    literal = Literal(preview)
    w = literal.w
    x = [
        literal.norm(h[t].double(), w("mtp.0.hnorm.weight")) @ w("mtp.0.h_proj.weight").T
        + w("mtp.0.e_proj.weight") @ literal.norm(w("embed.weight")[ids[t + 1]], w("mtp.0.enorm.weight"))
        for t in range(8)
    ]
    # Causal: token by token, each with the latents of those before.
    past, expected = torch.zeros(0, preview.config.head_dim).double(), []
    for t, token in enumerate(x):
        pre = literal.mixing(token, "mtp.0.hc_attn")[0]
        y = literal.block([token], "mtp.0", past, t)[0]
        own = literal.latent(literal.norm(pre @ token, w("mtp.0.attn_norm.weight")), "mtp.0", t)
        past = torch.cat((past, own[None]))
        expected.append(literal.head(y, "mtp.0")[1])
    assert tiny.relative(found, torch.stack(expected)) < FLOAT32_MODELS
