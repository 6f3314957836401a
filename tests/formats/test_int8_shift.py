"""The INT8_SHIFT repack: hand-worked bytes, the definition against the fast path, real weights."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from dsv4convert.formats import repack as repack_module
from dsv4convert.formats.codes import pack_e2m1, unpack_e2m1
from dsv4convert.formats.int8_shift import (
    RepackStats,
    codes_shape,
    decode_int8_shift,
    pack_codes,
    repack_reference,
    unpack_codes,
)
from dsv4convert.formats.repack import Repacker, weigh

WEIGHTS = Path(__file__).parents[1] / "data" / "real_0731" / "weights.safetensors"
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
VALUES = np.concatenate((MAGNITUDES, -MAGNITUDES))
#: Magnitude codes of a block whose largest magnitude allows t doublings.
LARGEST = {0: (6, 7), 1: (4, 5), 2: (2, 3), 3: (1,)}


def run(packed, scales, *, strip=None, weighed=True):
    """Repack in strips of `strip` rows; return codes, shift2, channel_scale and stats."""
    n, k = packed.shape[0], packed.shape[1] * 2
    repacker = Repacker(k)
    codes = np.full(codes_shape(n, k), 0xA5, np.uint8)
    shift2, scale = np.full((n, -(-k // 128)), 0xA5, np.uint8), np.full(n, np.nan, np.float32)
    stats = RepackStats()
    for start in range(0, n, strip or max(1, n)):
        rows = slice(start, start + (strip or n))
        part = packed[rows], scales[rows]
        stats += repacker.repack(*part, codes[rows], shift2[rows], scale[rows], row=start)
        if weighed:
            stats += weigh(*part)
    return codes, shift2, scale, stats


def mxfp4_values(packed, scales):
    """float64 [N, K] from the published values and powers of two."""
    return VALUES[unpack_e2m1(packed)] * np.exp2(scales.astype(np.float64) - 127).repeat(32, axis=1)


def int8_values(codes, shift2, scale, k):
    return decode_int8_shift(codes, shift2, k) * scale.astype(np.float64)[:, None]


def assert_equals_reference(packed, scales):
    result = run(packed, scales)
    for name, actual, expected in zip(
        ("codes", "shift2", "scale"), result, repack_reference(packed, scales), strict=False
    ):
        wrong = np.argwhere(actual != expected)
        assert not len(wrong), f"{name}: {len(wrong)} differ, first at {wrong[0]}"
    return result


def block_of(rng, t):
    """32 codes of both signs, -0 among them, whose largest magnitude allows exactly t doublings."""
    largest = LARGEST[t]
    codes = rng.integers(0, max(largest) + 1, 32)
    codes[rng.integers(32)] = rng.choice(largest)
    return (codes + 8 * rng.integers(0, 2, 32)).astype(np.uint8)


def adversarial(k, seed, base=120):
    """Rows with every pair (delta, t), zero blocks under large scales, zero rows, bytes 0 and 254."""
    rng = np.random.default_rng(seed)
    blocks = k // 32
    rows, scales = [], []
    for delta, t in itertools.product(range(-3, 13), range(4)):
        row = [block_of(rng, rng.integers(4)) for _ in range(blocks)]
        e = rng.integers(base - 12, base - 2, blocks)
        row[0], e[0] = block_of(rng, 0), base
        if blocks > 1:
            row[-1], e[-1] = block_of(rng, t), base - delta
        if blocks > 2:
            row[1], e[1] = rng.choice(np.array([0, 8], np.uint8), 32), 254
        rows.append(np.concatenate(row))
        scales.append(e)
    zero = rng.choice(np.array([0, 8], np.uint8), k)
    rows += [zero, np.zeros(k, np.uint8), rows[0], rows[1], rows[2]]
    scales += [np.full(blocks, 254), np.zeros(blocks), np.zeros(blocks), np.full(blocks, 254)]
    scales.append(rng.integers(0, 255, blocks))
    return pack_e2m1(np.array(rows)), np.array(scales, np.uint8)


def ordinary(rows, k, seed, spread=2):
    """Rows as official weights have them: all codes, scale bytes within `spread`."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows, k // 2), np.uint8)
    return packed, (120 + rng.integers(0, spread + 1, (rows, k // 32))).astype(np.uint8)


def test_repack_one_group_gives_the_bytes_worked_by_hand():
    """Four blocks; codes not named are 0.

    block  scale  codes              t  effective
    0      120    k=0:6  k=1:-3      0  120        e_max = 121, from block 1
    1      122    k=32:3 k=33:-0     1  121        delta = 121 - 122 = -1: doubled, shift 3
    2      119    k=64:1.5 k=71:4    0  119        delta 2: shift 1
    3      117    k=96:6 k=97:-1     0  117        delta 4: rounds, shift 0

    Block 0: delta 1, shift 2, codes 7 and 13 stay. Block 1: 3 becomes 6, code 7, and -0 becomes 0.
    Block 2: codes 3 and 6 stay. Block 3: lut2 12 / 2 = 6 is code 5; -(2 / 2) = -1 is code 9.
    Shift byte: 2 + (3 << 2) + (1 << 4) + (0 << 6) = 0x1E.
    Scale: 2^(121 - 130) / 2 = 2^-10; check: 7 -> 12 << 2 = 48, 48 * 2^-10 = 6 * 2^-7.

    Word w has k = 4w.. in its low and k = 64+4w.. in its high half:
    w0 = d7 low (k=0: 7, k=1: d), 3 at k=64 -> nibble 4:  bytes d7 00 03 00
    w1: k=71 is nibble 7: 6                                bytes 00 00 00 60
    w8: k=32: 7 -> nibble 0; k=96: 5, k=97: 9              bytes 07 00 95 00
    """
    codes = np.zeros((1, 128), np.uint8)
    for k, code in {0: 7, 1: 13, 32: 5, 33: 8, 64: 3, 71: 6, 96: 7, 97: 10}.items():
        codes[0, k] = code
    scales = np.array([[120, 122, 119, 117]], np.uint8)
    golden = bytearray(64)
    golden[0:4], golden[4:8], golden[32:36] = b"\xd7\x00\x03\x00", b"\x00\x00\x00\x60", b"\x07\x00\x95\x00"

    for out, shift2, scale in (run(pack_e2m1(codes), scales)[:3], repack_reference(pack_e2m1(codes), scales)):
        assert out.tobytes() == bytes(golden)
        assert shift2.tolist() == [[0x1E]]
        assert scale.tolist() == [2.0**-10]


def test_pack_codes_counting_group_gives_golden_bytes():
    """k = 0..127 carries code k % 16, so word w holds 4w..4w+3 twice, modulo 16."""
    codes = (np.arange(128) % 16).astype(np.uint8).reshape(1, 128)
    golden = bytes.fromhex("103210325476547698ba98badcfedcfe") * 4
    assert pack_codes(codes).tobytes() == golden


def test_pack_codes_every_position_lands_where_the_format_says():
    for k in range(128):
        codes = np.zeros((1, 128), np.uint8)
        codes[0, k] = 15
        word, nibble = (k % 64) // 4, k % 4 + 4 * (k // 64)
        expected = np.zeros(16, "<u4")
        expected[word] = 15 << 4 * nibble
        assert pack_codes(codes).tobytes() == expected.tobytes()


@pytest.mark.parametrize("k", [32, 64, 96, 128, 160, 2048])
def test_unpack_codes_any_width_inverts_pack(k):
    codes = np.random.default_rng(k).integers(0, 16, (5, k), np.uint8)
    packed = pack_codes(codes)
    assert packed.shape == codes_shape(5, k)
    assert unpack_codes(packed, k).tolist() == codes.tolist()


@pytest.mark.parametrize("k", [32, 64, 96, 128, 160, 320, 384, 1024])
@pytest.mark.parametrize("base", [20, 120, 240])
def test_repack_adversarial_rows_equal_the_definition(k, base):
    assert_equals_reference(*adversarial(k, seed=k + base, base=base))


@pytest.mark.parametrize(("k", "spread"), [(4096, 2), (2048, 8), (96, 14)])
def test_repack_ordinary_rows_equal_the_definition(k, spread):
    assert_equals_reference(*ordinary(6, k, seed=k, spread=spread))


@pytest.mark.parametrize("t", range(4))
@pytest.mark.parametrize("byte", [0, 1, 4, 5, 253, 254])
def test_repack_extreme_bytes_equal_the_definition(t, byte):
    codes = np.tile(block_of(np.random.default_rng(t), t), (3, 4))
    codes[1:, 32:64] = 8
    scales = np.array([[byte] * 4, [byte, 254, byte, 0], [byte, 255, 0, byte]], np.uint8)
    stats = assert_equals_reference(pack_e2m1(codes), scales)[3]
    assert stats.nan_scales == 1
    assert stats.first_nan_scale == (2, 1)


def test_repack_every_byte_under_every_delta_equals_the_nearest_value():
    """One block per (delta, byte): delta 0..12 against a block of sixes; values compared, not codes."""
    for delta in range(13):
        packed = np.zeros((256, 32), np.uint8)
        packed[:, :16] = 0x77
        packed[:, 16] = np.arange(256)
        scales = np.full((256, 2), 130 - delta, np.uint8)
        scales[:, 0] = 130
        out, shift2, scale, _ = run(packed, scales)
        step = 2.0 ** max(130 - 3 - 127, 130 - delta - 127)
        values = mxfp4_values(packed, scales)[:, 32:34]
        candidates = VALUES * step
        distance = np.abs(values[..., None] - candidates)
        actual = int8_values(out, shift2, scale, 64)[:, 32:34]
        np.testing.assert_array_equal(np.abs(actual - values), distance.min(axis=-1))
        tied = distance == distance.min(axis=-1, keepdims=True)
        smallest = np.where(tied, np.abs(candidates), np.inf).min(axis=-1)
        np.testing.assert_array_equal(np.abs(actual), smallest)


@pytest.mark.parametrize("seed", range(4))
def test_repack_delta_up_to_three_keeps_every_value(seed):
    packed, scales = ordinary(20, 416, seed, spread=3)
    codes, shift2, scale, stats = run(packed, scales)
    np.testing.assert_array_equal(int8_values(codes, shift2, scale, 416), mxfp4_values(packed, scales))
    assert stats.exact and stats.exact_share == 1.0 and stats.relative_error == 0.0


def test_repack_minus_zero_everywhere_becomes_plus_zero():
    packed = np.full((4, 128), 0x88, np.uint8)
    packed[2, 100] = 0x8F
    codes, _, scale, _ = run(packed, np.full((4, 8), 100, np.uint8))
    assert np.count_nonzero(codes) == 1
    assert (scale > 0).tolist() == [False, False, True, False]


def test_repack_small_code_that_flushes_drops_its_sign():
    packed = np.zeros((1, 32), np.uint8)
    packed[0, 0], packed[0, 16] = 0x07, 0x99
    codes, _, _, stats = run(packed, np.array([[130, 120]], np.uint8))
    assert np.count_nonzero(codes) == 1
    assert (stats.codes_changed, stats.codes_flushed, stats.worst_block) == (2, 2, 1.0)


def test_repack_zero_blocks_and_padding_have_no_codes_and_no_shift():
    packed = np.zeros((1, 48), np.uint8)
    packed[0, 16] = 0x70
    codes, shift2, scale, stats = run(packed, np.array([[254, 100, 3]], np.uint8))
    assert shift2.tolist() == [[0b1100]]
    assert scale.tolist() == [2.0 ** (100 - 131)]
    assert np.count_nonzero(codes) == 1
    assert (stats.blocks, stats.zero_blocks, stats.max_span) == (3, 2, 0)


def test_repack_largest_integer_is_96():
    packed, scales = ordinary(8, 1024, seed=9, spread=9)
    codes, shift2, _, _ = run(packed, scales)
    assert np.abs(decode_int8_shift(codes, shift2, 1024)).max() == 96


@pytest.mark.parametrize(
    ("byte", "t", "low"), [(4, 0, 1), (5, 0, 0), (5, 1, 1), (7, 3, 1), (8, 3, 0), (0, 3, 1)]
)
def test_repack_low_exponent_is_counted_and_stays_exact(byte, t, low):
    codes = np.zeros((3, 32), np.uint8)
    codes[1] = block_of(np.random.default_rng(t), t)
    packed, scales = pack_e2m1(codes), np.full((3, 1), byte, np.uint8)
    out, shift2, scale, stats = run(packed, scales)
    assert (stats.low_rows, stats.first_low_row) == (low, 1 if low else None)
    assert scale[1] == 2.0 ** (byte - t - 131)
    np.testing.assert_array_equal(int8_values(out, shift2, scale, 32), mxfp4_values(packed, scales))


@pytest.mark.parametrize("strip", [1, 3, 16])
@pytest.mark.parametrize(("step", "steps"), [(64, 1), (4096, 2), (1 << 20, 6)])
def test_repack_strips_and_steps_of_any_size_give_one_result(monkeypatch, strip, step, steps):
    packed, scales = adversarial(320, seed=5)
    scales[17, 3] = scales[40, 0] = 255
    whole = run(packed, scales)
    monkeypatch.setattr(repack_module, "_STEP", step)
    monkeypatch.setattr(repack_module, "_STEPS", steps)
    parts = run(packed, scales, strip=strip)
    for actual, expected in zip(parts[:3], whole[:3], strict=True):
        assert actual.tobytes() == expected.tobytes()
    assert parts[3] == whole[3]


def test_stats_of_rounded_rows_equal_a_count_in_float64():
    packed, scales = adversarial(320, seed=11)
    codes, shift2, scale, stats = run(packed, scales)
    true, kept = mxfp4_values(packed, scales), int8_values(codes, shift2, scale, 320)
    assert stats.nonzero_codes == np.count_nonzero(true)
    assert stats.codes_changed == np.count_nonzero(true != kept)
    assert stats.codes_flushed == np.count_nonzero((true != 0) & (kept == 0))
    assert stats.exact_share == 1 - stats.codes_changed / stats.nonzero_codes
    error = math.sqrt(math.fsum(((true - kept) ** 2).flat) / math.fsum((true**2).flat))
    assert stats.relative_error == pytest.approx(error, rel=1e-12)
    squares = ((true - kept) ** 2).reshape(-1, 32).sum(1), (true**2).reshape(-1, 32).sum(1)
    present = squares[1] > 0
    assert stats.worst_block == pytest.approx(np.sqrt((squares[0][present] / squares[1][present]).max()))


def test_stats_rows_and_blocks_equal_a_count_by_rows():
    packed, scales = adversarial(320, seed=12)
    *_, stats = run(packed, scales)
    codes = unpack_e2m1(packed).reshape(len(packed), -1, 32) & 7
    present = codes.any(axis=2)
    largest = codes.max(axis=2)
    spare = np.select([largest >= 6, largest >= 4, largest >= 2], [0, 1, 2], 3)
    spans, deltas = [], []
    for row in np.flatnonzero(present.any(axis=1)):
        e = scales[row][present[row]].astype(int)
        spans.append(e.max() - e.min())
        deltas += ((e - spare[row][present[row]]).max() - e).tolist()
    deltas = np.array(deltas)
    assert stats.zero_rows == np.count_nonzero(~present.any(axis=1)) == 2
    assert stats.zero_blocks == np.count_nonzero(~present)
    assert (stats.rows, stats.blocks) == (len(packed), present.size)
    assert (stats.max_span, stats.wide_rows) == (max(spans), sum(s > 3 for s in spans))
    assert list(stats.spans) == [spans.count(s) for s in range(max(spans) + 1)]
    assert stats.doubled_blocks == np.count_nonzero(deltas < 0)
    expected = [*(np.count_nonzero(deltas == d) for d in range(4, 8)), np.count_nonzero(deltas >= 8)]
    assert list(stats.rounded_blocks) == expected


def test_stats_rounded_but_not_weighed_raise():
    packed, scales = ordinary(4, 128, seed=3, spread=9)
    *_, stats = run(packed, scales, weighed=False)
    for read in (lambda: stats.exact_share, lambda: stats.relative_error, stats.as_dict):
        with pytest.raises(ValueError, match="weigh"):
            read()


def test_stats_as_dict_is_json():
    packed, scales = ordinary(4, 128, seed=3, spread=9)
    *_, stats = run(packed, scales)
    form = json.loads(json.dumps(stats.as_dict()))
    assert form["relative_error"] == stats.relative_error > 0
    *_, exact = run(*ordinary(4, 128, seed=3, spread=1), weighed=False)
    assert exact.as_dict()["nonzero_codes"] is None


def plain_row_maximum_error(packed, scales):
    """Relative error of the public rule: largest raw byte, thresholds .5 1.5 2.5 3.5 5 7 10 once."""
    true = mxfp4_values(packed, scales)
    lut2 = MAGNITUDES * 2
    shift = 3 - np.minimum(scales.max(axis=1, keepdims=True).astype(int) - scales, 3)
    unit = np.exp2(scales.max(axis=1, keepdims=True) - 131.0 + shift).repeat(32, axis=1)
    kept = lut2[np.searchsorted([0.5, 1.5, 2.5, 3.5, 5, 7, 10], np.abs(true) / unit)] * unit * np.sign(true)
    return math.sqrt(((true - kept) ** 2).sum() / (true**2).sum())


@pytest.mark.parametrize("seed", range(3))
def test_repack_error_is_no_larger_than_that_of_the_row_maximum(seed):
    rng = np.random.default_rng(seed)
    weights = rng.standard_t(3, (64, 1024)).reshape(64, -1, 32)
    scales = np.ceil(np.log2(np.abs(weights).max(axis=2) / 6)) + 127
    scaled = np.abs(weights) / np.exp2(scales - 127)[..., None]
    codes = np.abs(scaled[..., None] - MAGNITUDES).argmin(axis=-1) + 8 * (weights < 0)
    packed, scales = pack_e2m1(codes.reshape(64, -1).astype(np.uint8)), scales.astype(np.uint8)
    *_, stats = run(packed, scales)
    assert 0 < stats.relative_error < plain_row_maximum_error(packed, scales)


@st.composite
def matrices(draw):
    n, blocks = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    base, spread = draw(st.integers(0, 254)), draw(st.sampled_from([1, 3, 6, 20]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = [np.concatenate([block_of(rng, rng.integers(4)) for _ in range(blocks)]) for _ in range(n)]
    codes = np.array(rows).reshape(n, blocks, 32)
    codes[rng.random((n, blocks)) < 0.2] &= 8
    scales = np.clip(base - rng.integers(0, spread + 1, (n, blocks)), 0, 254).astype(np.uint8)
    return pack_e2m1(codes.reshape(n, -1)), scales


@settings(max_examples=60, deadline=None)
@given(matrices())
def test_repack_any_matrix_equals_the_definition_and_is_no_worse_than_the_row_maximum(matrix):
    packed, scales = matrix
    codes, shift2, scale, stats = assert_equals_reference(packed, scales)
    true, kept = mxfp4_values(packed, scales), int8_values(codes, shift2, scale, packed.shape[1] * 2)
    assert stats.codes_changed == np.count_nonzero(true != kept)
    if true.any():
        assert stats.relative_error <= plain_row_maximum_error(packed, scales) * (1 + 1e-12)


def test_repack_wrong_shapes_raise():
    with pytest.raises(ValueError, match="K = 48"):
        Repacker(48)
    packed, scales = ordinary(2, 128, seed=0)
    out = np.empty((2, 64), np.uint8), np.empty((2, 1), np.uint8), np.empty(2, np.float32)
    with pytest.raises(ValueError, match=r"scales must be \[2, 4\], got \[2, 3\]"):
        Repacker(128).repack(packed, scales[:, :3], *out)
    with pytest.raises(ValueError, match="C-contiguous"):
        Repacker(128).repack(np.asfortranarray(packed), scales, *out)
    with pytest.raises(ValueError, match=r"codes must be \[2, 128\]"):
        unpack_codes(out[0], 256)


def test_repack_no_rows_gives_nothing():
    *_, stats = run(np.zeros((0, 64), np.uint8), np.zeros((0, 4), np.uint8))
    assert stats == RepackStats()


def real(name):
    """Bytes of a tensor of expert 2 of layer 3; numpy itself has no dtype for F8_E8M0."""
    with safe_open(WEIGHTS, "pt") as file:
        return file.get_tensor(f"layers.3.ffn.experts.2.{name}").view(torch.uint8).numpy()


def test_repack_real_w2_rows_keep_every_value():
    packed, scales = real("w2.weight[0:8]"), real("w2.scale[0:8]")
    codes, shift2, scale, stats = assert_equals_reference(packed, scales)
    np.testing.assert_array_equal(int8_values(codes, shift2, scale, 2048), mxfp4_values(packed, scales))
    assert stats.exact
    assert stats.max_span <= 2


@pytest.mark.parametrize(("name", "spans"), [("w1", {1: 1802, 2: 246}), ("w3", {1: 1811, 2: 237})])
def test_repack_real_scales_have_raw_spans_of_one_or_two(name, spans):
    raw = real(f"{name}.scale")
    found = np.unique(raw.max(axis=1) - raw.min(axis=1), return_counts=True)
    assert dict(zip(*(part.tolist() for part in found), strict=True)) == spans
    # The stats see the same, under codes that are nowhere zero.
    *_, stats = run(np.full((2048, 2048), 0x67, np.uint8), raw)
    assert (stats.max_span, stats.wide_rows, stats.exact) == (2, 0, True)
    assert stats.spans == (0, spans[1], spans[2])
