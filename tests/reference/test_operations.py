"""Single operations against numbers typed by hand, other libraries, or loops that follow the definition."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4convert import releases
from kernels_ref import mhc, quantize, rotary, router
from kernels_ref.arithmetic import EXACT, SM80, SM80_W4A16, Numerics, digit_linear, linear, rms_norm
from kernels_ref.attention import sparse_attention
from kernels_ref.block import Block, index_scores, pick_entries
from kernels_ref.compressor import CompressorState, CompressorWeights, compress
from kernels_ref.config import ModelConfig, Yarn
from kernels_ref.decisions import Decisions, agreement
from kernels_ref.moe import fused_moe, limited_swiglu
from kernels_ref.source import Expert
from kernels_ref.tensors import Int8Shift
from tests.reference.tiny import Weights, relative
from tests.samples import int8_values
from tests.tolerances import FLOAT32_ROTATION, FLOAT32_STEPS, FLOAT32_SUMS

CONFIG = releases.config("deepseek-v4-flash-0731")


def _near(expected: object) -> object:
    return pytest.approx(expected, rel=FLOAT32_STEPS)


# ---- quantisers


def test_int8_rows_by_hand() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, -127.0], [0.0] * 5, [254.0, 1.0, 3.0, -5.0, 0.0]])
    codes, scale = quantize.per_token_int8(x)
    assert codes.dtype == torch.int8
    # Halves go to the even neighbour; a row of zeros has scale 1.
    assert codes.tolist() == [[127, 0, 2, -2, -127], [0] * 5, [127, 0, 2, -2, 0]]
    assert scale.tolist() == [1.0, 1.0, 2.0]


def test_int8_of_the_indexer_has_a_floor_instead_of_a_special_case() -> None:
    codes, scale = quantize.index_int8(torch.tensor([[0.0, 0.0], [127.0, -1.0]]))
    assert codes.tolist() == [[0, 0], [127, -1]]
    torch.testing.assert_close(scale, torch.tensor([1e-8 / 127, 1.0]), rtol=FLOAT32_STEPS, atol=0)


@pytest.mark.parametrize(
    ("largest", "scale"),
    [(448.0, 1.0), (449.0, 2.0), (224.0, 0.5), (225.0, 1.0), (1.0, 2.0**-8), (0.0, 2.0**-22)],
)
def test_e4m3_takes_the_smallest_power_of_two_that_holds_the_group(largest: float, scale: float) -> None:
    """A second value far below the first is rounded to the grid that this scale leaves."""
    step = scale * 2.0**-9
    found = quantize.fake_e4m3(torch.tensor([[largest, 0.6 * step, 0.4 * step]]), 64)
    assert found[0, 1:].tolist() == [step, 0.0]


@pytest.mark.parametrize(("group", "k"), [(64, 448), (128, 1024), (128, 200)])
def test_e4m3_is_that_of_ml_dtypes(group: int, k: int, rng: np.random.Generator) -> None:
    x = (rng.standard_normal((64, k)) * np.exp2(rng.integers(-30, 9, (64, 1)))).astype(np.float32)
    expected = np.empty_like(x)
    for start in range(0, k, group):
        part = x[:, start : start + group]
        largest = np.maximum(np.abs(part).max(1), np.float32(1e-4))
        scale = np.array([_power_of_two_above(Fraction(float(v)) / 448) for v in largest], np.float32)
        codes = (part / scale[:, None]).astype(ml_dtypes.float8_e4m3fn)
        expected[:, start : start + group] = codes.astype(np.float32) * scale[:, None]
    found = quantize.fake_e4m3(torch.from_numpy(x), group)
    assert np.array_equal(found.numpy(), expected)
    assert torch.equal(quantize.fake_e4m3(found, group), found)
    assert torch.equal(found.bfloat16().float(), found), "exact in BF16"


def _power_of_two_above(x: Fraction) -> float:
    exponent = math.floor(math.log2(x)) - 1
    while Fraction(2) ** exponent < x:
        exponent += 1
    return 2.0**exponent


def test_e2m1_rounds_ties_to_even_codes() -> None:
    x = torch.tensor([0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 2.51, 3.5, 5.0, 5.01, 6.0, 7.0, -0.75, -5.0])
    expected = [0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 3.0, 4.0, 4.0, 6.0, 6.0, 6.0, -1.0, -4.0]
    assert quantize.round_e2m1(x).tolist() == expected


def test_e2m1_is_that_of_ml_dtypes(rng: np.random.Generator) -> None:
    x = rng.standard_normal((64, 4, 32)).astype(np.float32)
    largest = np.abs(x).max(-1, keepdims=True)
    scale = np.vectorize(lambda v: _power_of_two_above(Fraction(float(v)) / 6))(largest).astype(np.float32)
    expected = (x / scale).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale
    found = quantize.fake_e2m1(torch.from_numpy(x.reshape(64, 128)))
    assert np.array_equal(found.numpy(), expected.reshape(64, 128))
    assert torch.equal(quantize.fake_e2m1(torch.zeros(1, 32)), torch.zeros(1, 32))


# ---- rotations


def test_hadamard_is_the_matrix_of_sylvester() -> None:
    """Entry (i, j) is -1 to the number of bits that i and j share."""
    expected = [[(-1) ** (i & j).bit_count() / math.sqrt(128) for j in range(128)] for i in range(128)]
    found = rotary.hadamard(torch.eye(128))
    torch.testing.assert_close(found, torch.tensor(expected), rtol=FLOAT32_STEPS, atol=0)
    torch.testing.assert_close(rotary.hadamard(found), torch.eye(128), rtol=0, atol=FLOAT32_STEPS)


def test_rotation_multiplies_neighbours_as_complex_numbers() -> None:
    x = torch.randn(5, 3, 80)
    freqs, positions = rotary.frequencies(64, 10000.0), torch.tensor([0, 1, 7, 30, 100])
    table = rotary.rotary_table(freqs, positions)
    found = rotary.apply_rotary(x, table)
    angle = positions[:, None].double() * 10000.0 ** (-torch.arange(32).double() / 32)
    expected = torch.view_as_complex(x[..., 16:].double().unflatten(-1, (32, 2)))
    expected = torch.view_as_real(expected * torch.polar(torch.ones_like(angle), angle)[:, None]).flatten(2)
    torch.testing.assert_close(found[..., 16:].double(), expected, rtol=0, atol=FLOAT32_ROTATION)
    assert torch.equal(found[..., :16], x[..., :16])
    assert torch.equal(table[:, 0::2], (positions[:, None].float() * freqs).cos())
    torch.testing.assert_close(
        rotary.apply_rotary(found, table, inverse=True), x, rtol=0, atol=FLOAT32_ROTATION
    )


def test_yarn_stretches_slow_pairs_only() -> None:
    """64 ln(65536 / (32 * 2 pi)) / (2 ln 160000) = 15.5, and for 1 turn 24.7: a ramp from 15 to 25."""
    found = rotary.frequencies(64, 160000.0, Yarn(16.0, 65536, 32, 1))
    plain = 160000.0 ** (-torch.arange(32).double() / 32)
    factor = found.double() / plain
    torch.testing.assert_close(factor[:16], torch.ones(16).double(), rtol=FLOAT32_STEPS, atol=0)
    torch.testing.assert_close(factor[25:], torch.full((7,), 1 / 16).double(), rtol=FLOAT32_STEPS, atol=0)
    assert factor[20].item() == _near((1 + 1 / 16) / 2)


# ---- streams


def _config(**changes: object) -> ModelConfig:
    return replace(ModelConfig.from_dict(CONFIG), **changes)


def test_sinkhorn_ends_with_columns_that_sum_to_one() -> None:
    logits = torch.randn(50, 4, 4) * 3
    found = mhc.sinkhorn(logits, 20, 1e-6)
    torch.testing.assert_close(found.sum(1), torch.ones(50, 4), rtol=0, atol=FLOAT32_STEPS)
    rows = [(m.sum(2) - 1).abs().max() for m in (found, mhc.sinkhorn(logits, 1, 1e-6))]
    assert rows[0] < rows[1] / 10, "rows converge"
    once = torch.softmax(logits.double(), 2) + 1e-6
    once = once / (once.sum(1, keepdim=True) + 1e-6)
    torch.testing.assert_close(mhc.sinkhorn(logits, 1, 1e-6).double(), once, rtol=FLOAT32_STEPS, atol=0)


def test_streams_by_hand() -> None:
    """Two streams of width 1: with `fn` zero the coefficients are those of `base` alone."""
    config = _config(hc_mult=2, hc_iters=1, hc_eps=0.0)
    h = torch.tensor([[[10.0], [1.0]]])
    base = torch.tensor([0.0, math.log(3), 0.0, math.log(3), 0.0, 0.0, 0.0, math.log(3)])
    x, mixing = mhc.collapse(h, torch.zeros(8, 2), torch.ones(3), base, config)
    assert x.item() == _near(0.5 * 10 + 0.75 * 1)
    assert mixing.post[0].tolist() == _near([1.0, 1.5])
    # Rows after softmax (1/2, 1/2) and (1/4, 3/4); column sums 3/4 and 5/4.
    assert mixing.comb[0].flatten().tolist() == _near([2 / 3, 2 / 5, 1 / 3, 3 / 5])
    # New stream k takes column k.
    new = mhc.expand(torch.tensor([[100.0]]), h, mixing)
    assert new[0].flatten().tolist() == _near([100 + 20 / 3 + 1 / 3, 150 + 4 + 3 / 5])


def test_head_weighs_streams_without_normalising_the_weights() -> None:
    config = _config(hc_mult=2, hc_eps=0.0)
    h = torch.tensor([[[10.0], [1.0]]])
    found = mhc.collapse_head(h, torch.zeros(2, 2), torch.ones(1), torch.tensor([0.0, math.log(3)]), config)
    assert found.item() == _near(5.75)


# ---- norms, projections, experts


def test_norm_counts_epsilon_and_rounds_once() -> None:
    x = torch.tensor([[3e-3, 4e-3]])
    found = rms_norm(x, torch.tensor([1.0, 2.0]), 1e-6)
    rms = math.sqrt((9e-6 + 16e-6) / 2 + 1e-6)
    assert found[0].tolist() == _near([3e-3 / rms, 8e-3 / rms])
    in_bf16 = torch.randn(4, 512).bfloat16()
    assert torch.equal(rms_norm(in_bf16, None, 1e-6), rms_norm(in_bf16.float(), None, 1e-6).bfloat16())


def test_swiglu_clamps_the_gate_above_and_the_rest_on_both_sides() -> None:
    gate, up = torch.tensor([20.0, -20.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 30.0, -30.0])
    silu = [v / (1 + math.exp(-v)) for v in (10.0, -20.0, 1.0)]
    expected = [silu[0], silu[1], 10 * silu[2], -10 * silu[2]]
    assert limited_swiglu(gate, up, 10.0).tolist() == _near(expected)


def test_linear_rounds_inputs_only_where_the_official_model_does() -> None:
    x, w = torch.randn(4, 256), torch.randn(8, 256)
    official = Numerics(linear="e4m3")
    assert torch.equal(linear(x, w, official), F.linear(quantize.fake_e4m3(x, 128), w))
    assert torch.equal(linear(x, w, official, fp8=False), F.linear(x, w))
    assert linear(x, w, Numerics(torch.bfloat16)).dtype == torch.bfloat16


def _shifted(n: int, k: int, rng: np.random.Generator) -> Int8Shift:
    groups = -(-k // 128)
    return Int8Shift(
        torch.from_numpy(rng.integers(0, 256, (n, groups * 64), np.uint8)),
        torch.from_numpy(rng.integers(0, 256, (n, groups), np.uint8)),
        torch.from_numpy(np.exp2(rng.integers(-20, -10, n)).astype(np.float32)),
    )


@pytest.mark.parametrize("k", [96, 128, 320])
def test_int8_shift_stands_for_the_numbers_of_the_format(k: int, rng: np.random.Generator) -> None:
    w = _shifted(7, k, rng)
    expected = int8_values(*(t.numpy().tobytes() for t in w), 7, k)
    assert np.array_equal(w.values(k).numpy(), expected.astype(np.float32))
    assert torch.equal(w.integers(k).float() * w.channel_scale[:, None], w.values(k))
    stack = Int8Shift(*(torch.stack((t, t)) for t in w))
    assert torch.equal(stack.values(k), torch.stack((w.values(k), w.values(k))))


def test_expert_gives_numbers_without_padding(rng: np.random.Generator) -> None:
    """Width 96 is stored as one group of 128."""
    expert = Expert(_shifted(96, 320, rng), _shifted(320, 96, rng), _shifted(96, 320, rng))
    assert [tuple(w.shape) for w in expert.values()] == [(96, 320), (320, 96), (96, 320)]
    plain = Expert(*expert.values())
    assert all(torch.equal(a, b) for a, b in zip(plain.values(), expert.values(), strict=True))


@pytest.mark.parametrize("digits", [1, 2])
def test_digit_product_is_that_of_integers(digits: int, rng: np.random.Generator) -> None:
    """Python's integers have no limit; what is left are two roundings to float32."""
    w, x = _shifted(16, 4096, rng), torch.randn(8, 4096)
    codes, scale = quantize.per_token_int8(x) if digits == 1 else quantize.per_token_int16(x)
    integers = codes.numpy().astype(object)
    integers = integers if digits == 1 else 256 * integers[:, 0] + integers[:, 1]
    product = (integers @ w.integers().numpy().astype(object).T).astype(np.float64)
    expected = (product * w.channel_scale.double().numpy()).astype(np.float32) * scale.numpy()[:, None]
    assert np.array_equal(digit_linear(x, w.values(), digits).numpy(), expected)


