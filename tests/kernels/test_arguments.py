"""What references and kernels refuse: the same sentence from both, before anything is computed or launched.

Kernels compute addresses from shapes and strides, so each of these would give other numbers on a card, or
read beyond a tensor. The legal neighbour of every fault is the call that it was made from.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels_ref.attention
import kernels_ref.convert
import kernels_ref.indexer
import kernels_ref.moe
import kernels_ref.sm80.attention
import kernels_ref.sm80.convert
import kernels_ref.sm80.indexer
import kernels_ref.sm80.moe
from kernels_ref.sm80.quantize import per_token_int8
from kernels_ref.tensors import Int8Shift
from tests.kernels.experts import random_experts, random_routing, relative_error
from tests.kernels.interpreted import call
from tests.kernels.listed import draw_attention, draw_index, table
from tests.kernels.test_moe import TILES
from tests.tolerances import MOE_AGAINST_REFERENCE

Arguments = dict[str, Any]


def _layer() -> Arguments:
    w13, w2 = random_experts(3, hidden=256, intermediate=128)
    weights, ids = random_routing(4, 2, 3)
    x = torch.randn(4, 256).bfloat16()
    return {"x": x, "w13": w13, "w2": w2, "topk_weights": weights, "topk_ids": ids, "out": None}


def _alignment() -> Arguments:
    return {"topk_ids": random_routing(4, 2, 3)[1], "block": 4, "experts": 3}


def _attention() -> Arguments:
    problem = draw_attention(0, tokens=3, heads=2, width=8, extra=8)
    names = ("q", "cache", "indices", "lengths", "sink", "scale")
    return dict(zip(names, problem.args(), strict=True)) | problem.keywords() | {"out": None}


def _latents() -> Arguments:
    places = {"positions": torch.arange(3), "slots": torch.tensor([1, -1, 0])}
    kv, cache = torch.randn(3, 512).bfloat16(), torch.zeros(2, 512).bfloat16()
    return {"kv": kv, "weight": torch.ones(512), "eps": 1e-6, "freqs": table(), "cache": cache} | places


def _keys() -> Arguments:
    places = {"positions": torch.arange(3), "slots": torch.tensor([1, -1, 0])}
    k, cache = torch.randn(3, 128), torch.zeros(1, 64 * 132, dtype=torch.uint8)
    return {"k": k, "weight": torch.ones(128), "eps": 1e-6, "freqs": table(), "cache": cache} | places


def _queries() -> Arguments:
    q, positions = torch.randn(3, 64, 128).bfloat16(), torch.arange(3)
    return {
        "q": q,
        "weight": torch.ones(3, 64),
        "weight_scale": 0.1,
        "freqs": table(),
        "positions": positions,
    }


def _scores() -> Arguments:
    names = ("q8", "cache", "weight", "seq_lens", "page_table", "max_len")
    return dict(zip(names, draw_index(0, [70, 0], 100).args(), strict=True))


def _best() -> Arguments:
    return _scores() | {"topk": 4, "rows": None}


def _blocks() -> Arguments:
    codes = torch.randint(0, 127, (130, 200), dtype=torch.uint8)
    return {"codes": codes, "scales": torch.full((2, 2), 127, dtype=torch.uint8)}


def _packed() -> Arguments:
    packed = torch.randint(0, 256, (2, 8, 64), dtype=torch.uint8)
    return {"packed": packed, "scale": torch.full((2, 8, 4), 120, dtype=torch.uint8)}


FUNCTIONS: dict[str, tuple[str, Callable[[], Arguments]]] = {
    "fused_moe": ("moe", _layer),
    "align_experts": ("moe", _alignment),
    "sparse_attention": ("attention", _attention),
    "store_kv": ("attention", _latents),
    "store_index_keys": ("indexer", _keys),
    "quantize_index_queries": ("indexer", _queries),
    "index_logits": ("indexer", _scores),
    "index_topk": ("indexer", _best),
    "dequantize_fp8_block": ("convert", _blocks),
    "repack_mxfp4": ("convert", _packed),
}


def _apart(x: Tensor) -> Tensor:
    """Return the same values with gaps between the entries of the last dimension."""
    return torch.stack((x, x), -1)[..., 0]


def _short(x: Tensor) -> Tensor:
    return x[:-1]


def _part(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Int8Shift], Int8Shift]:
    return lambda weight: weight._replace(**{name: change(getattr(weight, name))})


def _new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[object], Tensor]:
    return lambda _: torch.empty(shape, dtype=dtype)


def _other(value: object) -> Callable[[object], object]:
    return lambda _: value


# Function, argument, what is done to it, what the sentence says.
BOTH = [
    ("fused_moe", "x", Tensor.half, "`x`: expected bfloat16 or float32 [any, any]; found float16 [4, 256]"),
    ("fused_moe", "x", lambda x: x[:, :128], "`w13.codes`: expected uint8 [3, 256, 64], contiguous; found"),
    ("fused_moe", "w13", _part("codes", Tensor.float), "`w13.codes`: expected uint8 [3, 256, 128]"),
    ("fused_moe", "w13", _part("shift2", _apart), "`w13.shift2`: expected uint8 [3, 256, 2], contiguous"),
    ("fused_moe", "w2", _part("channel_scale", Tensor.double), "`w2.channel_scale`: expected float32"),
    ("fused_moe", "w2", lambda w: Int8Shift(*(x[:2] for x in w)), "`w2.codes`: expected uint8 [3, 256, 64]"),
    ("fused_moe", "topk_ids", _short, "`topk_ids`: expected int32 or int64 [4, any]; found int32 [3, 2]"),
    ("fused_moe", "topk_ids", Tensor.float, "`topk_ids`: expected int32 or int64"),
    ("fused_moe", "topk_weights", lambda w: w[:, :1], "`topk_weights`: expected bfloat16 or float32 [4, 2]"),
    ("fused_moe", "out", _new(3, 256), "`out`: expected bfloat16 or float32 [4, 256]; found bfloat16 [3"),
    ("fused_moe", "arithmetic", _other("w8a8"), "`arithmetic`: expected one of auto, w4a8, w4a16; found"),
    ("align_experts", "block", _other(0), "expected a block and experts of 1 or more, found block 0"),
    ("align_experts", "topk_ids", Tensor.flatten, "`topk_ids`: expected int32 or int64 [any, any]; found"),
    ("sparse_attention", "q", Tensor.half, "`q`: expected bfloat16"),
    ("sparse_attention", "q", lambda q: q[..., :256], "[any, any, 512]"),
    ("sparse_attention", "cache", Tensor.float, "`cache`: expected bfloat16 [any, 512]"),
    ("sparse_attention", "indices", _short, "`indices`: expected int32 or int64 [3, any]"),
    ("sparse_attention", "lengths", lambda n: n[:, None], "`lengths`: expected int32 or int64 [3]"),
    ("sparse_attention", "sink", _short, "`sink`: expected bfloat16 or float32 [2]"),
    ("sparse_attention", "extra_lengths", _other(None), "expected all of them or none; found a tensor, a"),
    ("sparse_attention", "extra_cache", _other(None), "expected all of them or none; found None"),
    ("sparse_attention", "extra_indices", _short, "`extra_indices`: expected int32 or int64 [3, any]"),
    ("sparse_attention", "out", _new(3, 2, 512, dtype=torch.float32), "`out`: expected bfloat16 [3, 2, 512]"),
    ("store_kv", "kv", _apart, "`kv`: expected bfloat16 or float32 [any, 512], stride 1 in the last"),
    ("store_kv", "kv", _short, "`kv`: expected at least 3 rows, one per slot; found 2"),
    ("store_kv", "positions", _short, "`positions`: expected at least 3 entries, one per token; found 2"),
    ("store_kv", "slots", _apart, "`slots`: expected int32 or int64 [any], contiguous"),
    ("store_kv", "weight", _short, "`weight`: expected bfloat16 or float32 [512]"),
    ("store_kv", "freqs", lambda f: torch.view_as_complex(f.unflatten(1, (-1, 2))), "found complex64"),
    ("store_kv", "cache", lambda c: c[:, :448], "`cache`: expected bfloat16 or float32 [any, 512]"),
    ("store_index_keys", "k", lambda k: k[:, :64], "`k`: expected bfloat16 or float32 [any, 128]"),
    ("store_index_keys", "cache", lambda c: c.view(1, 64, 132), "`cache`: expected uint8 [any, 8448]"),
    ("quantize_index_queries", "q", lambda q: q[:, :32], "`q`: expected bfloat16 or float32 [any, 64, 128]"),
    ("quantize_index_queries", "weight", _short, "`weight`: expected bfloat16 or float32 [3, 64]"),
    ("quantize_index_queries", "positions", _short, "`positions`: expected at least 3 entries"),
    ("index_logits", "q8", Tensor.float, "`q8`: expected int8 [any, 64, 128], contiguous; found float32"),
    ("index_logits", "weight", Tensor.bfloat16, "`weight`: expected float32 [2, 64]"),
    ("index_logits", "seq_lens", _short, "`seq_lens`: expected int32 or int64 [2]; found int32 [1]"),
    ("index_logits", "page_table", lambda p: p.T.contiguous().T, "`page_table`: expected"),
    ("index_logits", "max_len", _other(-1), "`max_len`: expected 0 or more; found -1"),
    ("index_logits", "out", _new(2, 99, dtype=torch.float32), "`out`: expected float32 [2, 100]"),
    ("index_topk", "topk", _other(-1), "`topk` of 0 or more and `rows` of 1 or more; found -1 and None"),
    ("index_topk", "rows", _other(0), "found 4 and 0"),
    ("dequantize_fp8_block", "scales", _short, "scales must be [2, 2], got [1, 2]"),
    ("repack_mxfp4", "packed", Tensor.float, "`packed`: expected uint8 or int8 [any, any, any]"),
    ("repack_mxfp4", "scale", Tensor.float, "`scale`: expected uint8 or float8_e8m0fnu [any, any, any]"),
    ("repack_mxfp4", "scale", lambda s: s[:1], "scale must be the grid of packed [2, 8, 64], got [1"),
]  # fmt: skip

# What a reference takes and a kernel does not: other layouts, and sizes that tiles do not divide.
KERNEL = [
    ("fused_moe", "out", lambda _: _apart(_new(4, 256)(None)), "`out`: expected bfloat16 [4, 256]"),
    ("align_experts", "block", _other(3), "`block`: expected a power of two; found 3"),
    ("align_experts", "topk_ids", lambda ids: ids.T.contiguous().T, "`topk_ids`: expected int32 [any, any]"),
    ("sparse_attention", "q", _apart, "`q`: expected bfloat16 or float32 [any, any, 512], stride 1"),
    ("sparse_attention", "cache", lambda c: c.repeat(1, 2)[:, :512], "`cache`: expected bfloat16 [any, 512]"),
    ("sparse_attention", "indices", _apart, "`indices`: expected int32 or int64 [3, any], stride 1"),
    ("sparse_attention", "lengths", _apart, "`lengths`: expected int32 or int64 [3], contiguous"),
    ("sparse_attention", "sink", _apart, "`sink`: expected bfloat16 or float32 [2], contiguous"),
    ("sparse_attention", "extra_indices", _apart, "`extra_indices`: expected int32 or int64 [3, any]"),
    ("sparse_attention", "extra_indices", Tensor.long, "expected torch.int32, the dtype of `indices`; found"),
    ("sparse_attention", "scale", torch.tensor, "`scale`: expected a number, which no kernel has to wait"),
    ("store_kv", "cache", _apart, "`cache`: expected bfloat16 or float32 [any, 512], contiguous"),
    ("dequantize_fp8_block", "codes", _apart, "`codes`: expected uint8 or float8_e4m3fn [any, any]"),
    ("dequantize_fp8_block", "scales", _apart, "`scales`: expected uint8 or float8_e8m0fnu [any, any]"),
    ("repack_mxfp4", "packed", _apart, "`packed`: expected uint8 or int8 [any, any, any], contiguous"),
]  # fmt: skip


def _function(package: str, name: str) -> Callable[..., Any]:
    module = kernels_ref if package == "kernels_ref" else kernels_ref.sm80
    return getattr(getattr(module, FUNCTIONS[name][0]), name)


def _refusal(function: Callable[..., Any], arguments: Arguments) -> str:
    with pytest.raises(ValueError) as refused:
        function(**arguments)
    return str(refused.value)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_arguments_that_the_faults_are_made_from_are_taken(name: str) -> None:
    _function("kernels_ref", name)(**FUNCTIONS[name][1]())


@pytest.mark.parametrize("package", ["kernels_ref", "kernels_ref.sm80"])
@pytest.mark.parametrize(
    ("name", "argument", "change", "sentence"), BOTH, ids=[f"{case[0]}-{case[1]}" for case in BOTH]
)
def test_reference_and_kernel_refuse(
    package: str, name: str, argument: str, change: Callable[[Any], Any], sentence: str
) -> None:
    arguments = FUNCTIONS[name][1]()
    arguments[argument] = change(arguments.get(argument))
    assert sentence in _refusal(_function(package, name), arguments)


@pytest.mark.parametrize(
    ("name", "argument", "change", "sentence"), KERNEL, ids=[f"{case[0]}-{case[1]}" for case in KERNEL]
)
def test_a_kernel_refuses_what_a_reference_takes(
    name: str, argument: str, change: Callable[[Any], Any], sentence: str
) -> None:
    arguments = FUNCTIONS[name][1]()
    arguments[argument] = change(arguments.get(argument))
    _function("kernels_ref", name)(**arguments)
    assert sentence in _refusal(_function("kernels_ref.sm80", name), arguments)


@pytest.mark.parametrize(("hidden", "inter", "size"), [(320, 128, "H"), (256, 192, "I")])
def test_a_layer_of_partial_groups_is_for_the_reference_only(hidden: int, inter: int, size: str) -> None:
    w13, w2 = random_experts(3, hidden=hidden, intermediate=inter)
    arguments = _layer() | {"x": torch.randn(4, hidden).bfloat16(), "w13": w13, "w2": w2}
    assert kernels_ref.moe.fused_moe(**arguments).shape == (4, hidden)
    found = _refusal(kernels_ref.sm80.moe.fused_moe, arguments)
    assert f"{size}: expected a multiple of 128" in found


def test_the_quantiser_refuses_rows_that_are_not_there() -> None:
    for x in (torch.randn(2, 32).T, torch.randn(2, 2, 32), torch.ones(2, 32, dtype=torch.int32)):
        assert "`x`: expected bfloat16 or float32 [any, any], contiguous" in _refusal(
            per_token_int8, {"x": x}
        )
    found = _refusal(per_token_int8, {"x": torch.randn(2, 0)})
    assert found == "`x`: expected rows of 1 value or more; found [2, 0]"
    assert per_token_int8(torch.randn(0, 32))[0].shape == (0, 32)


def test_a_score_without_a_page_is_refused_by_the_reference() -> None:
    arguments = _scores()
    arguments["page_table"] = arguments["page_table"][:, :1]
    found = _refusal(kernels_ref.indexer.index_logits, arguments)
    assert found == "`page_table`: expected pages for 70 keys of query 0; found 1"
    arguments["seq_lens"] = torch.tensor([64, 0], dtype=torch.int32)
    kernels_ref.indexer.index_logits(**arguments)


# ---- layouts that a kernel takes


def transposed_layer(x: Tensor, w13: Int8Shift, w2: Int8Shift, weights: Tensor, ids: Tensor) -> list[Tensor]:
    """Run the layer on `x`, on `x` of other strides, and in place; in the process of interpreted kernels."""
    from kernels_ref.sm80 import moe
    from kernels_ref.sm80.tiles import Plan, Tile

    kernel, rows, columns, halves = TILES["few, pairs"]
    tile = Tile(kernel, rows, 1, 1, halves)
    plan = Plan(0, "w4a16", columns, tile, tile)
    run = partial(moe.fused_moe, w13=w13, w2=w2, topk_weights=weights, topk_ids=ids, plan=plan)
    results = [run(x), run(x.T.contiguous().T)]
    return [*results, run(x, out=x)]


def test_a_layer_of_transposed_tokens_and_in_place() -> None:
    w13, w2 = random_experts(3, hidden=256, intermediate=128)
    weights, ids = random_routing(3, 2, 3)
    x = torch.randn(3, 256)
    expected = kernels_ref.moe.fused_moe(x, w13, w2, weights, ids)
    plain, transposed, in_place = call(transposed_layer, x, w13, w2, weights, ids)
    assert relative_error(plain, expected) < MOE_AGAINST_REFERENCE["w4a16"]
    assert torch.equal(transposed, plain)
    assert torch.equal(in_place, plain)


def test_no_keys_no_list_and_more_places_than_scores() -> None:
    arguments = _attention() | dict.fromkeys(("extra_cache", "extra_indices", "extra_lengths"))
    arguments["indices"] = arguments["indices"][:, :0]
    assert not kernels_ref.attention.sparse_attention(**arguments).any()
    assert kernels_ref.indexer.index_topk(**_best() | {"max_len": 0}).tolist() == [[-1] * 4] * 2
    best = kernels_ref.indexer.index_topk(**_best() | {"topk": 1000})
    assert ((best >= 0).sum(1) == torch.tensor([70, 0])).all()
