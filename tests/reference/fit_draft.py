"""Makes ``tests/data/draft/fitted.safetensors``: draft weights that agree with the trunk of ``plain``.

    python -m tests.reference.fit_draft

A random draft agrees with nothing, and damage to it would not show. This one was trained on the one sequence
that the tests use, so that every part is needed. The stages learn to hold the right token and a decoy equally
likely, the Markov head the right token and another decoy, and only their sum prefers the right one. Without
the trunk's activations, or in another order, the stages learn to prefer the decoy. Weights are rounded to
their formats in every step, so what is trained is what is stored.

The file is committed because training is slow and its result depends on the machine.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4convert.formats.block import dequantize_fp8_block
from kernels_ref.draft import Draft, Taps
from kernels_ref.model import Model
from kernels_ref.source import Expert
from tests.reference import tiny
from tests.shardfile import Row, rows, write_shard

DATA = Path(__file__).resolve().parent.parent / "data" / "draft" / "fitted.safetensors"
#: Tokens of the prompt, and of what the trunk says after it.
PROMPT, SAID = 24, 30

_STEPS = 160
_TRAINED = (
    "mtp.0.main_proj.weight",
    "mtp.0.main_norm.weight",
    *(
        f"mtp.{n}.{part}.weight"
        for n in range(3)
        for part in ("attn.wkv", "attn.wo_b", "ffn.shared_experts.w2", "ffn.shared_experts.w1")
    ),
    "mtp.2.norm.weight",
)
_MARKOV = ("mtp.2.markov_head.markov_w1.weight", "mtp.2.markov_head.markov_w2.weight")


def apply(root: Path) -> None:
    """Replace the fitted tensors in the checkpoint ``plain`` below `root`."""
    fitted = {row[0]: row for row in rows(DATA)}
    for path in sorted(root.glob("model-*.safetensors")):
        found = rows(path)
        if any(name in fitted for name, *_ in found):
            write_shard(path, [fitted.get(row[0], row) for row in found])


class _Trainable:
    """The weights, some of them as numbers that gradients reach."""

    def __init__(self, weights: tiny.Weights) -> None:
        self._weights = weights
        # Decoded once, not in every step.
        self._fixed = cache(lambda name: weights.tensor(name).float())
        self.expert = cache(self._expert)
        self.made = {
            name: weights.tensor(name).float().clone().requires_grad_() for name in (*_TRAINED, *_MARKOV)
        }

    def tensor(self, name: str) -> Tensor:
        if name not in self.made:
            return self._fixed(name)
        value = self.made[name]
        return value + (self.rounded(name) - value).detach()

    def _expert(self, prefix: str, index: int) -> Expert:
        return Expert(*(w.float() for w in self._weights.expert(prefix, index).values()))

    def rounded(self, name: str) -> Tensor:
        """Return the numbers that the stored bytes stand for."""
        value = self.made[name].detach()
        if self._weights.stored[name].dtype is not torch.float8_e4m3fn:
            return value.to(torch.bfloat16).float()
        codes, scales = (
            torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in tiny.fp8_bytes(value)
        )
        n, k = value.shape
        return dequantize_fp8_block(codes.reshape(n, k), scales.reshape(n // 128, k // 128)).float()

    def rows(self) -> list[Row]:
        """Return the tensors as stored."""
        found: list[Row] = []
        for name, value in self.made.items():
            shape = tuple(value.shape)
            if self._weights.stored[name].dtype is not torch.float8_e4m3fn:
                data = value.detach().to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
                found.append((name, "BF16", shape, data))
                continue
            codes, scales = tiny.fp8_bytes(value.detach())
            grid = (shape[0] // 128, shape[1] // 128)
            found.append((name, "F8_E4M3", shape, codes))
            found.append((name.removesuffix(".weight") + ".scale", "F8_E8M0", grid, scales))
        return found


class _Swapped:
    """The weights with the first two stages in each other's place."""

    def __init__(self, source: _Trainable) -> None:
        self._source = source
        self.expert = lambda prefix, index: source.expert(swapped(prefix + ".")[:-1], index)

    def tensor(self, name: str) -> Tensor:
        return self._source.tensor(swapped(name))


def swapped(name: str) -> str:
    """Return the name that a tensor has when the first two stages change places."""
    places = {"mtp.0.": "mtp.1.", "mtp.1.": "mtp.0."}
    first = name[:6]
    return name if ".main_" in name else places.get(first, first) + name[6:]


def _decoys(right: Tensor, vocab: int, seed: int) -> Tensor:
    return (
        right + torch.randint(1, vocab, right.shape, generator=torch.Generator().manual_seed(seed))
    ) % vocab


def _halves(logits: Tensor, right: Tensor, decoy: Tensor) -> Tensor:
    """Return the cross entropy to a distribution that holds two tokens equally likely."""
    scores = F.log_softmax(logits, -1)
    both = torch.stack((right, decoy), -1)
    return -scores.gather(-1, both).mean()


def _stages_alone(
    draft: Draft, seen: Tensor, starts: Tensor, known: Tensor, w1: Tensor, w2: Tensor
) -> Tensor:
    """Return the logits without what the Markov head added after the draft's own tokens."""
    proposal = draft.propose(seen, starts, known)
    own = torch.cat((known[:, None], proposal.tokens[:, :-1]), 1)
    return proposal.logits - w1[own] @ w2.T


def main() -> None:
    """Train, round, write."""
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.Tiny.read(tiny.make(Path(folder), "plain"))
    trunk = Model(model.config, model.weights)
    prompt = tiny.prompt(PROMPT)
    with torch.inference_mode():
        ids = torch.cat((prompt, trunk.generate(prompt, SAID)))
        taps = Taps(trunk)
        trunk(ids, on_layer=taps)
    seen = taps.together().clone()
    size = model.config.draft.block_size
    starts = torch.arange(PROMPT - 1, len(ids) - size - 1)
    right = ids[starts[:, None] + 2 + torch.arange(size)]
    before = ids[starts[:, None] + 1 + torch.arange(size)]
    known = ids[starts + 1]
    source = _Trainable(model.weights)
    draft, other = (Draft(Model(model.config, which)) for which in (source, _Swapped(source)))
    decoy, markov_decoy = (_decoys(right, model.config.vocab, seed) for seed in (1, 2))
    optimizer = torch.optim.Adam(source.made.values(), lr=4e-3)
    for step in range(_STEPS):
        optimizer.zero_grad()
        w1, w2 = (source.tensor(name) for name in _MARKOV)
        markov = w1[before] @ w2.T
        base = _stages_alone(draft, seen, starts, known, w1, w2)
        loss = _halves(base, right, decoy) + _halves(markov, right, markov_decoy)
        for broken, view in ((other, seen), (draft, torch.zeros_like(seen))):
            alone = _stages_alone(broken, view, starts, known, w1, w2)
            loss = loss + F.cross_entropy(alone.flatten(0, 1), decoy.flatten())
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            share = ((base + markov).argmax(-1) == right).float().mean()
            print(f"step {step + 1}: loss {loss.item():.3f}, right {share.item():.3f}", flush=True)
    DATA.parent.mkdir(exist_ok=True)
    write_shard(DATA, source.rows())


if __name__ == "__main__":
    main()
