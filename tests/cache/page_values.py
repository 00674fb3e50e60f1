"""Pages full of values that try a cache format, and what a kernel is told beside them."""

from __future__ import annotations

import numpy as np

from pykv.backends.page_maps import _extra
from pykv.formats.coded import HeadNumbers, find

HEAD_SCALES = (1.0, 1.7, 0.037)  # of formats whose scale belongs to the head


def ordinary(rng, d):
    """Channels of different sizes, some of them outliers."""
    x = rng.standard_normal((64, d)) * np.exp(rng.standard_normal(d))
    x[:, rng.integers(d)] *= 30
    return x


def of_few_values(rng, d):
    """Zeros of both signs, groups of one value, ties of what rounds and of what is largest."""
    x = rng.choice([0, -0.0, 0.5, 1, -1, 1.5, 2, -2, 7, -8, 15.5, 127, -127], (64, d))
    x[:32, ::3] = x[0, ::3]
    x[5::9] = 0
    x[7::11] = -0.0
    x[6] = 3.25
    x[:, d // 2] = -1
    return x


def of_all_sizes(rng, d):
    """From denormals to the ends of half floats; past 448 for fp8, and one huge value."""
    x = rng.standard_normal((64, d)) * 10.0 ** rng.uniform(-45, 4.8, (64, 1))
    x[40:] = rng.standard_normal((24, d)) * 10.0 ** rng.uniform(-9, 4.8, (24, d))
    x = np.clip(x, -65504, 65504)
    x[:4] = rng.uniform(-500, 500, (4, d))
    x[9] = 1e-45
    x[21, d // 3], x[50, 0], x[51, d - 1] = 65504, -65504, 60000
    return x


def past_half_floats(rng, d):
    """What a float32 or bfloat16 tail may hold."""
    x = rng.standard_normal((64, d)) * 10.0 ** rng.uniform(3, 38, (64, 1))
    x[12], x[3, 0] = 3e38, -3e38
    return x


KINDS = [ordinary, of_few_values, of_all_sizes, past_half_floats]


def values_of(kind, d, seed=0):
    with np.errstate(under="ignore"):
        return kind(np.random.default_rng((d, seed)), d).astype(np.float32)


def numbers_of(name, side, d, which=0):
    """What a calibration file might hold for a head; None: the format wants nothing."""
    format_ = find(name)
    if getattr(format_, "calibration", "none") == "none":
        return None
    if format_.calibration == "scale":
        return HeadNumbers(scale=np.float32(HEAD_SCALES[which % 3]))
    rng = np.random.default_rng((d, which))
    levels = np.sort(rng.uniform(-1, 1, 2**format_.bits)).astype(np.float32)
    levels[[0, -1]] = -1, 1
    if side == "value":
        return HeadNumbers(levels=levels)
    scale, centre = rng.exponential(2, d).astype(np.float32), rng.normal(0, 1, d)
    scale[d // 3] = 0
    return HeadNumbers(scale, centre.astype(np.float32), levels)


def settings(name, side, d, which=0):
    """The codec's keyword for a head's numbers, and the float32 that kernels read."""
    numbers = numbers_of(name, side, d, which)
    if numbers is None:
        return {}, np.full(1, np.nan, np.float32)
    return {"numbers": numbers}, _extra(name, 1, d, [numbers])[0]


def n_blocks(d):
    return -(-d // 32)


def as_blocks(x, fill=0.0):
    """f32 [64, d] -> [ceil(d / 32)][64][32]; channels that fill up the last block hold `fill`."""
    padded = np.full((64, n_blocks(x.shape[1]) * 32), fill, np.float32)
    padded[:, : x.shape[1]] = x
    return np.ascontiguousarray(padded.reshape(64, -1, 32).transpose(1, 0, 2))


def parts(name, side, d, page):
    """A page's bytes of codes, its scales and minima, and its outliers.

    As numbers the minima 0 and -0 are the same, and either may be the least of both.
    """
    format_ = find(name)
    n = format_._code_bytes(d, side)
    end = n + 2 * format_.n_parameters * format_._groups(d, side)
    return page[:n], page[n:end].view("<f2"), page[end : end + 4 * format_.n_outliers(d)]


def magnitude(name, side, page, d, numbers):
    """|scale * code| + |minimum|, f64 [64, d]: what a kernel adds up, in whatever order."""
    format_, keyword = find(name), {} if numbers is None else {"numbers": numbers}
    decode = getattr(format_, f"decode_{side}s")
    whole = decode(page, d, **keyword).astype(np.float64)
    if format_.calibration == "levels":
        # scale times a level of 1 at most, and the centre; for an outlier both are taken back
        scale, centre = (
            parts(name, side, d, page)[1].reshape(2, 64, 1) if side == "value"
            else (numbers.scale, numbers.centre)
        )  # fmt: skip
        return np.abs(whole) + 2 * (np.abs(scale) + np.abs(centre).astype(np.float64))
    if format_.n_parameters < 2:
        return np.abs(whole)
    least = page.copy()
    least[: format_._code_bytes(d, side)] = 0  # code 0 is the minimum
    low = decode(least, d).astype(np.float64)
    return np.abs(whole - low) + np.abs(low)
