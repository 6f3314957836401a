"""Each switch of `Numerics` rounds what it says and nothing else; sizes of steps change nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels_ref import arithmetic, block
from kernels_ref.arithmetic import EXACT, Numerics
from kernels_ref.block import Block
from kernels_ref.model import Model
from tests.reference.tiny import Tiny, prompt, relative
from tests.tolerances import FLOAT32_SUMS

HIDDEN, Q_LORA, O_LORA, INNER, NOPE = 256, 128, 2 * 128, 128, 128 - 64
TOKENS = 9


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Return ``watch(module, function)``: the widths of what the function gets from now on."""

    def watch(module: object, function: str) -> list[int]:
        seen: list[int] = []
        original = getattr(module, function)

        def spy(x: Tensor, *rest: object) -> Tensor:
            seen.append(x.shape[-1])
            return original(x, *rest)

        monkeypatch.setattr(module, function, spy)
        return seen

    return watch


def _layer_2(model: Callable[..., Tiny], numerics: Numerics) -> Block:
    """Return a layer with ratio 4, which has every part."""
    tiny = model("plain")
    return Model(tiny.config, tiny.weights, numerics).blocks[2]


def test_linear_rounds_inputs_of_fp8_layers_and_experts(
    model: Callable[..., Tiny], widths: Callable[..., list[int]]
) -> None:
    seen = widths(arithmetic, "fake_e4m3")
    layer, x = _layer_2(model, Numerics(linear="e4m3")), torch.randn(TOKENS, HIDDEN)
    layer.attention(x, prompt(TOKENS), layer.state())
    # wq_a, wq_b, wkv, the indexer's wq_b, wo_b; not wo_a, both compressors, weights_proj.
    assert seen == [HIDDEN, Q_LORA, HIDDEN, Q_LORA, O_LORA]
    seen.clear()
    chosen, _ = layer.route(x, prompt(TOKENS), 0)
    layer.experts(x, prompt(TOKENS))
    # w1, w3, w2 of each routed expert and of the shared one; not the gate.
    assert seen == [HIDDEN, HIDDEN, INNER] * (chosen.unique().numel() + 1)


def test_kv_rounds_unrotated_dims_of_latents_and_entries(
    model: Callable[..., Tiny], widths: Callable[..., list[int]]
) -> None:
    linear, kv = widths(arithmetic, "fake_e4m3"), widths(block, "fake_e4m3")
    layer, x = _layer_2(model, Numerics(kv="e4m3")), torch.randn(TOKENS, HIDDEN)
    state = layer.state()
    layer.attention(x, prompt(TOKENS), state)
    assert (linear, kv) == ([], [NOPE, NOPE])
    plain = _layer_2(model, EXACT)
    exact = plain.state()
    plain.attention(x, prompt(TOKENS), exact)
    pairs = ((state.window, exact.window), (state.compressed, exact.compressed))
    for rounded, kept in pairs:
        assert torch.equal(rounded[:, NOPE:], kept[:, NOPE:])
        assert not torch.equal(rounded[:, :NOPE], kept[:, :NOPE])


@pytest.mark.parametrize(("index", "function"), [("e2m1", "fake_e2m1"), ("int8", "index_int8")])
def test_index_rounds_queries_and_keys_after_the_rotation(
    index: str, function: str, model: Callable[..., Tiny], widths: Callable[..., list[int]]
) -> None:
    rotated, rounded = widths(block, "hadamard"), widths(block, function)
    layer = _layer_2(model, Numerics(index=index))
    layer.attention(torch.randn(TOKENS, HIDDEN), prompt(TOKENS), layer.state())
    assert rotated == rounded == [128, 128]


def test_nothing_is_rounded_in_the_exact_model(
    model: Callable[..., Tiny], widths: Callable[..., list[int]]
) -> None:
    watched = [widths(arithmetic, "fake_e4m3")]
    watched += [widths(block, name) for name in ("fake_e4m3", "fake_e2m1", "index_int8", "hadamard")]
    tiny = model("plain")
    logits = Model(tiny.config, tiny.weights)(prompt(TOKENS))
    assert logits.dtype == torch.float32
    assert watched == [[]] * 5


def test_size_of_steps_changes_nothing(model: Callable[..., Tiny], monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny vocabulary fits one strip of the head; a real one does not."""
    tiny = model("plain")
    whole = Model(tiny.config, tiny.weights)(prompt(40))
    monkeypatch.setattr(block, "_QUERIES", 7)
    monkeypatch.setattr("kernels_ref.model._HEAD_ROWS", 100)
    assert relative(Model(tiny.config, tiny.weights)(prompt(40)), whole) < FLOAT32_SUMS