@pytest.mark.parametrize("numerics", [SM80, SM80_W4A16], ids=["w4a8", "w4a16"])
def test_an_expert_has_the_bits_of_the_fused_layer(numerics: Numerics, rng: np.random.Generator) -> None:
    w1, w2, w3 = _shifted(256, 384, rng), _shifted(384, 256, rng), _shifted(256, 384, rng)
    x, weight = 100 * torch.randn(9, 384).bfloat16(), torch.rand(9, 1)
    layer = Block(_config(), Weights({}), numerics, "layers.3")
    found = layer.expert(x, Expert(w1, w2, w3), weight).bfloat16()
    w13 = Int8Shift(*(torch.cat(pair)[None] for pair in zip(w1, w3, strict=True)))
    stacked = Int8Shift(*(part[None] for part in w2))
    ids = torch.zeros(9, 1, dtype=torch.int32)
    limit = layer.config.swiglu_limit
    expected = fused_moe(x, w13, stacked, weight, ids, limit=limit, arithmetic=numerics.experts)
    assert found.abs().max() > 0
    assert torch.equal(found, expected)


# ---- router


def test_scores_are_roots_of_softplus() -> None:
    found = router.router_scores(torch.tensor([[1.0, 0.0], [-30.0, 30.0]]), torch.eye(2))
    expected = [math.sqrt(math.log1p(math.exp(v))) for v in (1.0, 0.0, -30.0, 30.0)]
    assert found.flatten().tolist() == _near(expected)


