"""The reference model against transformers: two implementations in float32, the same files."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels_ref.model import Model
from tests.reference.judge import DECODE_FROM, DECODE_TOKENS, LENGTH, Judge
from tests.reference.tiny import KINDS, RELEASE, Tiny, prompt, relative
from tests.tolerances import FLOAT32_MODELS, FLOAT32_MODELS_MAX

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", KINDS)
def test_logits_agree(kind: str, model: Callable[..., Tiny], judge: Callable[[str], Judge]) -> None:
    tiny, expected = model(kind), judge(kind).logits
    found = Model(tiny.config, tiny.weights)(prompt(LENGTH))
    print(f"\n{RELEASE}, {kind}: relative error {relative(found, expected):.1e}")
    assert 0.9 < expected.std() < 1.1, "the tiny model decides something"
    assert expected.argmax(-1).unique().numel() > LENGTH // 4
    assert relative(found, expected) < FLOAT32_MODELS
    assert (found - expected).abs().max() < FLOAT32_MODELS_MAX * expected.std()
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_agree_through_both_caches(
    kind: str, model: Callable[..., Tiny], judge: Callable[[str], Judge]
) -> None:
    """The first step that completes a group of 128 lies among the decoded ones."""
    tiny, expected = model(kind), judge(kind).greedy
    found = Model(tiny.config, tiny.weights).generate(prompt(LENGTH)[:DECODE_FROM], DECODE_TOKENS)
    assert len(set(expected)) > DECODE_TOKENS // 2, "a repeated token would prove little"
    assert found.tolist() == expected
