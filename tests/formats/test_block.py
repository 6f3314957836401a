"""The FP8 decoder and the definitions against products taken in float64 here, torch and ml_dtypes."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from dsv4convert.formats import fp8
from dsv4convert.formats.block import dequantize_fp8_block, dequantize_mxfp4
from dsv4convert.formats.fp8 import Fp8Decoder, InexactBlock

WEIGHTS = Path(__file__).parents[1] / "data" / "real_0731" / "weights.safetensors"
BLOCKS = [(128, 128), (32, 32), (1, 32)]


def expected_bits(codes, scales, bn, bk):
    """BF16 bits of E4M3 x UE8M0, from ml_dtypes values, multiplied in float64 and rounded by ml_dtypes."""
    n, k = codes.shape
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    factors = np.where(scales == 255, np.nan, np.exp2(scales.astype(np.float64) - 127))
    per_code = factors.repeat(bn, 0).repeat(bk, 1)[:n, :k]
    # float32 holds these products exactly, so ml_dtypes rounds once.
    with np.errstate(over="ignore", invalid="ignore"):
        return (values * per_code).astype(np.float32).astype(ml_dtypes.bfloat16)


def assert_bits(actual, expected):
    """Compare BF16 bits; all NaN are equal."""
    actual, expected = actual.view(ml_dtypes.bfloat16), expected.view(ml_dtypes.bfloat16)
    numbers = ~np.isnan(expected.astype(np.float32))
    assert np.isnan(actual.astype(np.float32))[~numbers].all()
    wrong = np.argwhere((actual.view(np.uint16) != expected.view(np.uint16)) & numbers)
    assert not len(wrong), f"{len(wrong)} differ, first at {wrong[0]}"


def decode(codes, scales, shape, *, strip=None):
    """Run the decoder over a tensor, in strips of `strip` block rows."""
    bn = shape[0]
    decoder = Fp8Decoder(shape, codes.shape[1])
    out = np.full(codes.shape, 0x1234, np.int16)
    rows = bn * strip if strip else max(1, len(codes))
    total = fp8.Fp8Stats()
    for start in range(0, len(codes), rows):
        stop = min(start + rows, len(codes))
        part = scales[start // bn : -(-stop // bn)]
        total += decoder.decode(codes[start:stop], part, out[start:stop], row=start)
    return out, total


def grid(codes, shape, values, seed=0):
    size = -(-codes.shape[0] // shape[0]), -(-codes.shape[1] // shape[1])
    return np.random.default_rng(seed).choice(np.asarray(values, np.uint8), size)


def all_pairs():
    """[256, 256]: row = scale byte (in blocks of 1 x 256), column = code."""
    return np.tile(np.arange(256, dtype=np.uint8), (256, 1)), np.arange(256, dtype=np.uint8).reshape(256, 1)


def test_decoder_every_code_at_every_scale_equals_the_rounded_product():
    codes, scales = all_pairs()
    out, stats = decode(codes, scales, (1, 256))
    assert_bits(out, expected_bits(codes, scales, 1, 256))
    assert (stats.nan_codes, stats.first_nan) == (512, (0, 0x7F))
    assert (stats.nan_scales, stats.first_nan_scale) == (1, (255, 0))
    assert [b.scale for b in stats.inexact] == [0, 1, 2, *range(247, 255)]
    assert stats.inexact_blocks == 11


def test_reference_every_code_at_every_scale_equals_the_rounded_product():
    codes, scales = all_pairs()
    actual = dequantize_fp8_block(torch.from_numpy(codes), torch.from_numpy(scales), (1, 256))
    assert_bits(actual.view(torch.int16).numpy(), expected_bits(codes, scales, 1, 256))


def test_decoder_signed_zero_keeps_its_sign():
    out, stats = decode(np.array([[0x00, 0x80]], np.uint8), np.array([[100]], np.uint8), (128, 128))
    assert out.view(np.uint16).tolist() == [[0x0000, 0x8000]]
    assert stats.clean


def test_decoder_nan_codes_become_nan_of_their_sign():
    out, _ = decode(np.array([[0x7F, 0xFF, 0x7E]], np.uint8), np.array([[127]], np.uint8), (128, 128))
    assert out.view(np.uint16).tolist() == [[0x7FC0, 0xFFC0, 0x43E0]]


@pytest.mark.parametrize("shape", BLOCKS)
@pytest.mark.parametrize(
    "size", [(200, 300), (160, 128), (128, 32), (1, 1), (33, 1000), (257, 129), (3, 7), (0, 64)]
)
def test_decoder_ragged_shape_equals_the_definition(shape, size):
    codes = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    scales = grid(codes, shape, [0, 1, 2, 3, 100, 117, 134, 135, 246, 247, 254, 255])
    out, _ = decode(codes, scales, shape)
    assert_bits(out, expected_bits(codes, scales, *shape))
    reference = dequantize_fp8_block(torch.from_numpy(codes), torch.from_numpy(scales), shape)
    assert_bits(out, reference.view(torch.int16).numpy())


@pytest.mark.parametrize("shape", BLOCKS)
@pytest.mark.parametrize("strip", [1, 2, 8])
@pytest.mark.parametrize("step", [512, 4096, 1 << 20])
def test_decoder_strips_and_steps_of_any_size_give_one_result(monkeypatch, shape, strip, step):
    codes = np.random.default_rng(2).integers(0, 256, (300, 160), np.uint8)
    scales = grid(codes, shape, [1, 90, 117, 120, 140, 250, 255])
    whole, whole_stats = decode(codes, scales, shape)
    monkeypatch.setattr(fp8, "_STEP", step)
    parts, part_stats = decode(codes, scales, shape, strip=strip)
    assert parts.tobytes() == whole.tobytes()
    assert part_stats == whole_stats


def test_decoder_read_only_source_and_uint16_output_are_accepted():
    codes = np.frombuffer(bytes(range(0x70)) * 4, np.uint8).reshape(4, 0x70)
    scales = np.full((1, 1), 120, np.uint8)
    out = np.empty(codes.shape, np.uint16)
    assert Fp8Decoder((128, 128), 0x70).decode(codes, scales, out).clean
    assert_bits(out, expected_bits(codes, scales, 128, 128))


@pytest.mark.parametrize(("byte", "code"), [(0, 0x01), (2, 0x01), (247, 0x7E), (254, 0x38 + 8)])
def test_decoder_block_with_a_rounded_product_is_listed(byte, code):
    codes = np.zeros((256, 256), np.uint8)
    codes[200, 10] = code
    scales = np.full((2, 2), byte, np.uint8)
    _, stats = decode(codes, scales, (128, 128))
    assert stats.inexact == (InexactBlock(1, 0, byte),)
    assert stats.inexact_blocks == 1


@pytest.mark.parametrize(("byte", "code"), [(0, 0x38), (2, 0x02), (247, 0x70), (254, 0x38), (135, 0x7E)])
def test_decoder_block_outside_the_window_without_rounding_is_not_listed(byte, code):
    codes = np.zeros((128, 128), np.uint8)
    codes[100, 10] = code
    _, stats = decode(codes, np.full((1, 1), byte, np.uint8), (128, 128))
    assert stats.clean


def test_decoder_many_inexact_blocks_are_counted_but_listed_up_to_the_cap():
    codes = np.full((100, 64), 0x7E, np.uint8)
    _, stats = decode(codes, np.full((100, 2), 250, np.uint8), (1, 32), strip=7)
    assert stats.inexact_blocks == 200
    assert len(stats.inexact) == fp8.LISTED_BLOCKS
    assert stats.inexact[-1] == InexactBlock(31, 1, 250)


def test_decoder_first_nan_is_counted_from_the_tensor():
    codes = np.zeros((300, 64), np.uint8)
    codes[290, 3] = codes[270, 60] = 0xFF
    _, stats = decode(codes, np.full((3, 1), 100, np.uint8), (128, 128), strip=1)
    assert (stats.nan_codes, stats.first_nan) == (2, (270, 60))


def test_decoder_wrong_shapes_raise():
    decoder = Fp8Decoder((128, 128), 256)
    codes, out = np.zeros((129, 256), np.uint8), np.zeros((129, 256), np.int16)
    with pytest.raises(ValueError, match=r"scales must be \[2, 2\], got \[1, 2\]"):
        decoder.decode(codes, np.zeros((1, 2), np.uint8), out)
    with pytest.raises(ValueError, match="out must be"):
        decoder.decode(codes, np.zeros((2, 2), np.uint8), out[:128])
    with pytest.raises(ValueError, match="block-row border"):
        decoder.decode(codes, np.zeros((2, 2), np.uint8), out, row=64)


def test_definitions_wrong_grid_raises():
    codes = torch.zeros(200, 300, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"must be \[2, 3\], got \[2, 2\]"):
        dequantize_fp8_block(codes, torch.zeros(2, 2, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"must be \[200, 19\]"):
        dequantize_mxfp4(codes, torch.zeros(200, 18, dtype=torch.uint8))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(1, 140), st.sampled_from(BLOCKS), st.integers(0, 2**32 - 1))
def test_decoder_any_shape_equals_the_product(n, k, shape, seed):
    codes = np.random.default_rng(seed).integers(0, 256, (n, k), np.uint8)
    scales = grid(codes, shape, range(256), seed)
    assert_bits(decode(codes, scales, shape)[0], expected_bits(codes, scales, *shape))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_mxfp4_every_byte_at_every_scale_equals_the_rounded_product(dtype):
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate((magnitudes, -magnitudes))
    row = np.arange(256, dtype=np.uint8)
    packed = torch.from_numpy(np.tile(row, (256, 1))).view(dtype)
    scales = torch.arange(256).to(torch.uint8).reshape(256, 1).expand(256, 16).contiguous()
    per_code = values[np.stack((row & 15, row >> 4), 1).reshape(-1)]
    factors = np.where(row == 255, np.nan, np.exp2(row.astype(np.float64) - 127))
    with np.errstate(over="ignore"):
        expected = (factors[:, None] * per_code).astype(np.float32).astype(ml_dtypes.bfloat16)
    assert_bits(dequantize_mxfp4(packed, scales).view(torch.int16).numpy(), expected)


@pytest.mark.parametrize(
    ("weight", "scale"),
    [
        ("wkv.weight", "wkv.scale"),
        ("wq_b.weight[0:1024]", "wq_b.scale[0:8]"),
        ("wq_a.weight[0:8]", "wq_a.scale"),
    ],
)
def test_decoder_real_weights_equal_torch_bit_for_bit(weight, scale):
    with safe_open(WEIGHTS, "pt") as file:
        codes = file.get_tensor(f"layers.0.attn.{weight}")
        scales = file.get_tensor(f"layers.0.attn.{scale}")
    scales = scales[: -(-codes.shape[0] // 128)]
    factors = scales.to(torch.bfloat16).repeat_interleave(128, 0).repeat_interleave(128, 1)
    expected = codes.to(torch.bfloat16) * factors[: codes.shape[0]]
    out, stats = decode(codes.view(torch.uint8).numpy(), scales.view(torch.uint8).numpy(), (128, 128))
    assert stats.clean
    assert out.tobytes() == expected.view(torch.int16).numpy().tobytes()
    assert torch.equal(dequantize_fp8_block(codes, scales), expected)
