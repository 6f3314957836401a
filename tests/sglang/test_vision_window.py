"""What positions of a picture see, through SGLang's own metadata, against the rule of the official code."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.attention.dsv4_attn_metadata_kernels import BuildCausalSwaPageIndices
from sglang.srt.layers.attention import deepseek_v4_backend as backend_module
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from tests.sglang import pictures

_WINDOW = 128


def _backend(requests: int, positions: int, seed: int) -> Any:
    """Return the stock backend with the state that its metadata of a prefill is made from."""
    choose = torch.Generator().manual_seed(seed)
    found = object.__new__(backend_module.DeepseekV4AttnBackend)
    table = torch.randperm(requests * positions, generator=choose).view(requests, positions)
    # As in the pool, whose last entry stands for no slot.
    mapping = torch.cat([torch.randperm(requests * positions, generator=choose), torch.tensor([-1])])
    found.req_to_token = table.to(torch.int32)
    found.req_to_token_pool = SimpleNamespace(req_to_token=found.req_to_token)
    found.token_to_kv_pool = SimpleNamespace(full_to_swa_index_mapping=mapping.to(torch.int64))
    found.swa_page_size, found.page_size, found.c4_topk = _WINDOW, 256, 512
    found.cuda_int32_kwargs = {"device": torch.device("cpu"), "dtype": torch.int32}
    found.is_draft_runner = found.is_dspark_draft = False
    found.online_c128_mtp = SimpleNamespace(prepare_forward=lambda *args, **kwargs: 0)
    found.MAX_SEQ_LEN_FOR_CAPTURE = positions
    return found


@pytest.fixture(autouse=True)
def _no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what is made by kernels and has nothing to do with the window."""
    cls = backend_module.DSV4AttnMetadata
    monkeypatch.setattr(cls, "init_compression_metadata", lambda self: None)
    monkeypatch.setattr(cls, "init_flashmla_related", lambda self, is_prefill=False: None)
    monkeypatch.setattr(backend_module, "create_paged_compressor_data", lambda **kwargs: None)
    monkeypatch.setattr(
        backend_module.DeepseekV4AttnBackend, "init_forward_metadata_indexer", lambda *args, **kwargs: None
    )


def _batch(
    prefixes: list[int], lengths: list[int], inputs: list[Any], padding: int = 0, mode: Any = None
) -> SimpleNamespace:
    step = pictures.step(mode or ForwardMode.EXTEND, prefixes, lengths, inputs)
    ends = torch.tensor([p + n for p, n in zip(prefixes, lengths, strict=True)])
    starts = torch.tensor([sum(lengths[:i]) for i in range(len(lengths))])
    vars(step).update(
        req_pool_indices=torch.arange(len(lengths)).flip(0),
        seq_lens=ends,
        seq_lens_cpu=ends,
        out_cache_loc=torch.zeros(sum(lengths) + padding, dtype=torch.int64),
        extend_seq_lens=torch.tensor(lengths, dtype=torch.int32),
        extend_start_loc=starts.to(torch.int32),
        batch_size=len(lengths),
        spec_info=None,
    )
    return step


def _official(position: int, blocks: list[tuple[int, int]]) -> range:
    """Return the keys of a position, as the official code has them.

    It keeps two numbers for each position: how many of its picture lie to the left, START included, and how
    many to the right. To the left it sees 127, and more if the picture begins earlier.
    """
    for lead, stop in blocks:
        start = next(p for p in range(lead, lead + 4) if p % 4 == 3)
        if start <= position < stop:
            left, right = min(position - start, 383), min(stop - 1 - position, 384)
            return range(max(0, position - 127 - max(0, left - 127)), position + right + 1)
    return range(max(0, position - 127), position + 1)


def _require_keys(backend: Any, core: Any, first_row: int, request: int, wanted: list[range]) -> None:
    """Require that rows list exactly these positions of a request, in any order."""
    pool = backend.token_to_kv_pool.full_to_swa_index_mapping
    position_of = torch.full_like(pool, -2)
    position_of[pool[backend.req_to_token[request]]] = torch.arange(backend.req_to_token.shape[1])
    rows = slice(first_row, first_row + len(wanted))
    counts = core.swa_topk_lengths[rows]
    assert counts.tolist() == [len(keys) for keys in wanted]
    listed = core.swa_page_indices[rows].long()
    behind = torch.arange(listed.shape[1]) >= counts[:, None]
    assert torch.equal(listed < 0, behind)
    # Each key once and none else: as many as there are, all different, from the first to the last.
    found = position_of[listed].masked_fill(behind, 1 << 20).sort(1).values
    keys = torch.tensor([k.start for k in wanted])[:, None] + torch.arange(listed.shape[1])
    assert torch.equal(found, keys.masked_fill(behind, 1 << 20))