def test_bias_chooses_and_scores_weigh() -> None:
    scores = torch.tensor([[0.5, 0.3, 0.2, 0.1]])
    chosen = router.choose_by_score(scores, torch.tensor([0.0, 0.0, 1.0, 0.35]), 2)
    assert chosen.tolist() == [[2, 0]]
    weights = router.route_weights(scores, chosen, 1.5)
    assert weights[0].tolist() == _near([1.5 * 0.2 / 0.7, 1.5 * 0.5 / 0.7])


def test_tokens_choose_their_row() -> None:
    table = torch.tensor([[0, 1], [5, 3], [2, 2]])
    assert router.choose_by_token(table, torch.tensor([1, 1, 0])).tolist() == [[5, 3], [5, 3], [0, 1]]


# ---- compressor


def _compressor(ratio: int, width: int = 96, hidden: int = 24) -> CompressorWeights:
    c = 2 if ratio == 4 else 1
    projections = (torch.randn(c * width, hidden).bfloat16() for _ in range(2))
    return CompressorWeights(*projections, torch.randn(ratio, c * width), 1 + 0.1 * torch.randn(width))


def _entry(x: Tensor, w: CompressorWeights, ratio: int, number: int, freqs: Tensor) -> Tensor:
    """One entry from the definition, channel by channel in float64."""
    width = len(w.norm)
    start = number * ratio
    candidates = [(token, width if ratio == 4 else 0) for token in range(start, start + ratio)]
    if ratio == 4 and number:
        candidates += [(token, 0) for token in range(start - ratio, start)]
    z = torch.zeros(width, dtype=torch.float64)
    for channel in range(width):
        logits, values = [], []
        for token, offset in candidates:
            row = offset + channel
            logits.append(float(w.wgate[row].double() @ x[token].double()) + float(w.ape[token % ratio, row]))
            values.append(float(w.wkv[row].double() @ x[token].double()))
        top = max(logits)
        p = [math.exp(g - top) for g in logits]
        z[channel] = sum(a * b for a, b in zip(p, values, strict=True)) / sum(p)
    z = z / math.sqrt(float(z.square().mean()) + 1e-6) * w.norm.double()
    angle = number * ratio * freqs.double()
    pairs = torch.view_as_complex(z[-64:].unflatten(0, (32, 2)))
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten()
    return torch.cat((z[:-64], turned))


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("pieces", [[300], [3, 1, 125, 2, 129, 40]], ids=["whole", "pieces"])
def test_entries_follow_the_definition(ratio: int, pieces: list[int]) -> None:
    w, x, freqs = _compressor(ratio), torch.randn(300, 24), rotary.frequencies(64, 160000.0)
    state = CompressorState.fresh(ratio, 96)
    parts = [compress(part, w, state, ratio, freqs, 1e-6) for part in x.split(pieces)]
    assert [len(p) for p in parts] == [
        end // ratio - start // ratio
        for start, end in zip(np.cumsum([0, *pieces[:-1]]), np.cumsum(pieces), strict=True)
    ]
    found = torch.cat(parts)
    assert len(found) == 300 // ratio
    for number in {0, 1, len(found) - 1}:
        assert relative(found[number], _entry(x, w, ratio, number, freqs)) < FLOAT32_SUMS


