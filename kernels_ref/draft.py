"""Draft layers: what guesses the tokens after the next one, for the trunk to check.

`Draft` is DSpark (0731 and later): three stages look at the trunk's own activations and fill a block of
placeholder tokens at once; a first-order Markov head then makes the tokens depend on each other.
`NextToken` is the preview's MTP layer, which looks one token further than the trunk.

A draft decides nothing: a wrong one costs speed and no text. That is why damage to it goes unnoticed, and why
it has a reference of its own.

Source: ``inference/model.py`` of DeepSeek-V4-Flash and of its 0731 release.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_ref import mhc
from kernels_ref.arithmetic import linear, rms_norm
from kernels_ref.block import Block, BlockState
from kernels_ref.decisions import Decisions
from kernels_ref.model import Model


class Taps:
    """Collects what a DSpark draft sees of the trunk; pass it as ``on_layer`` of a `Model`.

    Args:
        model: The trunk, whose configuration names the tapped layers.
    """

    def __init__(self, model: Model) -> None:
        self._targets = model.config.draft.targets
        self._found: dict[int, list[Tensor]] = {layer: [] for layer in self._targets}

    def __call__(self, layer: int, h: Tensor) -> None:
        """Keep the mean over the streams [T, hc, D] of a tapped layer's output."""
        if layer in self._found:
            self._found[layer].append(h.float().mean(1).to(h.dtype))

    def together(self) -> Tensor:
        """Return the taps of every position so far, [T, targets * D], layers side by side."""
        return torch.cat([torch.cat(self._found[layer]) for layer in self._targets], -1)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Blocks of guessed tokens, one per start.

    Attributes:
        tokens: [S, B] int64; the first follows the block's known token.
        logits: [S, B, V] float32, Markov head included.
        confidence: [S, B] float32, raw logits of the confidence head.
    """

    tokens: Tensor
    logits: Tensor
    confidence: Tensor


class Draft:
    """The DSpark draft of a trunk.

    Args:
        model: The trunk; gives configuration, weights, numerics, embedding and head.
        decisions: Record or replay the choice of experts, of one call of `propose`; None for neither.
    """

    def __init__(self, model: Model, decisions: Decisions | None = None) -> None:
        draft = model.config.draft
        if not draft.targets:
            raise ValueError("the checkpoint has no DSpark draft: its config.json names no target layers")
        self._model = model
        self._stages = [
            Block(model.config, model.source, model.numerics, f"mtp.{n}", decisions=decisions)
            for n in range(draft.stages)
        ]

    def propose(self, taps: Tensor, starts: Tensor, known: Tensor, guessed: Tensor | None = None) -> Proposal:
        """Guess the tokens that follow, from several positions of one sequence at once.

        From position p the trunk has said token p + 1. The block holds this token and placeholders at
        positions p + 1 .. p + B; its outputs are guesses of tokens p + 2 .. p + B + 1.

        Args:
            taps: [T, targets * D] of `Taps`, for positions 0..T-1.
            starts: [S] int64 positions p, each below T.
            known: [S] int64, the token at p + 1.
            guessed: [S, B] int64, what the Markov head is told of the guesses before; None for its own ones.

        Returns:
            S blocks; none sees another.
        """
        draft = self._model.config.draft
        blocks, size = len(starts), draft.block_size
        ids = torch.full((blocks, size), draft.noise_token)
        ids[:, 0] = known
        positions = (starts[:, None] + 1 + torch.arange(size)).flatten()
        rows = self._rows(starts, len(taps))
        context = self._context(taps)
        h = self._model.embed(ids.flatten())
        for stage in self._stages:
            keys = stage.latents(context, torch.arange(len(taps)))
            h = _stage(stage, h, ids.flatten(), positions, keys, rows)
        return self._finish(h.unflatten(0, (blocks, size)), known, guessed)

    def _context(self, taps: Tensor) -> Tensor:
        """Return what every stage derives its keys from, [T, D]: one vector per position of the trunk."""
        first = self._stages[0]
        x = linear(taps, first.weight("main_proj.weight"), self._model.numerics)
        return rms_norm(x, first.weight("main_norm.weight"), self._model.config.norm_eps)

    def _rows(self, starts: Tensor, length: int) -> Tensor:
        """Return the keys of each block token, [S * B, W + B] int64, -1 holes.

        The window ends at the start, and the block sees all of itself: there is no causal mask in it.
        """
        size, window = self._model.config.draft.block_size, self._model.config.window
        past = (starts[:, None] - torch.arange(window)).clamp(min=-1)
        own = length + torch.arange(len(starts) * size).reshape(-1, size)
        return torch.cat((past, own), 1).repeat_interleave(size, 0)

    def _finish(self, h: Tensor, known: Tensor, guessed: Tensor | None) -> Proposal:
        """Turn the last stage's streams [S, B, hc, D] into tokens, each after the one before it."""
        last, config = self._stages[-1], self._model.config
        x = _collapse_head(last, h.flatten(0, 1)).unflatten(0, h.shape[:2])
        logits = self._model.logits(rms_norm(x, last.weight("norm.weight"), config.norm_eps))
        w1, w2 = (last.weight(f"markov_head.markov_{w}.weight") for w in ("w1", "w2"))
        proj = last.weight("confidence_head.proj.weight")
        tokens, confidence, previous = [], [], known
        for i in range(h.shape[1]):
            e = w1[previous]
            logits[:, i] += F.linear(e.float(), w2.float())
            confidence.append(F.linear(torch.cat((x[:, i], e.to(x.dtype)), -1).float(), proj.float())[:, 0])
            tokens.append(logits[:, i].argmax(-1))
            previous = tokens[-1] if guessed is None else guessed[:, i]
        return Proposal(torch.stack(tokens, 1), logits, torch.stack(confidence, 1))


