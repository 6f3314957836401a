"""What conversion and rounding do to the model: equality where it is promised, figures where it is not.

The figures of ``docs/numerics.md`` are what `test_loss_of_each_rounding`, `test_loss_of_one_expert` and
`test_loss_of_each_quantiser` print.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dsv4convert import releases
from kernels_ref import quantize
from kernels_ref.arithmetic import BF16, EXACT, OFFICIAL, SM80, SM80_W4A16, Numerics
from kernels_ref.block import Block
from kernels_ref.config import ModelConfig
from kernels_ref.decisions import Decisions, agreement
from kernels_ref.model import Model
from kernels_ref.source import Expert
from tests import tolerances
from tests.reference.judge import LENGTH
from tests.reference.tiny import KINDS, RELEASE, Tiny, Weights, mxfp4_matrix, prompt, relative


def _run(tiny: Tiny, numerics: Numerics, replayed: Decisions | None = None) -> tuple[Tensor, Decisions]:
    decisions = Decisions() if replayed is None else Decisions.replay(replayed.chosen)
    model = Model(tiny.config, tiny.weights, numerics, decisions=decisions)
    return model(prompt(LENGTH)), decisions


# ---- conversion


@pytest.mark.slow
@pytest.mark.parametrize("numerics", [EXACT, OFFICIAL], ids=["exact", "official"])
@pytest.mark.parametrize("kind", KINDS)
def test_mxfp4_output_is_the_official_model_bit_for_bit(
    kind: str, numerics: Numerics, model: Callable[..., Tiny]
) -> None:
    official, _ = _run(model(kind), numerics)
    converted, _ = _run(model(kind, "mxfp4"), numerics)
    assert torch.equal(converted, official)


def _inexact(official: Tiny, converted: Tiny) -> int:
    """Count the matrices of routed experts whose values the repack changed."""
    experts = [(f"layers.{layer}", e) for layer in range(5) for e in range(official.config.experts)]
    pairs = (
        zip(official.weights.expert(*e).values(), converted.weights.expert(*e).values(), strict=True)
        for e in experts
    )
    return sum(not torch.equal(a.float(), b) for matrices in pairs for a, b in matrices)


@pytest.mark.slow
def test_int8_output_is_the_official_model_bit_for_bit_where_the_repack_is_exact(
    model: Callable[..., Tiny],
) -> None:
    official, converted = model("plain"), model("plain", "int8")
    assert _inexact(official, converted) == 0
    for numerics in (EXACT, SM80):
        assert torch.equal(_run(converted, numerics)[0], _run(official, numerics)[0])


@pytest.mark.slow
def test_int8_output_is_close_where_the_repack_rounds(model: Callable[..., Tiny]) -> None:
    official, converted = model("hard"), model("hard", "int8")
    assert _inexact(official, converted) > 10
    exact, decisions = _run(official, EXACT)
    error = relative(_run(converted, EXACT, decisions)[0], exact)
    print(f"\nINT8_SHIFT that rounds: relative error {error:.1e}")
    assert 0 < error < tolerances.SM80_MODEL


# ---- rounding

SWITCHES = {
    "BF16 between operations": BF16,
    "indexer E2M1 per 32": Numerics(index="e2m1"),
    "indexer INT8 per row": Numerics(index="int8"),
    "KV E4M3 per 64": Numerics(kv="e4m3"),
    "linear inputs E4M3 per 128": Numerics(linear="e4m3"),
    "expert inputs INT8 per token": Numerics(experts="w4a8"),
    "expert inputs two INT8 digits": Numerics(experts="w4a16"),
    "official model": OFFICIAL,
    "SM80, W4A8": SM80,
    "SM80, W4A16": SM80_W4A16,
}


class Loss(NamedTuple):
    """Distance of logits from others: relative error, share of equal argmax, mean KL divergence in nats."""

    error: float
    argmax: float
    kl: float

    @classmethod
    def between(cls, run: Tensor, reference: Tensor) -> Loss:
        p, q = reference.double().log_softmax(-1), run.double().log_softmax(-1)
        same = (run.argmax(-1) == reference.argmax(-1)).double().mean()
        return cls(relative(run, reference), float(same), float((p.exp() * (p - q)).sum(-1).mean()))

    def __str__(self) -> str:
        return f"{self.error:9.1e} {self.argmax:6.3f} {self.kl:8.1e}"


@pytest.mark.slow
def test_loss_of_each_rounding(model: Callable[..., Tiny]) -> None:
    """Prints the table; every row against the exact model, with its own decisions and with the exact ones."""
    tiny = model("plain")
    exact, decisions = _run(tiny, EXACT)
    free, fixed, kept, logits = {}, {}, {}, {}
    print(f"\n{'':32}{'own decisions':^28}{'exact decisions':^28}{'gates':>6} {'indexers':>8}")
    for name, numerics in SWITCHES.items():
        free[name] = Loss.between(_run(tiny, numerics)[0], exact)
        logits[name], replayed = _run(tiny, numerics, decisions)
        fixed[name] = Loss.between(logits[name], exact)
        same = agreement(replayed.own, decisions.chosen)
        kept[name] = tuple(mean(v for n, v in same.items() if part in n) for part in ("gate", "indexer"))
        print(f"{name:32}{free[name]!s:28}{fixed[name]!s:28}{kept[name][0]:6.3f} {kept[name][1]:8.3f}")
    between = Loss.between(logits["SM80, W4A8"], logits["official model"])
    print(f"{'SM80, W4A8, to the official':32}{'':28}{between!s:28}")

    # An indexer acts through its picks alone.
    assert fixed["indexer E2M1 per 32"] == fixed["indexer INT8 per row"] == (0.0, 1.0, 0.0)
    assert fixed["BF16 between operations"].error < tolerances.BF16_MODEL
    assert fixed["SM80, W4A16"].error < tolerances.BF16_MODEL
    assert fixed["SM80, W4A8"].error < tolerances.SM80_MODEL
    assert max(fixed["official model"].error, between.error) < tolerances.OFFICIAL_MODEL
    assert max(fixed["official model"].kl, between.kl) < tolerances.OFFICIAL_MODEL_KL
    # What the page says: the runtime is closer to the exact model than the official arithmetic is.
    assert 2 * fixed["SM80, W4A8"].error < fixed["official model"].error
    assert kept["indexer INT8 per row"][1] > kept["indexer E2M1 per 32"][1] > 0.7
    # Why decisions are replayed: the flips of BF16 alone outweigh all other roundings.
    assert free["BF16 between operations"].error > 3 * fixed["BF16 between operations"].error


def test_loss_of_one_expert() -> None:
    """Prints the table: one routed expert of the release's size on Gaussian inputs and weights."""
    hidden, inner, tokens = 4096, 2048, 8
    shapes = ((inner, hidden), (hidden, inner), (inner, hidden))
    expert = Expert(*(mxfp4_matrix(torch.randn(n, k) * k**-0.5) for n, k in shapes))
    x, weight = torch.randn(tokens, hidden).bfloat16(), torch.rand(tokens, 1) + 0.5
    config = ModelConfig.from_dict(releases.config(RELEASE))

    def run(numerics: Numerics) -> Tensor:
        return Block(config, Weights({}), numerics, "layers.3").expert(x, expert, weight)

    exact = run(EXACT)
    errors = {
        name: relative(run(numerics), exact)
        for name, numerics in {
            "BF16": BF16,
            "official, E4M3 per 128": OFFICIAL,
            "SM80 W4A8, INT8 per token": SM80,
            "SM80 W4A16, two digits": SM80_W4A16,
        }.items()
    }
    print("\n" + "\n".join(f"{name:30}{error:9.1e}" for name, error in errors.items()))
    bf16, official, w4a8, w4a16 = errors.values()
    assert w4a16 < 1.1 * bf16 < w4a8 / 3
    assert w4a8 < official / 1.5


def test_loss_of_each_quantiser() -> None:
    """Prints the table: Gaussian rows of 4096."""
    x = torch.randn(256, 4096)
    codes, scale = quantize.per_token_int8(x)
    digits, fine = quantize.per_token_int16(x)
    errors = {
        "BF16": relative(x.bfloat16(), x),
        "INT8, a scale per token": relative(codes.float() * scale[:, None], x),
        "two INT8 digits": relative((256.0 * digits[:, 0] + digits[:, 1]) * fine[:, None], x),
        "E4M3, a power of two per 128": relative(quantize.fake_e4m3(x), x),
        "E2M1, a power of two per 32": relative(quantize.fake_e2m1(x), x),
    }
    print("\n" + "\n".join(f"{name:30}{error:9.1e}" for name, error in errors.items()))
    bf16, int8, int16, e4m3, e2m1 = errors.values()
    assert int16 < bf16 < int8 < e4m3 / 3 < e2m1 / 10