def _random_blocks(choose: random.Random, first: int, number: int) -> list[tuple[int, int]]:
    """Return blocks of every length that a picture can have, some back to back."""
    found, position = [], first
    for _ in range(number):
        position += choose.choice((0, 1, 2, 3, choose.randrange(200)))
        lead = 3 - position % 4
        tokens = choose.choice((90, 98, 110, 142, 202, 274, 310, 366, 378))
        found.append((position, position + lead + tokens))
        position = found[-1][1]
    return found


def test_every_row_sees_what_the_official_rule_says() -> None:
    """At all four alignments, with a cached prefix, packed blocks, text before and after, padding behind."""
    choose, compared, widest = random.Random(5), 0, 0
    for case in range(20):
        requests = []
        for _ in range(3):
            blocks = _random_blocks(choose, choose.randrange(300), choose.randrange(1, 5))
            total = blocks[-1][1] + choose.randrange(1, 90)
            # A prefix ends before a block, or behind it.
            cached = choose.choice((0, blocks[0][0], blocks[-1][0]))
            requests.append((blocks, total, cached))
        backend = _backend(3, max(total for _, total, _ in requests), case)
        padding = choose.choice((0, 5))
        batch = _batch(
            [cached for *_, cached in requests],
            [total - cached for _, total, cached in requests],
            [pictures.spanned(*blocks) for blocks, *_ in requests],
            padding,
        )
        core = backend._build_forward_metadata(batch).core_attn_metadata
        assert core.swa_page_indices.shape[1] % 64 == 0
        row = 0
        for number, (blocks, total, cached) in enumerate(requests):
            wanted = [_official(position, blocks) for position in range(cached, total)]
            _require_keys(backend, core, row, int(batch.req_pool_indices[number]), wanted)
            widest = max(widest, *map(len, wanted))
            row += total - cached
        compared += row
        assert len(core.swa_topk_lengths) == row + padding
    assert compared >= 30_000 and widest > 378


@pytest.mark.parametrize("padding", [0, 3])
def test_rows_of_text_and_of_padding_are_those_of_stock(padding: int) -> None:
    backend = _backend(2, 700, 1)
    blocks = [(130, 130 + 1 + 366)]
    with_picture = _batch([0, 0], [600, 40], [pictures.spanned(*blocks), None], padding)
    without = _batch([0, 0], [600, 40], [None, None], padding)
    seen = backend._build_forward_metadata(with_picture).core_attn_metadata
    stock = backend._build_forward_metadata(without).core_attn_metadata
    assert stock.swa_page_indices.shape[1] == _WINDOW
    text = torch.tensor([not 131 <= row < 497 for row in range(640 + padding)])
    assert torch.equal(seen.swa_page_indices[text][:, :_WINDOW], stock.swa_page_indices[text])
    assert bool((seen.swa_page_indices[text][:, _WINDOW:] == -1).all())
    assert torch.equal(seen.swa_topk_lengths[text], stock.swa_topk_lengths[text])
    assert not torch.equal(seen.swa_topk_lengths, stock.swa_topk_lengths)


@pytest.mark.parametrize(
    ("mode", "draft", "prefix"),
    [(ForwardMode.EXTEND, True, 0), (ForwardMode.EXTEND, False, 497)],
    ids=["the draft", "behind the picture"],
)
def test_steps_without_a_picture_keep_the_list_of_stock(
    mode: ForwardMode, draft: bool, prefix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = _backend(1, 700, 2)
    backend.is_draft_runner = draft
    calls = []
    execute = BuildCausalSwaPageIndices.execute.__func__

    def count(cls: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["swa_window"])
        return execute(cls, **kwargs)

    monkeypatch.setattr(BuildCausalSwaPageIndices, "execute", classmethod(count))
    batch = _batch([prefix], [600 - prefix], [pictures.spanned((130, 497))], mode=mode)
    core = backend._build_forward_metadata(batch).core_attn_metadata
    assert core.swa_page_indices.shape[1] == _WINDOW and calls == [_WINDOW]


@pytest.mark.parametrize(("prefix", "length"), [(0, 300), (300, 300)], ids=["its start", "its end"])
def test_a_divided_picture_is_reported_and_ends_nothing(
    prefix: int, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Trap 15: an exception would end the server, silence would leave wrong answers."""
    backend = _backend(1, 700, 3)
    batch = _batch([prefix], [length], [pictures.spanned((130, 497))])
    with caplog.at_level(logging.ERROR, "dsv4convert.runtime"):
        core = backend._build_forward_metadata(batch).core_attn_metadata
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == ["dsv4convert"]
    assert "a prefill step divided a picture" in caplog.text
    wanted = [range(max(0, p - 127), p + 1) for p in range(prefix, prefix + length)]
    _require_keys(backend, core, 0, 0, wanted)
