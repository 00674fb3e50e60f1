"""The GPU's encoders in Triton's interpreter: their bytes are the NumPy formats'.

In three places bytes may differ where both are right, and no test here goes there. A tq type's sums
of squares in float64 are taken in another order: one in some 10**9 scales may be rounded otherwise.
Which of 0.0 and -0.0 is the least of values that have both is left open. And NaN is in no page.
"""

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
WIDTHS = [32, 64, 80, 96, 112, 128, 40, 72, 48, 160]


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
CASES = [(name, side) for name in CODED for side in ("key", "value")]


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


def extra_of(name, side, d, heads):
    """What the kernel is given beside the pages."""
    numbers, other = [numbers_of(name, side, d)] * heads, [HeadNumbers()] * heads
    keys = side == "key"
    types, of_sides = (
        ((name, "f16"), (numbers, other)) if keys else (("f16", name), (other, numbers))
    )
    maps = PageMaps(LayerShape(heads, heads, d, d), CacheFormats(*types, "f16", "f16"), of_sides)
    extra = launch.extra(name, maps.extra_k if keys else maps.extra_v)
    return torch.from_numpy(np.ascontiguousarray(extra))


class Pool:
    """Tail pages of KV heads, a table of them, and room for coded pages of `size` bytes."""

    def __init__(self, tails, side, size, tail="f16"):
        made = find(tail)
        held = [(made.encode_keys if side == "key" else made.encode_values)(x) for x in tails]
        held = [np.pad(page, (0, -len(page) % 64)) for page in held]
        self.start, self.size, heads = sum(len(page) for page in held), size, len(tails)
        self.bytes = np.concatenate([*held, np.full(heads * size + 64, 0xA5, np.uint8)])
        self.table = np.cumsum([0, *(len(page) // 64 for page in held[:-1])]).astype(np.int64)
        self.places = (self.start + size * np.arange(heads)) // 64
        entries = self.table.ctypes.data + 8 * np.arange(heads)
        self.moves = torch.from_numpy(np.stack([entries, self.places], 1))

    def pages(self):
        """The new pages, to which the table's entries point; nothing else was written."""
        np.testing.assert_array_equal(self.table, self.places)
        assert (self.bytes[self.start + len(self.places) * self.size :] == 0xA5).all()
        return [self.bytes[p * 64 : p * 64 + self.size].copy() for p in self.places]


def same(page, expected, message):
    """What lies between a page's last number and its end, below 64 bytes, is nobody's."""
    nobodys = np.cumprod(page[::-1] == 0xA5)[::-1].astype(bool)
    assert nobodys[:-63].sum() == 0
    page[nobodys] = 0
    np.testing.assert_array_equal(page, expected, message)


def codec(name, side, x):
    """The page that the NumPy format makes."""
    format_, numbers = find(name), numbers_of(name, side, x.shape[1])
    return (format_.encode_keys if side == "key" else format_.encode_values)(x, numbers)


def check_tails(name, side, d, kinds):
    """Tail pages, one KV head of each kind."""
    rng = np.random.default_rng(d)
    tails = [kind(rng, d).astype(np.float16).astype(np.float32) for kind in kinds]
    pool = Pool(tails, side, find(name).page_bytes(d, side))
    extra = extra_of(name, side, d, len(tails))
    encode.encode(torch.from_numpy(pool.bytes), pool.moves, extra, name, side, d, len(tails))
    for x, page, kind in zip(tails, pool.pages(), kinds, strict=True):
        same(page, codec(name, side, x), f"{d} {kind.__name__}")


@pytest.mark.parametrize(("name", "side"), CASES)
def test_bytes_are_the_codecs(name, side):
    i = CASES.index((name, side))
    check_tails(name, side, WIDTHS[i % 10], [KINDS[(i + n) % 6] for n in (0, 2)])
    check_tails(name, side, WIDTHS[(i * 3 + 6) % 10], [KINDS[(i + n) % 6] for n in (3, 5)])


@pytest.mark.parametrize(("name", "side"), [("q4_0", "key"), ("nuq3", "value"), ("tq4", "key")])
def test_the_widest_heads(name, side):
    check_tails(name, side, 256, [ordinary])


def spikes(rng, d):
    """Fewer far values than may be kept."""
    x = rng.uniform(-0.01, 0.01, (64, d))
    x[rng.integers(64, size=5), rng.integers(d, size=5)] = (9, -9, 9, 300, -0.5)
    return x


def constant(rng, d):
    return np.full((64, d), 0.25)


@pytest.mark.parametrize(
    ("name", "side", "d", "kinds"),
    [
        ("nuq3:outliers=1%", "key", 64, (ordinary, few_values)),
        ("nuq3:outliers=1%", "value", 64, (few_values, outlier)),
        ("nuq4:outliers=2.5%", "key", 40, (few_values, mostly_zero)),
        ("nuq4:outliers=5%", "value", 72, (ordinary, spikes)),
        ("nuq2:outliers=25%", "key", 96, (ordinary, spikes)),
        ("nuq2:outliers=25%", "value", 40, (few_values, tiny)),
        ("nuq4:outliers=0.01%", "value", 32, (few_values, constant)),
    ],
)
def test_outliers(name, side, d, kinds):
    check_tails(name, side, d, kinds)


@pytest.mark.parametrize(
    ("name", "side", "d", "width", "tail"),
    [
        ("q4_0", "key", 64, 64, "f16"),
        ("kivi2", "key", 80, 48, "bf16"),
        ("tq3", "key", 40, 40, "f32"),
        ("nuq3:outliers=1%", "key", 64, 40, "f16"),
        ("nuq4:outliers=3%", "value", 64, 48, "f32"),
        ("iq4_nl", "value", 40, 24, "bf16"),
        ("int8", "value", 48, 48, "f16"),
    ],
)
def test_mapped_values(name, side, d, width, tail):
    rng, heads = np.random.default_rng(7), 2
    tails = [rng.standard_normal((64, d)).astype(np.float32) * 300 for _ in range(heads)]
    pool = Pool(tails, side, find(name).page_bytes(width, side), tail)
    memory, gathered = torch.from_numpy(pool.bytes), torch.full((heads, 64, d), torch.nan)
    encode.gather_tails(memory, pool.moves, gathered, side, tail, d)
    widened = find(tail).decode(find(tail).encode(np.stack(tails).reshape(-1)))
    np.testing.assert_array_equal(gathered.numpy(), widened.reshape(heads, 64, d))
    matrix = rng.standard_normal((heads, d, width)).astype(np.float32) * 40  # past f16
    rows = torch.matmul(gathered, torch.from_numpy(matrix))
    assert rows.abs().max() > 65504
    extra = extra_of(name, side, width, heads)
    encode.encode(memory, pool.moves, extra, name, side, width, heads, tail, rows)
    for x, page in zip(rows.numpy(), pool.pages(), strict=True):
        same(page, codec(name, side, x), name)


@pytest.mark.parametrize("side", ["key", "value"])
def test_infinitely_far_is_far_enough(side):
    name, d = "nuq4:outliers=1%", 40
    x = np.random.default_rng(1).choice(np.array([-3e38, -1.0, 3e38, 2e38], np.float32), (64, d))
    pool = Pool([x * 0], side, find(name).page_bytes(d, side), "f32")
    extra, rows = extra_of(name, side, d, 1), torch.from_numpy(x[None])
    with np.errstate(all="ignore"):
        encode.encode(
            torch.from_numpy(pool.bytes), pool.moves, extra, name, side, d, 1, "f32", rows
        )
        same(pool.pages()[0], codec(name, side, x), side)
