"""Wrong models: each must be told from the right one by at least one judge.

Two judges: the logits of transformers on the two tiny checkpoints, and the values of the weights as
transformers decodes them. On Gaussian weights logits show neither a wrong grid of scales nor the limit, the
epsilon and the iterations, which is what the hard checkpoint is for. For some faults they are blind whatever
the checkpoint: the norms after `wq_a`, after `wkv`, and of every head after `wq_b` cancel a factor that is
the same for everything they see. Those are seen in the values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernels_ref import block, compressor, mhc, rotary
from kernels_ref.config import ModelConfig
from kernels_ref.model import Model
from tests.reference.judge import LENGTH, Judge
from tests.reference.tiny import KINDS, Tiny, Weights, prompt, relative
from tests.tolerances import FLOAT32_MODELS

pytestmark = pytest.mark.slow

#: Relative error of the logits beyond any doubt.
VISIBLE = 10 * FLOAT32_MODELS

Mutate = Callable[[Tiny, pytest.MonkeyPatch], Tiny]


# ---- faults of a converter: the stored tensors


def _stored(pattern: str, change: Callable[[Tensor], Tensor]) -> Mutate:
    """Change every tensor with a matching name."""

    def mutate(tiny: Tiny, _: pytest.MonkeyPatch) -> Tiny:
        weights = tiny.weights
        names = [name for name in weights.stored if re.fullmatch(pattern, name)]
        assert names, pattern
        for name in names:
            weights = weights.changed(name, change)
        return replace(tiny, weights=weights)

    return mutate


def _swap(pattern: str, *pair: str) -> Mutate:
    """Exchange the tensors of two bases, weights and scales."""

    def mutate(tiny: Tiny, _: pytest.MonkeyPatch) -> Tiny:
        a, b = (pattern.format(one) for one in pair)
        ends = (".weight", ".scale")
        stored = tiny.weights.stored
        new = {x + end: stored[y + end] for x, y in ((a, b), (b, a)) for end in ends}
        return replace(tiny, weights=Weights(stored | new))

    return mutate


def _doubled(scales: Tensor) -> Tensor:
    return scales + 1


def _reversed(scales: Tensor) -> Tensor:
    return scales.flip(0)


def _halves_swapped(rows: Tensor) -> Tensor:
    return rows.roll(len(rows) // 2, 0)


def _flip_sign(codes: Tensor) -> Tensor:
    raw = codes.view(torch.uint8)
    raw[0, 0] ^= 0x80
    return codes


# ---- faults of a model: its numbers and its code


def _number(**changes: float) -> Mutate:
    return lambda tiny, _: replace(tiny, config=replace(tiny.config, **changes))


def _code(function: str, make: Callable[[Callable[..., Tensor]], object], *modules: object) -> Mutate:
    """Replace a function, in every module that imported it."""

    def mutate(tiny: Tiny, patch: pytest.MonkeyPatch) -> Tiny:
        for module in modules:
            patch.setattr(module, function, make(getattr(module, function)))
        return tiny

    return mutate


def _half_split(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def apply(x: Tensor, table: Tensor, *, inverse: bool = False) -> Tensor:
        dims = table.shape[-1]
        order = torch.arange(dims).reshape(2, -1).T.reshape(-1)
        back = torch.argsort(order)
        mixed = torch.cat((x[..., :-dims], x[..., -dims:][..., order]), -1)
        turned = original(mixed, table, inverse=inverse)
        return torch.cat((turned[..., :-dims], turned[..., -dims:][..., back]), -1)

    return apply


def _never_back(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def apply(x: Tensor, table: Tensor, *, inverse: bool = False) -> Tensor:
        return x if inverse else original(x, table)

    return apply


def _scaled(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def table(freqs: Tensor, positions: Tensor) -> Tensor:
        # The plain table has 10000^(-2 / 64) as its second frequency.
        extended = not torch.isclose(freqs[1], torch.tensor(10000.0 ** (-2 / 64)))
        return original(freqs, positions) * (1.277 if extended else 1.0)

    return table


def _without_yarn(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def frequencies(config: ModelConfig, ratio: int) -> Tensor:
        base = config.compress_theta if ratio else config.rope_theta
        return rotary.frequencies(config.rope_dim, base)

    return frequencies


def _one_theta(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda config, ratio: original(config, 4)


def _untransposed(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda y, h, mixing: original(y, h, mixing._replace(comb=mixing.comb.mT))


def _entry_too_early(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda scores, visible, topk: original(scores, (visible + 1).clamp(max=scores.shape[1]), topk)


def _no_bias(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda scores, bias, top_k: original(scores, torch.zeros_like(bias), top_k)


@dataclass(frozen=True)
class Mutant:
    """A wrong model.

    Attributes:
        mutate: Makes it of a right one.
        blind: Whether logits cannot show it, on any checkpoint.
    """

    mutate: Mutate
    blind: bool = False


_ANY = r"layers\.\d\."
_EXPERTS = _ANY + r"ffn\.experts\.\d\.w\d"
_COMPRESSORS = r"layers\.[24]\.attn\.compressor\."

#: What a converter can get wrong.
CONVERSIONS = {
    "nibbles swapped": Mutant(_stored(rf"{_EXPERTS}\.weight", lambda x: x << 4 | x >> 4)),
    "one expert scale x2": Mutant(_stored(r"layers\.3\.ffn\.experts\.2\.w1\.scale", _doubled)),
    "one sign flipped": Mutant(_stored(r"layers\.1\.attn\.wo_b\.weight", _flip_sign)),
    "w1, w3 of one expert swapped": Mutant(_swap("layers.4.ffn.experts.3.{}", "w1", "w3")),
    "wo_b scales transposed": Mutant(_stored(rf"{_ANY}attn\.wo_b\.scale", lambda x: x.T.clone())),
    "shared w2 scales reversed": Mutant(_stored(rf"{_ANY}ffn\.shared\w+\.w2\.scale", _reversed)),
    "wq_b scales reversed": Mutant(_stored(rf"{_ANY}attn\.wq_b\.scale", _reversed), blind=True),
    "wkv scales x2": Mutant(_stored(rf"{_ANY}attn\.wkv\.scale", _doubled), blind=True),
}
#: What a runtime can get wrong.
RUNTIMES = {
    "compressor halves swapped": Mutant(_stored(_COMPRESSORS + r"w\w+\.weight", _halves_swapped)),
    "compressor ape ignored": Mutant(_stored(_COMPRESSORS + "ape", torch.zeros_like)),
    "sink ignored": Mutant(_stored(rf"{_ANY}attn\.attn_sink", lambda x: x - 1e9)),
    "route scale missing": Mutant(_number(route_scale=1.0)),
    "SwiGLU limit ignored": Mutant(_number(swiglu_limit=float("inf"))),
    "Sinkhorn: 19 iterations": Mutant(_number(hc_iters=19)),
    "norm epsilon 1e-20": Mutant(_number(norm_eps=1e-20)),
    "window one too long": Mutant(_number(window=17)),
    "one entry too many picked": Mutant(_number(index_topk=9)),
    "streams mixed with C for C^T": Mutant(_code("expand", _untransposed, mhc)),
    "rotation of halves for pairs": Mutant(_code("apply_rotary", _half_split, block, compressor)),
    "no rotation back": Mutant(_code("apply_rotary", _never_back, block)),
    "YaRN factor on the table": Mutant(_code("rotary_table", _scaled, block, compressor)),
    "YaRN not applied": Mutant(_code("layer_frequencies", _without_yarn, block)),
    "compress theta in all layers": Mutant(_code("layer_frequencies", _one_theta, block)),
    "incomplete group visible": Mutant(_code("pick_entries", _entry_too_early, block)),
    "router bias ignored": Mutant(_code("choose_by_score", _no_bias, block)),
}


def _wrong_values(tiny: Tiny, judge: Judge) -> Iterator[str]:
    """Yield the matrices that transformers decodes to something else."""
    for name, expected in judge.values.items():
        if ".experts." in name:
            prefix, index, matrix = re.fullmatch(r"(.*)\.ffn\.experts\.(\d)\.(w\d)", name).groups()
            found = getattr(tiny.weights.expert(prefix, int(index)), matrix)
        else:
            found = tiny.weights.tensor(f"{name}.weight")
        if not torch.equal(found.float(), expected):
            yield name


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_transformers(
    kind: str, model: Callable[..., Tiny], judge: Callable[[str], Judge]
) -> None:
    assert len(judge(kind).values) == 5 * (8 + 24) + 2
    assert list(_wrong_values(model(kind), judge(kind))) == []


def test_every_mutant_is_caught(
    model: Callable[..., Tiny], judge: Callable[[str], Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prints the table: relative error of the logits by checkpoint, and whether the values differ."""
    print(f"\n{'mutant':30}" + "".join(f"{kind:>10}" for kind in KINDS) + "    values")
    for name, mutant in (CONVERSIONS | RUNTIMES).items():
        errors, values = {}, False
        for kind in KINDS:
            with monkeypatch.context() as patch:
                tiny = mutant.mutate(model(kind), patch)
                logits = Model(tiny.config, tiny.weights)(prompt(LENGTH))
            errors[kind] = relative(logits, judge(kind).logits)
            values |= name in CONVERSIONS and any(_wrong_values(tiny, judge(kind)))
        print(f"{name:30}" + "".join(f"{errors[kind]:10.1e}" for kind in KINDS) + f"{values!s:>10}")
        assert values == (name in CONVERSIONS), name
        if mutant.blind:
            assert max(errors.values()) < VISIBLE, f"{name}: logits do show it"
        else:
            assert max(errors.values()) > VISIBLE, f"{name}: nobody noticed"
