"""A prefill step with pictures: rows of embeddings, routed experts, and steps that have none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.managers import mm_utils
from sglang.srt.managers.schedule_batch import MultimodalDataItem, MultimodalInputs
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models import deepseek_v4 as stock

from dsv4convert.vision.layout import Kind
from tests.sglang import pictures
from tests.sglang.world import Loaded

#: An id of text; the tiny vocabulary has 512.
_WORD = 7


@pytest.fixture
def model(loaded: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the loaded model with an empty cache of rows; the router's kernels are for a GPU."""
    mm_utils.init_mm_embedding_cache(100 << 20)
    with envs.SGLANG_OPT_USE_FUSED_HASH_TOPK.override(False):
        yield loaded("vision-int8").model


def _request(items: list[MultimodalDataItem], length: int) -> tuple[MultimodalInputs, torch.Tensor]:
    """Return the inputs of a request of so many tokens and its ids, as the scheduler makes them."""
    ids = torch.full((length,), _WORD)
    for item in items:
        (first, last), *_ = item.offsets
        ids[first : last + 1] = item.pad_value
    return MultimodalInputs(mm_items=items), ids


def _rows(model: Any, item: MultimodalDataItem) -> torch.Tensor:
    """Return the rows of a picture without any cache."""
    return model.get_image_feature([item])


# ---- embeddings


@pytest.mark.parametrize("start", [4, 5, 6, 7])
def test_positions_of_a_block_take_its_rows_and_text_keeps_its_own(model: Any, start: int) -> None:
    grid = pictures.grid(7, 5, model.numbers)
    patches = torch.randn(grid.patches, 3, 14, 14).to(torch.bfloat16)
    item, block = pictures.item(patches, grid, start)
    inputs, ids = _request([item], block.stop + 3)
    batch = pictures.step(ForwardMode.EXTEND, [0], [len(ids)], [inputs])
    before = ids.clone()
    found = model._embed(ids, batch)
    # SGLang clamps ids in place; those of the step must stay.
    assert torch.equal(ids, before)
    text = model.model.embed_tokens(torch.tensor([_WORD]))[0]
    in_block = torch.zeros(len(ids), dtype=torch.bool)
    in_block[block.start : block.stop] = True
    assert torch.equal(found[~in_block], text.expand(int((~in_block).sum()), -1))
    features = model.tower.features(patches, grid)
    vectors = {
        Kind.START: model.tower.image_start,
        Kind.PAD: model.tower.image_pad,
        Kind.NEWLINE: model.tower.image_newline,
        Kind.END: model.tower.image_end,
    }
    places = iter(block.perm)
    for position, kind in enumerate(block.kinds, block.start):
        wanted = features[next(places)] if kind == Kind.IMAGE else vectors[Kind(kind)]
        assert torch.equal(found[position], wanted), (position, kind)
    assert block.span.first % 4 == 3 and len(block.kinds) == block.lead + grid.tokens


def test_a_picture_that_comes_again_at_every_alignment_gets_its_rows_from_the_cache(model: Any) -> None:
    """Traps 1 and 2: a kept block of another length ends the server, or shifts every row by one."""
    grid = pictures.grid(6, 6, model.numbers)
    patches = torch.randn(grid.patches, 3, 14, 14).to(torch.bfloat16)
    lengths, hashes = set(), set()
    for start in (4, 5, 6, 7, 7, 6, 5, 4):
        item, block = pictures.item(patches.clone(), grid, start)
        inputs, ids = _request([item], block.stop + 1)
        found = model._embed(ids, pictures.step(ForwardMode.EXTEND, [0], [len(ids)], [inputs]))
        assert torch.equal(found[block.start : block.stop], _rows(model, item))
        lengths.add(len(block.kinds))
        hashes.add(item.hash)
    assert len(lengths) == len(hashes) == 4


def test_without_the_alignment_in_the_hash_a_second_look_ends_the_server(model: Any) -> None:
    """The twin: SGLang's own hash is of the bytes alone."""
    grid = pictures.grid(6, 6, model.numbers)
    patches = torch.randn(grid.patches, 3, 14, 14).to(torch.bfloat16)

    def look(start: int) -> torch.Tensor:
        item, block = pictures.item(patches.clone(), grid, start)
        item.hash = item.pad_value = None
        item.set_pad_value()
        inputs, ids = _request([item], block.stop + 1)
        return model._embed(ids, pictures.step(ForwardMode.EXTEND, [0], [len(ids)], [inputs]))

    look(7)
    with pytest.raises(RuntimeError, match="Insufficient multimodal embedding length"):
        look(4)