def test_remainder_is_what_the_official_state_holds() -> None:
    """Ratio 4 keeps the last group and what follows it, ratio 128 what follows only."""
    freqs = rotary.frequencies(64, 160000.0)
    for ratio, kept in ((4, 4 + 3), (128, 11)):
        state = CompressorState.fresh(ratio, 96)
        compress(torch.randn(139, 24), _compressor(ratio), state, ratio, freqs, 1e-6)
        assert (len(state.kv), len(state.gate), state.position) == (kept, kept, 139)


# ---- indexer and decisions


def test_index_scores_weigh_heads_after_the_relu() -> None:
    q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    keys = torch.tensor([[2.0, -3.0], [-1.0, 4.0]])
    assert index_scores(q, keys, torch.tensor([[10.0, -1.0]])).tolist() == [[20.0, -4.0]]


def test_only_complete_groups_are_picked_best_first() -> None:
    scores = torch.tensor([[1.0, 9.0, 5.0, 7.0]]).expand(4, -1)
    found = pick_entries(scores, torch.tensor([0, 1, 3, 4]), 3)
    assert found.tolist() == [[-1, -1, -1], [0, -1, -1], [1, 2, 0], [1, 3, 2]]
    assert pick_entries(scores[:1, :2], torch.tensor([2]), 3).tolist() == [[1, 0, -1]]
    assert pick_entries(scores[:1, :0], torch.tensor([0]), 3).tolist() == [[-1, -1, -1]]


