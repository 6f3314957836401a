"""Device functions that decode INT8_SHIFT codes in registers, four at a time, with ``prmt.b32``.

A tile of codes is [rows, 32] uint8: 32 of the 64 bytes of a group of 128 codes. Element (n, b) of the tile
stands for two codes, a *low* one of k = b and a *high* one of k = 64 + b (or 32 + b and 96 + b for the second
half of a group): the four low codes of a 32-bit word are its low 16 bits, which is what ``prmt`` takes as
selectors. So one instruction looks four codes up in a table of eight bytes held in two registers, and a
thread that holds words of the tile holds the decoded fragments of a matrix instruction: nothing moves.

``prmt`` reads three bits of a selector as an index; with the fourth bit set it repeats the sign of the byte
it found. `magnitudes` and `signed` each use that instead of handling signs on their own.

Inline assembly does not run in the interpreter. There (`NATIVE` is false) a tile holds the same two codes per
element, fetched one by one, and the same functions are computed from the definition.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: False under ``TRITON_INTERPRET``.
NATIVE = tl.constexpr(not triton.knobs.runtime.interpret)

# A table of 0 1 2 3 | 4 6 8 12. The sign bit of a nibble, bit 3, makes prmt repeat the sign of a byte that is
# not negative: codes of negative weights give 0.
_MAGNITUDES: tl.constexpr = tl.constexpr("""{
    .reg .b32 s;
    xor.b32 s, $1, FLIP;
    shr.u32 s, s, DOWN;
    prmt.b32 $0, 0x03020100, 0x0C080604, s;
}""")
_POSITIVE_LOW: tl.constexpr = tl.constexpr("prmt.b32 $0, 0x03020100, 0x0C080604, $1;")
_POSITIVE_HIGH: tl.constexpr = tl.constexpr(_MAGNITUDES.value.replace("FLIP", "0").replace("DOWN", "16"))
_NEGATIVE_LOW: tl.constexpr = tl.constexpr(
    _MAGNITUDES.value.replace("FLIP", "0x88888888").replace("DOWN", "0")
)
_NEGATIVE_HIGH: tl.constexpr = tl.constexpr(
    _MAGNITUDES.value.replace("FLIP", "0x88888888").replace("DOWN", "16")
)

# Nibbles are rotated left by one: bit 0 is the sign, bit 3 the upper exponent bit. Four registers hold, times
# a = 1, 2, 4, 8: T0, T1 = 0 -1' 1 -1 | 2 -2 3 -3, looked up by the nibbles, and T2, T3 = 4 ~-4 6 ~-6 |
# 8 ~-8 12 ~-12, looked up by the nibbles with bit 3 flipped. Whichever look-up has bit 3 set gives the
# repeated sign of its byte: 0 for a positive weight, so that xor keeps the other; and for a negative one
# either 0 (a byte of T2, T3) or all ones (a byte of T0, T1), which undoes the ~. The byte -1' only lends its
# sign: its own code, minus zero, is never stored.
_SIGNED: tl.constexpr = tl.constexpr("""{
    .reg .b32 r, q, t0, t1, t2, t3, x, y;
    mad.lo.u32 t0, $2, 0xFF010000, 0x0000FF00;
    mad.lo.u32 t1, $2, 0xFD02FE02, 0x00010000;
    mad.lo.u32 t2, $2, 0x06060404, 0xFEFFFF00;
    mad.lo.u32 t3, $2, 0x0C0C0808, 0xFEFFFF00;
    shl.b32 r, $1, 1;
    shr.u32 q, $1, 3;
    lop3.b32 r, r, q, 0x11111111, 0xD8;
    xor.b32 q, r, 0x88888888;
    shr.u32 r, r, DOWN;
    shr.u32 q, q, DOWN;
    prmt.b32 x, t0, t1, r;
    prmt.b32 y, t2, t3, q;
    xor.b32 $0, x, y;
}""")
_SIGNED_LOW: tl.constexpr = tl.constexpr(_SIGNED.value.replace("DOWN", "0"))
_SIGNED_HIGH: tl.constexpr = tl.constexpr(_SIGNED.value.replace("DOWN", "16"))

# 1 << (two bits), for the four nibbles of the low 16 bits.
_POWERS: tl.constexpr = tl.constexpr("prmt.b32 $0, 0x08040201, 0, $1;")


@triton.jit
def code_offsets():
    """Return where element b of a tile is fetched from, [32] int32: byte b, or in the interpreter the byte
    that holds its low code."""
    b = tl.arange(0, 32)
    return b if NATIVE else (b // 4) * 4 + (b % 4) // 2


@triton.jit
def load_codes(pointers):
    """Load a tile from ``rows[:, None] + code_offsets()[None, :]``, [rows, 32] uint8."""
    tile = tl.load(pointers)
    if not NATIVE:
        nibble = ((tl.arange(0, 32) % 2) * 4).to(tl.uint8)[None, :]
        low, high = (tile >> nibble) & 15, (tl.load(pointers + 2) >> nibble) & 15
        tile = low | (high << 4)
    return tile


@triton.jit
def magnitudes(tile, HIGH: tl.constexpr, NEGATIVE: tl.constexpr):
    """Return ``max(v, 0)`` or, with NEGATIVE, ``max(-v, 0)`` of the values v = lut2[code], [rows, 32] int8.

    One or two instructions for four codes. Two products then stand for one, which costs nothing where the
    matrix units wait anyway. Minus zero counts as 0.
    """
    if NATIVE:
        if HIGH:
            text: tl.constexpr = _NEGATIVE_HIGH if NEGATIVE else _POSITIVE_HIGH
        else:
            text: tl.constexpr = _NEGATIVE_LOW if NEGATIVE else _POSITIVE_LOW
        return tl.inline_asm_elementwise(text, "=r,r", [tile], dtype=tl.int8, is_pure=True, pack=4)
    code = (tile >> 4 if HIGH else tile & 15).to(tl.int32)
    return tl.where((code >= 8) == NEGATIVE, _lut2(code & 7), 0).to(tl.int8)


@triton.jit
def signed(tile, powers, HIGH: tl.constexpr):
    """Return ``lut2[code] * power``, [rows, 32] int8 within -96..96.

    Args:
        tile: Of `load_codes`.
        powers: [rows, 1] int32, 1 << shift.
        HIGH: Which of the two codes.
    """
    if NATIVE:
        text: tl.constexpr = _SIGNED_HIGH if HIGH else _SIGNED_LOW
        return tl.inline_asm_elementwise(
            text, "=r,r,r,r,r,r", [tile, powers], dtype=tl.int8, is_pure=True, pack=4
        )
    code = (tile >> 4 if HIGH else tile & 15).to(tl.int32)
    value = _lut2(code & 7) * powers
    return tl.where(code >= 8, -value, value).to(tl.int8)


@triton.jit
def _lut2(magnitude):
    """Return 0 1 2 3 4 6 8 12 of 0..7."""
    large = (2 + (magnitude & 1)) << ((magnitude >> 1) - 1 & 3)
    return tl.where(magnitude < 4, magnitude, large)


@triton.jit
def powers_of_blocks(shifts):
    """Return ``1 << shift`` of every block of up to four groups, packed as bytes in four registers.

    Args:
        shifts: [rows] int32, the shift bytes of groups 0..3.

    Returns:
        Four [rows] int32, for `power_of_block`: blocks 0 and 2 of groups 0 and 1, of groups 2 and 3; blocks 1
        and 3 of the same.
    """
    even, odd = shifts & 0x33333333, (shifts >> 2) & 0x33333333
    return _powers(even), _powers(even >> 16), _powers(odd), _powers(odd >> 16)


@triton.jit
def _powers(nibbles):
    if NATIVE:
        return tl.inline_asm_elementwise(_POWERS, "=r,r", [nibbles], dtype=tl.int32, is_pure=True, pack=1)
    first = (1 << (nibbles & 3)) | (1 << (((nibbles >> 4) & 3) + 8))
    return first | (1 << (((nibbles >> 8) & 3) + 16)) | (1 << (((nibbles >> 12) & 3) + 24))


@triton.jit
def power_of_block(packed, GROUP: tl.constexpr, HALF: tl.constexpr, HIGH: tl.constexpr):
    """Return ``1 << shift`` of block HALF + 2 * HIGH of group GROUP, [rows] int32."""
    return (packed[2 * HALF + GROUP // 2] >> (16 * (GROUP % 2) + 8 * HIGH)) & 255