def test_equal_bytes_on_another_grid_are_another_picture(model: Any) -> None:
    """Trap 3: a plain white picture upright and lying has the same patches."""
    patches = torch.ones(2 * 28 * 14 // 2, 3, 14, 14, dtype=torch.bfloat16)
    both = [
        pictures.item(patches.clone(), pictures.grid(r, c, model.numbers), 4) for r, c in ((28, 14), (14, 28))
    ]
    assert both[0][0].hash != both[1][0].hash
    assert len(both[0][1].kinds) != len(both[1][1].kinds)
    for item, block in both:
        inputs, ids = _request([item], block.stop)
        found = model._embed(ids, pictures.step(ForwardMode.EXTEND, [0], [len(ids)], [inputs]))
        assert torch.equal(found[block.start :], _rows(model, item))


def test_several_pictures_several_requests_and_a_prefix_that_is_cached(model: Any) -> None:
    first, second = pictures.grid(4, 9, model.numbers), pictures.grid(9, 4, model.numbers)
    made = []
    # Back to back in the first request; text only in the second; in the third the first picture is cached.
    position = 6
    for grid in (first, second):
        patches = torch.randn(grid.patches, 3, 14, 14).to(torch.bfloat16)
        item, block = pictures.item(patches, grid, position)
        made.append((item, block))
        position = block.stop
    one, ids_one = _request([item for item, _ in made], position + 2)
    third, ids_third = _request([item for item, _ in made], position + 2)
    cut = made[0][1].stop
    batch = pictures.step(
        ForwardMode.EXTEND, [0, 0, cut], [len(ids_one), 5, len(ids_third) - cut], [one, None, third]
    )
    found = model._embed(torch.cat([ids_one, torch.full((5,), _WORD), ids_third[cut:]]), batch)
    for item, block in made:
        assert torch.equal(found[block.start : block.stop], _rows(model, item))
    tail = found[len(ids_one) + 5 :]
    item, block = made[1]
    assert torch.equal(tail[block.start - cut : block.stop - cut], _rows(model, item))
    # What a request holds lies in memory of the machine, not of the card.
    assert all(item.feature.device.type == "cpu" for item, _ in made)


# ---- routing


def _official(logits: torch.Tensor, bias: torch.Tensor, k: int) -> dict[int, float]:
    """Return expert -> weight of one token, one number at a time in float64."""
    scores = [(1 + x.exp()).log().sqrt() for x in logits.double()]
    chosen = sorted(range(len(scores)), key=lambda e: -float(scores[e] + bias.double()[e]))[:k]
    total = sum(scores[e] for e in chosen)
    return {e: float(scores[e] / total) for e in chosen}


@pytest.mark.parametrize("layer", range(5))
def test_rows_of_pictures_are_routed_by_their_bias_and_text_as_ever(
    model: Any, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap 11: hash layers route pictures by score, and no row of a picture by the id it stands under."""
    mlp, tokens = model.model.layers[layer].mlp, 40
    bias = mlp.gate.e_score_correction_bias_vl
    # Those of the checkpoint hardly differ from one another.
    monkeypatch.setattr(bias, "data", torch.randn_like(bias))
    logits = torch.randn(tokens, bias.shape[0])
    hidden = torch.randn(tokens, 256).to(torch.bfloat16)
    ids = {"input_ids": torch.arange(tokens) % 512} if mlp.is_hash else {}
    stock_output = mlp.topk(hidden, logits, **ids)
    assert mlp.is_hash is (layer < 2)
    is_picture = torch.arange(tokens) % 3 == 0
    with model._showing(is_picture, torch.empty(0)):
        found = mlp.topk(hidden, logits, **ids)
    text = ~is_picture
    assert torch.equal(found.topk_ids[text], stock_output.topk_ids[text])
    assert torch.equal(found.topk_weights[text], stock_output.topk_weights[text])
    assert found.topk_ids.dtype == stock_output.topk_ids.dtype
    k = stock_output.topk_ids.shape[1]
    for token in is_picture.nonzero()[:, 0].tolist():
        wanted = _official(logits[token], bias, k)
        chosen = dict(zip(found.topk_ids[token].tolist(), found.topk_weights[token].tolist(), strict=True))
        assert chosen == pytest.approx(wanted, rel=1e-5)
    # The bias decides: without it other experts would have been chosen somewhere.
    plain = [set(_official(logits[t], torch.zeros_like(bias), k)) for t in range(0, tokens, 3)]
    assert plain != [set(found.topk_ids[t].tolist()) for t in range(0, tokens, 3)]


# ---- whole steps


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stand in for SGLang's forward: embed the ids, route them in the first layer, remember both."""
    remembered: list[dict[str, Any]] = []

    def forward(self: Any, input_ids: torch.Tensor, *args: Any) -> str:
        hidden = self.model.embed_tokens(input_ids)
        topk = self.model.layers[0].mlp.topk
        logits = torch.linspace(-1, 1, len(input_ids) * 4).view(-1, 4)
        routed = topk(hidden, logits, input_ids=input_ids)
        remembered.append({"ids": input_ids, "embedded": hidden, "routed": routed})
        return "logits"

    monkeypatch.setattr(stock.DeepseekV4ForCausalLM, "forward", forward)
    return remembered


def test_a_step_with_a_picture(model: Any, seen: list[dict[str, Any]]) -> None:
    grid = pictures.grid(5, 5, model.numbers)
    item, block = pictures.item(torch.randn(25, 3, 14, 14).to(torch.bfloat16), grid, 9)
    inputs, ids = _request([item], block.stop + 4)
    batch = pictures.step(ForwardMode.EXTEND, [0], [len(ids)], [inputs])
    assert model.forward(ids, torch.arange(len(ids)), batch) == "logits"
    (step,) = seen
    # Ids that exist reach tables by id, and prompt log-probabilities (trap 19).
    assert int(step["ids"].max()) < 512 and torch.equal(step["ids"][: block.start], ids[: block.start])
    assert torch.equal(step["embedded"][block.start : block.stop], _rows(model, item))
    assert model._is_picture is None and model._embedded is None


@pytest.mark.parametrize(
    ("mode", "prefix"),
    [(ForwardMode.DECODE, 0), (ForwardMode.TARGET_VERIFY, 0), (ForwardMode.EXTEND, 400)],
    ids=["decode", "verification", "a later step"],
)
def test_steps_without_a_picture_run_stock_code_alone(
    model: Any, seen: list[dict[str, Any]], mode: ForwardMode, prefix: int
) -> None:
    """Trap 12: nothing of ours runs in what a graph captures; the request's picture was taken in before."""
    grid = pictures.grid(5, 5, model.numbers)
    item, block = pictures.item(torch.randn(25, 3, 14, 14).to(torch.bfloat16), grid, 9)
    inputs, _ = _request([item], block.stop)
    ids = torch.arange(8)
    batch = pictures.step(mode, [prefix], [8], [inputs])
    model.forward(ids, ids, batch)
    (step,) = seen
    assert step["ids"] is ids
    assert torch.equal(step["embedded"], model.model.embed_tokens(ids))
    topk = model.model.layers[0].mlp.topk
    assert torch.equal(step["routed"].topk_ids, topk.tid2eid[ids])


def test_an_error_leaves_no_picture_behind(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, *args: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(stock.DeepseekV4ForCausalLM, "forward", forward)
    grid = pictures.grid(5, 5, model.numbers)
    item, block = pictures.item(torch.randn(25, 3, 14, 14).to(torch.bfloat16), grid, 9)
    inputs, ids = _request([item], block.stop)
    with pytest.raises(RuntimeError, match="out of memory"):
        model.forward(ids, ids, pictures.step(ForwardMode.EXTEND, [0], [len(ids)], [inputs]))
    assert model._is_picture is None and model._embedded is None


def test_a_retracted_request_is_taken_in_again(model: Any) -> None:
    """Trap 22: its rows may have left the cache, so that its patches are still needed."""
    grid = pictures.grid(6, 9, model.numbers)
    item, block = pictures.item(torch.randn(54, 3, 14, 14).to(torch.bfloat16), grid, 5)
    inputs, ids = _request([item], block.stop + 2)
    batch = pictures.step(ForwardMode.EXTEND, [0], [len(ids)], [inputs])
    first = model._embed(ids, batch)
    mm_utils.init_mm_embedding_cache(100 << 20)
    longer = torch.cat([ids, torch.full((3,), _WORD)])
    again = model._embed(longer, pictures.step(ForwardMode.EXTEND, [0], [len(longer)], [inputs]))
    assert torch.equal(first, again[: len(ids)])