def test_decisions_are_recorded_by_position_and_replayed() -> None:
    first, second = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6]])
    record = Decisions()
    record.settle("gate", 0, first)
    assert torch.equal(record.settle("gate", 2, second), second)
    replay, other = Decisions.replay(record.chosen), torch.zeros(1, 2, dtype=torch.int64)
    assert torch.equal(replay.settle("gate", 0, other), first[:1])
    assert torch.equal(replay.settle("gate", 1, other.expand(2, -1)), torch.cat((first[1:], second)))
    assert torch.equal(replay.own["gate"], other.expand(3, -1))
    with pytest.raises(ValueError, match=r"gate: positions 2\.\.3 to be replayed, 3 recorded"):
        replay.settle("gate", 2, first)
    with pytest.raises(ValueError, match=r"other: positions 0\.\.0 to be replayed, 0 recorded"):
        replay.settle("other", 0, second)
    with pytest.raises(ValueError, match="gate: recorded 3 positions, cannot go on at 4"):
        record.settle("gate", 4, first)


def test_agreement_ignores_order_and_holes() -> None:
    reference = {"a": torch.tensor([[1, 2], [3, -1]]), "b": torch.tensor([[-1, -1]])}
    run = {"a": torch.tensor([[2, 3], [3, 1]]), "b": torch.tensor([[-1, 4]])}
    assert agreement(run, reference) == {"a": _near(2 / 3), "b": 1.0}


# ---- attention


def test_attention_ignores_holes_and_order_and_counts_the_sink() -> None:
    config = _config(heads=2, head_dim=64, rope_dim=64)
    sink = torch.tensor([0.5, -1.0])
    layer = Block(config, Weights({"layers.0.attn.attn_sink": sink}), EXACT, "layers.0")
    q, keys = torch.randn(1, 2, 64), torch.randn(5, 64)
    found = layer.attend(q, keys, torch.tensor([[3, -1, 0, 4, -1]]))
    seen = keys[[0, 3, 4]].double()
    for head in range(2):
        p = torch.exp(seen @ q[0, head].double() / 8)
        expected = (p[:, None] * seen).sum(0) / (p.sum() + math.exp(sink[head]))
        assert relative(found[0, head], expected) < FLOAT32_SUMS


def test_attention_is_that_of_the_kernels_reference() -> None:
    """In float32; in BF16 this one rounds the weights before they meet the values, as officially."""
    layer = Block(_config(), Weights({"layers.0.attn.attn_sink": torch.randn(64)}), EXACT, "layers.0")
    q, keys = torch.randn(40, 64, 512), torch.randn(90, 512)
    rows = torch.randint(-1, 90, (40, 30))
    sink, lengths = layer.weight("attn.attn_sink"), torch.full((40,), 30)
    expected = sparse_attention(q, keys, rows, lengths, sink, 512**-0.5)
    assert relative(layer.attend(q, keys, rows), expected) < FLOAT32_SUMS
