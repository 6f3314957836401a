"""Codes against tables typed by hand, bit fields taken apart here, torch and ml_dtypes."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

from dsv4convert.formats import codes

ALL_BYTES = np.arange(256, dtype=np.uint8)
BF16_MAX = (2 - 2**-7) * 2.0**127
BF16_TINIEST = 2.0**-133


def test_e2m1_table_every_code_equals_the_published_values():
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected = np.array(magnitudes + [-m for m in magnitudes])
    assert codes.E2M1.tobytes() == expected.tobytes()  # the sign of -0 included


def test_lut2_every_code_is_twice_the_value():
    assert codes.LUT2.tolist() == [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]


def test_e4m3_table_known_codes_have_published_values():
    known = {
        0x00: 0.0,
        0x01: 2**-9,
        0x07: 7 * 2**-9,
        0x08: 2**-6,
        0x38: 1.0,
        0x3C: 1.5,
        0x7E: 448.0,
        0xFE: -448.0,
    }
    assert {c: codes.E4M3[c] for c in known} == known
    assert np.signbit(codes.E4M3[0x80])
    assert np.flatnonzero(np.isnan(codes.E4M3)).tolist() == [0x7F, 0xFF]


@pytest.mark.parametrize("judge", ["torch", "ml_dtypes"])
def test_e4m3_table_every_code_equals_other_libraries(judge):
    if judge == "torch":
        expected = torch.from_numpy(ALL_BYTES).view(torch.float8_e4m3fn).double().numpy()
    else:
        expected = ALL_BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(codes.E4M3, expected)
    finite = ~np.isnan(expected)
    assert (np.signbit(codes.E4M3) == np.signbit(expected))[finite].all()


def test_ue8m0_table_every_byte_is_its_power_of_two():
    assert codes.UE8M0[0] == 2.0**-127
    assert codes.UE8M0[127] == 1.0
    assert codes.UE8M0[254] == 2.0**127
    assert np.isnan(codes.UE8M0[255])
    np.testing.assert_array_equal(codes.UE8M0, ALL_BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float64))


def test_tables_written_to_raise():
    for table in (codes.E4M3, codes.E2M1, codes.UE8M0, codes.LUT2):
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 1


@pytest.mark.parametrize(("table", "window"), [("E4M3", codes.FP8_EXACT), ("E2M1", codes.MXFP4_EXACT)])
def test_window_every_scale_byte_holds_exactly_the_exact_products(table, window):
    values = getattr(codes, table)
    values = values[np.isfinite(values) & (values != 0)]

    def exact(byte: int) -> bool:
        products = np.abs(values) * 2.0 ** (byte - 127)
        # At most four significant bits: only the two ends of the BF16 range can be left.
        return bool((products <= BF16_MAX).all() and (products % BF16_TINIEST == 0).all())

    inside = [byte for byte in range(255) if exact(byte)]
    assert inside == list(range(window.low, window.high + 1))
    assert np.flatnonzero(~window.outside(ALL_BYTES)).tolist() == inside


def test_unpack_every_byte_gives_low_nibble_first():
    expected = np.array([[b % 16, b // 16] for b in range(256)], np.uint8).reshape(1, -1)
    assert codes.unpack_e2m1(ALL_BYTES.reshape(1, -1)).tolist() == expected.tolist()
    assert codes.unpack_e2m1(ALL_BYTES.view(np.int8).reshape(1, -1)).tolist() == expected.tolist()


def test_pack_every_byte_inverts_unpack():
    assert codes.pack_e2m1(codes.unpack_e2m1(ALL_BYTES)).tobytes() == ALL_BYTES.tobytes()


def test_pack_half_byte_or_large_code_raises():
    with pytest.raises(ValueError, match="whole bytes"):
        codes.pack_e2m1(np.zeros((2, 3), np.uint8))
    with pytest.raises(ValueError, match="got 16"):
        codes.pack_e2m1(np.full((1, 2), 16, np.uint8))


def test_count_nan_scales_names_the_first_in_row_major_order():
    scales = np.full((3, 4), 254, np.uint8)
    assert codes.count_nan_scales(scales) == (0, None)
    scales[2, 0] = scales[1, 3] = 255
    assert codes.count_nan_scales(scales) == (2, (1, 3))


@pytest.mark.parametrize("byte", [0, 127, 252, 253, 254])
@pytest.mark.parametrize("code", range(16))
def test_count_mxfp4_overflow_every_code_agrees_with_ml_dtypes(byte, code):
    values = np.zeros((2, 64), np.uint8)
    values[1, 40] = code
    scales = np.array([[127, 127], [127, byte]], np.uint8)
    with np.errstate(over="ignore"):
        overflows = np.isinf(np.float64(codes.E2M1[code] * 2.0 ** (byte - 127)).astype(ml_dtypes.bfloat16))
    expected = (1, (1, 1)) if overflows else (0, None)
    packed = codes.pack_e2m1(values)
    assert codes.count_mxfp4_overflow(packed, scales) == expected
    assert codes.count_mxfp4_overflow(packed.view(np.int8), scales) == expected


@pytest.mark.parametrize("module", ["codes", "int8_shift", "repack"])
def test_import_without_torch_allowed_leaves_torch_out(module):
    script = f"import sys, dsv4convert.formats.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
