"""The GPU's encoders in Triton's interpreter: their bytes are the NumPy formats'."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="the GPU's compiler is not installed")
torch = pytest.importorskip("torch", reason="the GPU's tensors are not installed")

from pykv import registry  # noqa: E402
from pykv.backends.base import CacheFormats, LayerShape  # noqa: E402
from pykv.backends.page_maps import PageMaps  # noqa: E402
from pykv.formats.coded import CodedFormat, HeadNumbers, find  # noqa: E402

encode = import_module("pykv.kernels.encode_triton")
launch = import_module("pykv.kernels.launch_triton")

CODED = [
    n
    for n in registry.names("formats")
    if isinstance(registry.find("formats", n, "cache type").FORMAT, CodedFormat)
]
WIDTHS = [32, 64, 80, 96, 112, 128, 192, 256, 40, 72]


def ordinary(rng, d):
    return rng.standard_normal((64, d))


def outlier(rng, d):
    x = rng.standard_normal((64, d))
    x[rng.integers(64), rng.integers(d)] = 60_000
    return x


def few_values(rng, d):
    return rng.integers(-2, 3, (64, d)) / 4


def mostly_zero(rng, d):
    # zeros of one sign: which of two a minimum is, is left open
    return np.where(rng.random((64, d)) < 0.05, rng.standard_normal((64, d)), 0.0)


def tiny(rng, d):
    return rng.integers(-3, 4, (64, d)) * 2.0**-24


def past_fp8(rng, d):
    return rng.standard_normal((64, d)) * 400


KINDS = [ordinary, outlier, few_values, mostly_zero, tiny, past_fp8]


def numbers_of(name, side, d):
    """What the format wants from a calibration."""
    if find(name).calibration != "levels":
        return HeadNumbers()
    rng = np.random.default_rng(3)
    levels = np.sort(rng.uniform(-1, 1, 2 ** find(name).bits)).astype(np.float32)
    if side == "value":
        return HeadNumbers(levels=levels)
    scale, centre = rng.uniform(0, 2, d).astype(np.float32), rng.standard_normal(d) / 8
    scale[::7] = 0  # a channel that never moved
    return HeadNumbers(levels=levels, scale=scale, centre=centre.astype(np.float32))


def pages(name, side, d, tails):
    """What the kernel makes of tail pages of KV heads."""
    heads, keys = len(tails), side == "key"
    numbers = [numbers_of(name, side, d)] * heads
    other = [HeadNumbers()] * heads
    types, of_sides = (
        ((name, "f16"), (numbers, other)) if keys else (("f16", name), (other, numbers))
    )
    maps = PageMaps(LayerShape(heads, heads, d, d), CacheFormats(*types, "f16", "f16"), of_sides)
    extra = launch.extra(name, maps.extra_k if keys else maps.extra_v)
    size, f16 = find(name).page_bytes(d, side), find("f16")
    held = [(f16.encode_keys if keys else f16.encode_values)(x) for x in tails]
    held = [np.pad(page, (0, -len(page) % 64)) for page in held]
    start = sum(len(page) for page in held)
    pool = np.concatenate([*held, np.full(heads * size + 64, 0xA5, np.uint8)])
    table = np.cumsum([0, *(len(page) // 64 for page in held[:-1])]).astype(np.int64)
    entries = table.ctypes.data + 8 * np.arange(heads)
    places = (start + size * np.arange(heads)) // 64
    moves = torch.from_numpy(np.stack([entries, places], 1))
    memory, values = torch.from_numpy(pool), torch.from_numpy(np.ascontiguousarray(extra))
    encode.encode(
        memory, moves, values, name, side, d, heads
    )
    np.testing.assert_array_equal(table, places)
    assert (pool[start + heads * size :] == 0xA5).all()
    return [pool[p * 64 : p * 64 + size] for p in places], numbers[0]


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("name", CODED)
def test_bytes_are_the_codecs(name, side):
    for i, d in enumerate(WIDTHS):
        if (i + len(name)) % 3 and d not in (64, 40):
            continue  # a third of the widths for each, and two for all
        rng = np.random.default_rng(d)
        kinds = [KINDS[(i + n) % len(KINDS)] for n in (0, 2, 3)]
        tails = [kind(rng, d).astype(np.float16).astype(np.float32) for kind in kinds]
        made, numbers = pages(name, side, d, tails)
        format_ = find(name)
        for x, page, kind in zip(tails, made, kinds, strict=True):
            encoder = format_.encode_keys if side == "key" else format_.encode_values
            expected = encoder(x, numbers)
            # what lies between a page's last number and its end is nobody's
            used = np.flatnonzero(expected)
            end = used[-1] + 1 if len(used) else 0
            np.testing.assert_array_equal(page[:end], expected[:end], f"{d} {kind.__name__}")
