"""Where the codes of a page lie, by their bits; layout in formats/coded.py.

Templates: `level(codes, extra)` is the format's function from int32 lanes to the float32 that they
stand for, of which it may look at the lowest bits only; for codes of eight bits it is
`load_level(address, extra)`.
    key_levels(page, d, i, extra)           four vectors: the 64 tokens of channel i
    value_levels(page, d, block, t, extra)  eight: tokens t to t + 3, the 32 channels of a block
"""

from __future__ import annotations

from pykv.kernels.jit_numba import device, inlined
from pykv.kernels.simd_codes import codes16, moved, moved_by, picked
from pykv.kernels.simd_memory import put_i64, scalar_i64

level = load_level = inlined(lambda *args: None)


@device
def code_bytes_keys(d, bits):
    """Bytes of a key page's codes."""
    if bits == 3 or bits == 5:
        return d * 8 * (bits - 1) + (d + 1) // 2 * 16
    return d * 8 * bits


@device
def code_bytes_values(d, bits):
    """Bytes of a value page's codes."""
    return (d + 31) // 32 * 256 * bits


def _keys_8(page, d, i, extra):
    at = page + i * 64
    return (
        load_level(at, extra),
        load_level(at + 16, extra),
        load_level(at + 32, extra),
        load_level(at + 48, extra),
    )


def _keys_4(page, d, i, extra):
    low, high = codes16(page + i * 32), codes16(page + i * 32 + 16)
    return (
        level(low, extra),
        level(moved(low, 4), extra),
        level(high, extra),
        level(moved(high, 4), extra),
    )


def _keys_2(page, d, i, extra):
    x = codes16(page + i * 16)
    return (
        level(x, extra),
        level(moved(x, 2), extra),
        level(moved(x, 4), extra),
        level(moved(x, 6), extra),
    )


def _keys_5(page, d, i, extra):
    low, high = codes16(page + i * 32), codes16(page + i * 32 + 16)
    fifth = moved_by(codes16(page + d * 32 + i // 2 * 16), i % 2 * 4)
    return (
        level(picked(low, moved(fifth, -4), 15), extra),
        level(picked(moved(low, 4), moved(fifth, -3), 15), extra),
        level(picked(high, moved(fifth, -2), 15), extra),
        level(picked(moved(high, 4), moved(fifth, -1), 15), extra),
    )


def _keys_3(page, d, i, extra):
    x = codes16(page + i * 16)
    third = moved_by(codes16(page + d * 16 + i // 2 * 16), i % 2 * 4)
    return (
        level(picked(x, moved(third, -2), 3), extra),
        level(picked(moved(x, 2), moved(third, -1), 3), extra),
        level(picked(moved(x, 4), third, 3), extra),
        level(picked(moved(x, 6), moved(third, 1), 3), extra),
    )


def _values_8(page, d, block, t, extra):
    at = page + (block * 64 + t) * 32
    return (
        load_level(at, extra),
        load_level(at + 16, extra),
        load_level(at + 32, extra),
        load_level(at + 48, extra),
        load_level(at + 64, extra),
        load_level(at + 80, extra),
        load_level(at + 96, extra),
        load_level(at + 112, extra),
    )


def _values_4(page, d, block, t, extra):
    at = page + (block * 64 + t) * 16
    a, b, c, e = codes16(at), codes16(at + 16), codes16(at + 32), codes16(at + 48)
    return (
        level(a, extra),
        level(moved(a, 4), extra),
        level(b, extra),
        level(moved(b, 4), extra),
        level(c, extra),
        level(moved(c, 4), extra),
        level(e, extra),
        level(moved(e, 4), extra),
    )


def _values_2(page, d, block, t, extra):
    at = page + (block * 32 + t // 2) * 16
    a, b = codes16(at), codes16(at + 16)
    return (
        level(a, extra),
        level(moved(a, 2), extra),
        level(moved(a, 4), extra),
        level(moved(a, 6), extra),
        level(b, extra),
        level(moved(b, 2), extra),
        level(moved(b, 4), extra),
        level(moved(b, 6), extra),
    )


def _values_5(page, d, block, t, extra):
    at = page + (block * 64 + t) * 16
    a, b, c, e = codes16(at), codes16(at + 16), codes16(at + 32), codes16(at + 48)
    h = codes16(page + (d + 31) // 32 * 1024 + (block * 16 + t // 4) * 16)
    return (
        level(picked(a, moved(h, -4), 15), extra),
        level(picked(moved(a, 4), moved(h, -3), 15), extra),
        level(picked(b, moved(h, -2), 15), extra),
        level(picked(moved(b, 4), moved(h, -1), 15), extra),
        level(picked(c, h, 15), extra),
        level(picked(moved(c, 4), moved(h, 1), 15), extra),
        level(picked(e, moved(h, 2), 15), extra),
        level(picked(moved(e, 4), moved(h, 3), 15), extra),
    )


def _values_3(page, d, block, t, extra):
    at = page + (block * 32 + t // 2) * 16
    a, b = codes16(at), codes16(at + 16)
    h = codes16(page + (d + 31) // 32 * 512 + (block * 16 + t // 4) * 16)
    return (
        level(picked(a, moved(h, -2), 3), extra),
        level(picked(moved(a, 2), moved(h, -1), 3), extra),
        level(picked(moved(a, 4), h, 3), extra),
        level(picked(moved(a, 6), moved(h, 1), 3), extra),
        level(picked(b, moved(h, 2), 3), extra),
        level(picked(moved(b, 2), moved(h, 3), 3), extra),
        level(picked(moved(b, 4), moved(h, 4), 3), extra),
        level(picked(moved(b, 6), moved(h, 5), 3), extra),
    )


KEYS = {8: _keys_8, 5: _keys_5, 4: _keys_4, 3: _keys_3, 2: _keys_2}
VALUES = {8: _values_8, 5: _values_5, 4: _values_4, 3: _values_3, 2: _values_2}


@device
def pack_set(codes, runs, shift, width, out):
    """Bits `shift` to `shift + width - 1` of a byte for each code, packed; returns their end."""
    # eight codes at a time in a word: no bit leaves its byte
    mask, per_unit = ((1 << width) - 1) * 0x0101010101010101, 8 // width
    units = (runs + per_unit - 1) // per_unit
    for unit in range(units):
        for half in range(0, 16, 8):
            word = 0
            for k in range(min(per_unit, runs - unit * per_unit)):
                x = scalar_i64(codes + (unit * per_unit + k) * 16 + half)
                word |= (x >> shift & mask) << (k * width)
            put_i64(out + unit * 16 + half, word)
    return out + units * 16


@device
def pack(codes, runs, bits, out):
    """A byte for each of runs x 16 codes, into the sets of `bits`."""
    if bits == 5:
        pack_set(codes, runs, 4, 1, pack_set(codes, runs, 0, 4, out))
    elif bits == 3:
        pack_set(codes, runs, 2, 1, pack_set(codes, runs, 0, 2, out))
    else:
        pack_set(codes, runs, 0, bits, out)
