"""Pictures in the reference model: what their rows see and where they are routed, computed a second time."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4convert.vision.layout import Block as Layout
from dsv4convert.vision.layout import Grid, expand, spans, visible_range
from kernels_ref import block as block_module
from kernels_ref.block import Block
from kernels_ref.decisions import Decisions
from kernels_ref.model import Model
from kernels_ref.pictures import window_positions
from tests.reference.tiny import Tiny, relative
from tests.tolerances import FLOAT32_MODELS
from tests.vision.conftest import numbers
from tests.vision.test_layout import conversation, official_bounds

VOCAB, WINDOW = 512, 16
#: Stands for a picture in a prompt; an ordinary id of the vocabulary.
PLACEHOLDER = 496


def picture_prompt() -> tuple[Tensor, tuple[Layout, ...]]:
    """Return ids with three pictures, two of them back to back, and text before, between and after."""
    rng = random.Random(3)
    text = [rng.randrange(PLACEHOLDER) for _ in range(140)]
    grids = [Grid(42 * c, 42 * r, 3 * r, 3 * c, r, c) for r, c in ((3, 5), (2, 2), (5, 4))]
    ids = [*text[:70], PLACEHOLDER, PLACEHOLDER, *text[70:101], PLACEHOLDER, *text[101:]]
    done = expand(ids, grids, PLACEHOLDER, VOCAB)
    return torch.tensor(done.ids), done.blocks


def picture_rows(ids: Tensor, seed: int = 0) -> Tensor:
    count = int((ids >= VOCAB).sum())
    return torch.randn(count, 256, generator=torch.Generator().manual_seed(seed))


def inputs(length: int) -> Tensor:
    return torch.randn(length, 256, generator=torch.Generator().manual_seed(8))


# ---- what is seen


@pytest.mark.parametrize("alignment", range(4))
def test_windows_of_40000_rows_are_the_official_ones(alignment: int) -> None:
    vision = numbers()
    ids, _ = conversation(alignment, vision)
    first, last = official_bounds(np.array(ids), vision.vocab, 128)
    rows = window_positions(torch.tensor(ids), 0, vision.vocab, 128)
    width = int((last - first).max()) + 1
    expected = last[:, None] - np.arange(width)
    expected[expected < first[:, None]] = -1
    assert 128 < width <= 512 and np.array_equal(rows.numpy(), expected)
    # The server asks `layout` what this model asks its ids.
    listed = visible_range(0, len(ids), spans(ids, vision.vocab))
    assert listed == list(zip(first.tolist(), last.tolist(), strict=True))


def test_windows_of_text_are_those_before_there_were_pictures() -> None:
    rows = window_positions(torch.arange(300), 1000, VOCAB, 128)
    assert torch.equal(rows, 1000 + torch.arange(300)[:, None] - torch.arange(128))
    assert window_positions(torch.tensor([7]), 2, VOCAB, 5).tolist() == [[2, 1, 0, -1, -1]]


@pytest.mark.parametrize("cut", ["after START", "before END", "between", "twice"])
def test_a_cut_picture_is_refused(cut: str) -> None:
    ids, (first, *_) = picture_prompt()
    span = first.span
    pieces = {
        "after START": ids[span.first + 1 :],
        "before END": ids[: span.last],
        "between": ids[span.first + 3 : span.last - 3],
        "twice": torch.cat((ids[: span.last], ids[span.first :])),
    }
    whole = window_positions(ids, 0, VOCAB, WINDOW)
    if cut == "between":
        # Nothing there tells that it is no text: such a piece is only refused where its ends are.
        ids = torch.cat((ids[: span.first], pieces[cut], ids[span.last + 1 :]))
        assert window_positions(ids, 0, VOCAB, WINDOW).shape == (len(ids), whole.shape[1])
        return
    with pytest.raises(ValueError, match="a picture is cut"):
        window_positions(pieces[cut], 0, VOCAB, WINDOW)


def attended(layer: Block, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of a layer's attention and the rows of latents and entries that it listed."""
    kept: list[Tensor] = []
    real = layer.attend

    def note(q: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
        kept.append(rows)
        return real(q, keys, rows)

    layer.attend = note  # type: ignore[method-assign]
    return layer.attention(x, ids, layer.state()), kept[0]


@pytest.mark.parametrize(("index", "ratio"), [(0, 0), (2, 4), (3, 128)])
def test_only_the_window_widens(index: int, ratio: int, model: Callable[..., Tiny]) -> None:
    """Latents by the rule for pictures, compressed entries by the rule for text."""
    tiny = model("pictures")
    layer = Model(tiny.config, tiny.weights).blocks[index]
    ids, blocks = picture_prompt()
    _, rows = attended(layer, inputs(len(ids)), ids)
    bounds = visible_range(0, len(ids), [b.span for b in blocks], WINDOW)
    for position, (row, (first, last)) in enumerate(zip(rows.tolist(), bounds, strict=True)):
        latents = sorted(r for r in row if 0 <= r < len(ids))
        entries = sorted(r - len(ids) for r in row if r >= len(ids))
        assert latents == list(range(first, last + 1))
        complete = (position + 1) // ratio if ratio else 0
        if ratio == 4:
            assert len(entries) == min(8, complete) == len(set(entries)) and entries <= [complete - 1] * 8
            assert all(0 <= e < complete for e in entries)
        else:
            assert entries == list(range(complete))


def test_attention_of_a_picture_is_a_softmax_over_what_it_sees(model: Callable[..., Tiny]) -> None:
    tiny = model("pictures")
    layer = Model(tiny.config, tiny.weights).blocks[0]
    ids, blocks = picture_prompt()
    x, positions = inputs(len(ids)), torch.arange(len(ids))
    _, q = layer.queries(x, positions)
    keys = layer.latents(x, positions)
    sink = tiny.weights.tensor("layers.0.attn.attn_sink").double()
    by_position = {p: b.span for b in blocks for p in range(b.span.first, b.span.last + 1)}
    outputs = []
    for p in range(len(ids)):
        span = by_position.get(p)
        first = max(0, min(p - 15, span.first) if span else p - 15)
        seen = keys[first : (span.last if span else p) + 1].double()
        weights = torch.softmax(torch.cat((q[p].double() @ seen.T * 128**-0.5, sink[:, None]), 1), 1)
        outputs.append(weights[:, :-1] @ seen)
    expected = layer.output(torch.stack(outputs).float(), positions)
    assert relative(layer.attention(x, ids, layer.state()), expected) < FLOAT32_MODELS


# ---- where it is routed


@pytest.mark.parametrize("index", range(5))
def test_pictures_are_routed_by_their_own_bias_in_every_layer(index: int, model: Callable[..., Tiny]) -> None:
    """The official gate, again in numpy: all five kinds of rows take `bias_vl`, in hash layers too."""
    tiny = model("pictures")
    prefix = f"layers.{index}.ffn.gate"
    weight, picture_bias, text_bias = (
        tiny.weights.tensor(f"{prefix}.{part}").double().numpy() for part in ("weight", "bias_vl", "bias")
    )
    ids, _ = picture_prompt()
    x = inputs(len(ids))
    scores = np.sqrt(np.log1p(np.exp(x.double().numpy() @ weight.T)))
    hashed = index < tiny.config.hash_layers
    chosen, weights = Model(tiny.config, tiny.weights).blocks[index].route(x, ids, 0)
    kinds = set()
    for row, token in enumerate(ids.tolist()):
        if token >= VOCAB:
            kinds.add(token - VOCAB)
            expected = np.argsort(-(scores[row] + picture_bias))[:2]
        elif hashed:
            expected = tiny.weights.tensor(f"{prefix}.tid2eid")[token].numpy()
        else:
            expected = np.argsort(-(scores[row] + text_bias))[:2]
        assert chosen[row].tolist() == expected.tolist()
        share = scores[row][expected] / scores[row][expected].sum() * 1.5
        assert weights[row].tolist() == pytest.approx(share.tolist(), rel=1e-5)
    assert kinds == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("index", [0, 3])
def test_a_placeholder_that_is_left_in_the_ids_is_routed_as_text(
    index: int, model: Callable[..., Tiny]
) -> None:
    """Trap: it is an id of the vocabulary, so nothing fails; the rows go to other experts."""
    tiny = model("pictures")
    layer = Model(tiny.config, tiny.weights).blocks[index]
    ids, _ = picture_prompt()
    x, picture = inputs(len(ids)), ids >= VOCAB
    right, _ = layer.route(x, ids, 0)
    wrong, _ = layer.route(x, ids.masked_fill(picture, PLACEHOLDER), 0)
    assert torch.equal(right[~picture], wrong[~picture])
    changed = (right.sort().values != wrong.sort().values).any(1)
    assert changed[picture].double().mean() > 0.3


# ---- the whole model


def test_rows_of_pictures_replace_the_embedding(model: Callable[..., Tiny]) -> None:
    tiny = model("pictures")
    whole = Model(tiny.config, tiny.weights)
    ids, _ = picture_prompt()
    rows = picture_rows(ids)
    streams = whole.embed(ids, rows)
    picture = ids >= VOCAB
    assert torch.equal(streams[picture], rows[:, None].expand(-1, 4, -1))
    assert torch.equal(streams[~picture], whole.embed(ids[~picture]))
    for wrong in (rows[1:], torch.cat((rows, rows[:1])), None):
        with pytest.raises(ValueError, match=f"{len(rows)} positions are of pictures"):
            whole.embed(ids, wrong)
    with pytest.raises(ValueError, match="0 positions are of pictures, and 1 rows"):
        whole.embed(ids[:9], rows[:1])


def test_a_sequence_with_pictures_in_pieces_is_the_whole(model: Callable[..., Tiny]) -> None:
    tiny = model("pictures")
    record = Decisions()
    ids, blocks = picture_prompt()
    rows = picture_rows(ids)
    expected = Model(tiny.config, tiny.weights, decisions=record)(ids, pictures=rows)
    whole = Model(tiny.config, tiny.weights, decisions=Decisions.replay(record.chosen))
    state, found, used = whole.state(), [], 0
    cuts = [0, 33, blocks[0].start, blocks[1].start, blocks[1].stop, blocks[2].start, len(ids) - 3, len(ids)]
    for start, stop in pairwise(cuts):
        piece = ids[start:stop]
        count = int((piece >= VOCAB).sum())
        found.append(whole(piece, state, pictures=rows[used : used + count] if count else None))
        used += count
    assert relative(torch.cat(found), expected) < FLOAT32_MODELS


def _causal(ids: Tensor, start: int, vocab: int, window: int) -> Tensor:
    return window_positions(ids.clamp(max=vocab - 1), start, vocab, window)


def _from_lead_pad(ids: Tensor, start: int, vocab: int, window: int) -> Tensor:
    """Let a picture begin at its first lead PAD: PADs before a START become it."""
    moved = ids.tolist()
    for at, token in enumerate(moved):
        first = at
        while token == vocab and first > 0 and moved[first - 1] == vocab + 1:
            first -= 1
        if first < at:
            moved[first], moved[at] = vocab, vocab + 1
    return window_positions(torch.tensor(moved), start, vocab, window)


@pytest.mark.parametrize("mistake", [_causal, _from_lead_pad])
def test_a_wrong_window_moves_the_logits(
    mistake: Callable[..., Tensor], model: Callable[..., Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = model("pictures")
    ids, blocks = picture_prompt()
    rows = picture_rows(ids)
    right = Model(tiny.config, tiny.weights)(ids, pictures=rows)
    monkeypatch.setattr(block_module, "window_positions", mistake)
    wrong = Model(tiny.config, tiny.weights)(ids, pictures=rows)
    assert sum(b.lead for b in blocks) > 0
    assert relative(wrong[: blocks[0].start], right[: blocks[0].start]) < FLOAT32_MODELS
    assert relative(wrong, right) > 100 * FLOAT32_MODELS
    assert relative(wrong[-1], right[-1]) > 10 * FLOAT32_MODELS


def test_another_picture_gives_another_answer(model: Callable[..., Tiny]) -> None:
    tiny = model("pictures")
    whole = Model(tiny.config, tiny.weights)
    ids, blocks = picture_prompt()
    one, two = whole(ids, pictures=picture_rows(ids, 0)), whole(ids, pictures=picture_rows(ids, 1))
    assert torch.equal(one[: blocks[0].start], two[: blocks[0].start])
    assert relative(two[-1], one[-1]) > 0.01


def test_rows_of_zeros_stay_finite(model: Callable[..., Tiny]) -> None:
    """Trap: `rms_norm_eps` of this release is 1e-20, and rows that are all zero must not divide by 0."""
    tiny = model("pictures")
    assert tiny.config.norm_eps == 1e-20
    ids, _ = picture_prompt()
    rows = torch.zeros_like(picture_rows(ids))
    assert bool(Model(tiny.config, tiny.weights)(ids, pictures=rows).isfinite().all())