class NextToken:
    """The MTP layer of the preview releases: from the trunk's streams at t and token t + 1 to token t + 2.

    Args:
        model: The trunk; gives configuration, weights, numerics, embedding and head.
        decisions: Record or replay the choice of experts; None for neither.
    """

    def __init__(self, model: Model, decisions: Decisions | None = None) -> None:
        if model.config.draft.targets or not model.config.draft.stages:
            raise ValueError("the checkpoint has no MTP layer of the preview's kind")
        self._model = model
        self._block = Block(model.config, model.source, model.numerics, "mtp.0", decisions=decisions)

    def state(self) -> BlockState:
        """Return the state before the first token."""
        return self._block.state()

    def __call__(self, h: Tensor, following: Tensor, state: BlockState) -> Tensor:
        """Score the token after the next one.

        Args:
            h: [T, hc, D] streams after the trunk's last layer, at the positions that `state` comes to next.
            following: [T] int64, for each position the token after it.
            state: Changed in place.

        Returns:
            [T, V] float32 logits.
        """
        block, eps = self._block, self._model.config.norm_eps
        numerics = self._model.numerics
        token = rms_norm(self._model.embed(following)[:, 0], block.weight("enorm.weight"), eps)
        trunk = rms_norm(h, block.weight("hnorm.weight"), eps)
        x = linear(token, block.weight("e_proj.weight"), numerics)[:, None]
        x = x + linear(trunk, block.weight("h_proj.weight"), numerics)
        x = _collapse_head(block, block(x, following, state))
        return self._model.logits(rms_norm(x, block.weight("norm.weight"), eps))


def _stage(stage: Block, h: Tensor, ids: Tensor, positions: Tensor, context: Tensor, rows: Tensor) -> Tensor:
    """Run a stage on all blocks, [S * B, hc, D]; `rows` index the context, then the blocks' latents."""

    def attention(x: Tensor) -> Tensor:
        _, q = stage.queries(x, positions)
        keys = torch.cat((context, stage.latents(x, positions)))
        return stage.output(stage.attend(q, keys, rows), positions)

    h = stage.sublayer("attn", h, attention)
    return stage.sublayer("ffn", h, lambda x: stage.experts(x, ids))


def _collapse_head(block: Block, h: Tensor) -> Tensor:
    fn, scale, base = (block.weight(f"hc_head_{part}") for part in ("fn", "scale", "base"))
    return mhc.collapse_head(h, fn, scale, base, block.config)
