"""The GPU's attention in Triton's interpreter, over pages that the NumPy formats wrote.

Queries, decoded keys, softmax weights and values are rounded to float16 before they are multiplied,
each by at most 2**-11 of itself, and sums are float32. Scores stay below 8 here, so that the first
two move a weight by at most 8 * 2 * 2**-11 of itself; with the other two an output, a weighted mean
of values, is off by at most (16 + 2) * 2**-11 of the largest of them.
"""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="the GPU's compiler is not installed")
torch = pytest.importorskip("torch", reason="the GPU's tensors are not installed")

from pykv.backends import transforms  # noqa: E402
from pykv.backends.base import CacheFormats, LayerShape, Rope  # noqa: E402
from pykv.backends.page_maps import PageMaps, Turns  # noqa: E402
from pykv.cache.layout import cache_types  # noqa: E402
from pykv.formats.coded import CodedFormat, HeadNumbers, find  # noqa: E402

tl = triton.language
attention = import_module("pykv.kernels.attention_triton")
launch = import_module("pykv.kernels.launch_triton")

TYPES = cache_types()
WIDTHS = [32, 64, 80, 96, 112, 128, 192, 256, 40, 72]
GROUPS = [1, 3, 4, 7, 8, 9]
# the interpreter multiplies bfloat16 as if it were whole numbers: only compiled, in tests/aot
OPERANDS = {"f16": (tl.float16, 2.0**-11), "f32": (tl.float32, 2.0**-20)}
CASES = [
    (k, TYPES[(i * 5 + 3) % len(TYPES)], WIDTHS[i % 10], GROUPS[i % 6]) for i, k in enumerate(TYPES)
]


def numbers_of(name, side, d, n_kv, seed):
    """What the format wants from a calibration, as a measured one might be."""
    format_, rng = find(name), np.random.default_rng(seed)
    if not isinstance(format_, CodedFormat) or format_.calibration != "levels":
        return [HeadNumbers() for _ in range(n_kv)]
    levels = np.sort(rng.uniform(-1, 1, 2**format_.bits)).astype(np.float32)
    ranges = {}
    if side == "key":
        ranges = {
            "scale": rng.uniform(1, 4, d).astype(np.float32),
            "centre": rng.standard_normal(d).astype(np.float32) / 8,
        }
    return [HeadNumbers(levels=levels, **ranges) for _ in range(n_kv)]


class Cache:
    """Pages of some sequences of one layer in one block of memory, and what they decode to."""

    def __init__(
        self, types, d, n_kv, lengths, sinks=4, residual=64, window=0, seed=0,
        maps=("none", "none"), tails=("f16", "f16"),
    ):  # fmt: skip
        rng = np.random.default_rng(seed)
        self.types, self.d, self.n_kv, self.tails = types, d, n_kv, tails
        bases = [HeadNumbers(basis=np.linalg.qr(rng.standard_normal((d, d)))[0].astype(np.float32))
                 for _ in range(n_kv)]  # fmt: skip
        self.maps = [transforms.matrices(name, d, bases) for name in maps]
        self.page_d = tuple(transforms.width(name, d) for name in maps)
        self.numbers = [numbers_of(t, s, d, n_kv, i) for i, (t, s) in
                        enumerate(zip(types, ("key", "value"), strict=True))]  # fmt: skip
        self.pages, self.places, self.tables = [], 0, []
        self.records = np.zeros((len(lengths), 16), np.int64)
        self.decoded = []
        for row, n in enumerate(lengths):
            entries = 2 + max(n - 1 - sinks, 0) // 64 if n > sinks else 1
            encoded = max(0, (n - sinks - residual) // 64)
            table = np.zeros((2, n_kv, entries), np.int64)
            x = rng.standard_normal((2, n_kv, n, d)).astype(np.float32)
            for side in (0, 1):
                for head in range(n_kv):
                    for e in range(0 if sinks else 1, entries):
                        first = 0 if e == 0 else sinks + (e - 1) * 64
                        last = min(sinks if e == 0 else first + 64, n)
                        part = x[side, head, first:last]
                        page, part[:] = self._page(side, head, part, e, encoded, sinks)
                        table[side, head, e] = self._place(page)
            low = max(0, n - window) if window else 0
            self.tables.append(table)
            self.decoded.append((x, low))
            at = table.ctypes.data
            self.records[row, :7] = (at, at + table[0].nbytes, entries, sinks, encoded, n - 1, low)
        self.pool = np.concatenate(self.pages)

    def _page(self, side, head, x, entry, encoded, sinks):
        if 0 < entry <= encoded:
            format_ = find(self.types[side])
            numbers = self.numbers[side][head]
            with_numbers = {"numbers": numbers} if isinstance(format_, CodedFormat) else {}
            encode = (format_.encode_keys, format_.encode_values)[side]
            decode = (format_.decode_keys, format_.decode_values)[side]
            if self.maps[side] is None:
                page = encode(x, **with_numbers)
                return page, decode(page, self.d, 64, **with_numbers)
            matrix = self.maps[side][head % len(self.maps[side])]
            page = encode(x @ matrix, **with_numbers)
            return page, decode(page, matrix.shape[1], 64, **with_numbers) @ matrix.T
        slots = (sinks + 15) // 16 * 16 if entry == 0 else 64
        filled = np.full((slots, self.d), np.nan, np.float32)  # what was never written
        filled[: len(x)] = x
        tail = find(self.tails[side])
        page = (tail.encode_keys, tail.encode_values)[side](filled)
        return page, (tail.decode_keys, tail.decode_values)[side](page, self.d, slots)[: len(x)]

    def by_maps(self, side, x, back=False):
        """x [rows, heads, ...] through a side's maps, which query heads of a KV head share."""
        if self.maps[side] is None:
            return x
        share = x.reshape(len(x), self.n_kv, -1, x.shape[-1])
        matrix = self.maps[side].swapaxes(1, 2) if back else self.maps[side]
        return (share @ matrix).reshape(*x.shape[:2], -1).astype(np.float32)

    def _place(self, page):
        place, size = self.places, (len(page) + 63) // 64
        self.pages.append(np.pad(page, (0, size * 64 - len(page)), constant_values=255))
        self.places += size
        return place


def settings(cache, operand, rope=None):
    """The kernel's compile-time parameters for formats and widths; there are pages always."""
    turned = {} if rope is None else {"n_rot": rope.n_rot, "neox": rope.neox}
    return launch.attention(
        cache.types, (cache.d, cache.d), pages=cache.page_d, mapped=cache.maps[1] is not None,
        tails=cache.tails, operand=operand, **turned,
    ) | {"ENCODED": True}  # fmt: skip


def extras(cache, group):
    """What lies outside the pages, for keys and for values."""
    d, n_kv = cache.d, cache.n_kv
    maps = PageMaps(
        LayerShape(n_kv * group, n_kv, d, d), CacheFormats(*cache.types, "f16", "f16"),
        cache.numbers,
    )  # fmt: skip
    pairs = zip(cache.types, (maps.extra_k, maps.extra_v), strict=True)
    return [torch.from_numpy(launch.extra(name, extra)) for name, extra in pairs]


def turns(rope, sinks, entries):
    """Tables of angles, which a cache of turned keys has none of."""
    tables = Turns(rope, sinks, entries).tables
    return [torch.from_numpy(t) for t in tables] if tables else [torch.zeros(1)] * 4


def attend(cache, group, q, splits=2, operand=tl.float16, rope=None, more_chunks=0, order=None):
    """The kernels' output [rows, heads, d] of the records in `order`, NaN for others."""
    d, n_kv, rows = cache.d, cache.n_kv, len(cache.records if order is None else order)
    extra_k, extra_v = extras(cache, group)
    chunks = -(-int(cache.records[:, 2].max()) // 8) + more_chunks
    page_d = None if cache.maps[1] is None else cache.page_d[1]
    width, heads = launch.sums(d, page_d), n_kv * group
    partial = torch.full((rows, heads, chunks, width), torch.nan)
    stats, out = torch.full((rows, heads, chunks, 2), torch.nan), torch.full(q.shape, torch.nan)
    out_pages = torch.full((*q.shape[:2], cache.page_d[1]), torch.nan)
    query, page_query = torch.from_numpy(q), torch.from_numpy(cache.by_maps(0, q))
    order = torch.tensor(range(rows) if order is None else order, dtype=torch.int32)
    cache_records = torch.from_numpy(cache.records)
    attention.attend_rows[(rows, n_kv, splits)](
        torch.from_numpy(cache.pool), cache_records, order, query, page_query, query, partial,
        stats, extra_k, extra_v, extra_k.shape[1], extra_v.shape[1], n_kv, chunks, splits,
        float(np.log2(np.e) / np.sqrt(d)),
        *turns(rope, int(cache.records[0, 3]), int(cache.records[:, 2].max())), GROUP=group,
        TILE=16, KEPT=False, SINKS=False, **settings(cache, operand, rope),
    )  # fmt: skip
    attention.combine[(rows, heads)](
        cache_records, order, partial, stats, out, out_pages, chunks, width,
        **launch.combination(heads, d, page_d),
    )  # fmt: skip
    return with_pages(cache, out, out_pages)


def with_pages(cache, out, out_pages):
    """The output with the part of mapped pages."""
    if cache.maps[1] is None:
        return out.numpy()
    return out.numpy() + cache.by_maps(1, out_pages.numpy(), back=True)


def prompt(cache, group, q, window=0, queries_at_once=5, operand=tl.float16):
    """The prompt kernel's output [queries, heads, d] for the last queries of the one sequence."""
    d, n_kv, count = cache.d, cache.n_kv, len(q)
    records = cache.records[:1].copy()
    records[0, 5] -= count - 1
    extra_k, extra_v = extras(cache, group)
    query, page_query = torch.from_numpy(q), torch.from_numpy(cache.by_maps(0, q))
    out, out_pages = (
        torch.full((count, n_kv * group, width), torch.nan) for width in (d, cache.page_d[1])
    )
    attention.attend_prompt[(-(-count // queries_at_once), n_kv)](
        torch.from_numpy(cache.pool), torch.from_numpy(records), query, page_query, out, out_pages,
        extra_k, extra_v, extra_k.shape[1], extra_v.shape[1], count, n_kv, window,
        float(np.log2(np.e) / np.sqrt(d)), *turns(None, 0, 0), GROUP=group,
        QUERIES=queries_at_once,
        LINES=max(16, launch.upto(queries_at_once * group)), **settings(cache, operand),
    )  # fmt: skip
    return with_pages(cache, out, out_pages)


def expected(cache, group, q):
    """The same in float64 from the decoded values."""
    out = np.zeros(q.shape)
    for row, (x, low) in enumerate(cache.decoded):
        k, v = x[:, :, low:].astype(np.float64)
        of_row = q[row].reshape(cache.n_kv, group, -1)
        s = np.einsum("hgd,htd->hgt", of_row, k) / np.sqrt(cache.d)
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        out[row] = np.einsum("hgt,htd->hgd", p, v).reshape(out[row].shape)
    return out


def queries(cache, group):
    shape = len(cache.records), cache.n_kv * group, cache.d
    return np.random.default_rng(9).standard_normal(shape).astype(np.float32)


def within(cache, q, found, exact, rounding):
    largest = max(np.abs(x[1]).max() for x, _ in cache.decoded)
    top = max(np.abs(x[0]).max() for x, _ in cache.decoded) * np.abs(q).max() * np.sqrt(cache.d)
    assert np.isfinite(found).all()
    assert np.abs(found - exact).max() <= rounding * largest * (2 + 2 * min(top, 8))


@pytest.mark.parametrize(("k", "v", "d", "group"), CASES)
def test_pages_of_every_format(k, v, d, group):
    cache = Cache((k, v), d, 2, [210])
    q = queries(cache, group)
    within(cache, q, attend(cache, group, q), expected(cache, group, q), 2.0**-11)


@pytest.mark.parametrize(
    ("lengths", "sinks", "residual", "window"),
    [
        ([1], 4, 0, 0),
        ([4, 5], 4, 0, 0),
        ([68, 200], 0, 0, 0),
        ([333], 17, 64, 100),
        ([900, 3], 4, 64, 0),
    ],
)
def test_lengths_sinks_and_windows(lengths, sinks, residual, window):
    cache = Cache(("q4_0", "q4_0"), 64, 2, lengths, sinks, residual, window)
    q = queries(cache, 3)
    within(cache, q, attend(cache, 3, q), expected(cache, 3, q), 2.0**-11)


def test_the_number_of_splits_changes_nothing():
    cache = Cache(("q4_0", "kivi2"), 32, 1, [1300])
    q = queries(cache, 4)
    one = attend(cache, 4, q, 1)
    for splits in (3, 8):
        np.testing.assert_array_equal(attend(cache, 4, q, splits), one)


def test_the_room_and_other_rows_change_nothing():
    cache = Cache(("q4_0", "q8_0"), 40, 1, [500, 1200, 70], window=100)
    q = queries(cache, 2)
    all_rows = attend(cache, 2, q)
    within(cache, q, all_rows, expected(cache, 2, q), 2.0**-11)
    found = attend(cache, 2, q, splits=5, more_chunks=40, order=[2, 0])
    np.testing.assert_array_equal(found[[0, 2]], all_rows[[0, 2]])
    assert np.isnan(found[1]).all()


@pytest.mark.parametrize(("position", "low"), [(10500, 0), (10500, 9000), (8191, 0), (3, 0)])
def test_sums_of_many_chunks_are_added_by_tiles(position, low):
    rng, heads, chunks, d, page_d = np.random.default_rng(3), 2, 24, 40, 24
    records = np.zeros((3, 16), np.int64)
    records[1, 3:7] = 4, 100, position, low
    first, last = ((1 + (at - 4) // 64) // 8 if at >= 4 else 0 for at in (low, position))
    partial = np.full((1, heads, chunks, launch.sums(d, page_d)), np.nan, np.float32)
    stats = np.full((1, heads, chunks, 2), np.nan, np.float32)
    seen = np.s_[0, :, first : last + 1]
    partial[seen] = rng.standard_normal(partial[seen].shape)
    stats[seen] = rng.uniform(0.5, 6, stats[seen].shape)
    out, out_pages = torch.full((3, heads, d), torch.nan), torch.full((3, heads, page_d), torch.nan)
    attention.combine[(1, heads)](
        torch.from_numpy(records), torch.tensor([1], dtype=torch.int32), torch.from_numpy(partial),
        torch.from_numpy(stats), out, out_pages, chunks, partial.shape[-1],
        **launch.combination(heads, d, page_d),
    )  # fmt: skip
    weights = np.exp2(stats[seen][..., 0].astype(np.float64))
    sums = (partial[seen] * weights[..., None]).sum(1)
    sums /= (stats[seen][..., 1] * weights).sum(1)[:, None]
    # float32 sums of at most 24 terms that are below 8, whose weights are rounded too
    np.testing.assert_allclose(out[1].numpy(), sums[:, :d], rtol=0, atol=24 * 8 * 2.0**-23)
    np.testing.assert_allclose(
        out_pages[1].numpy(), sums[:, 64 : 64 + page_d], rtol=0, atol=24 * 8 * 2.0**-23
    )
    assert np.isnan(out[[0, 2]].numpy()).all()


def test_float32_operands_are_exact_to_their_own_rounding():
    cache = Cache(("q8_0", "f16"), 64, 1, [200])
    q = queries(cache, 2)
    within(cache, q, attend(cache, 2, q, operand=tl.float32), expected(cache, 2, q), 2.0**-20)


@pytest.mark.parametrize(
    ("types", "d", "group", "window"),
    [
        (("q4_0", "q4_0"), 64, 3, 0),
        (("kivi2", "q8_0"), 80, 7, 0),
        (("f16", "kivi4"), 40, 1, 90),
        (("tq4", "fp8_e4m3"), 96, 4, 50),
    ],
)
def test_prompts_see_what_each_query_sees(types, d, group, window):
    prompt_is_right(Cache(types, d, 2, [300]), group, 13, window)


def prompt_is_right(cache, group, count, window=0, operand="f16"):
    """Compare what the last `count` tokens of the one sequence see, each by itself."""
    kind, rounding = OPERANDS[operand]
    d, length = cache.d, cache.decoded[0][0].shape[2]
    q = np.random.default_rng(4).standard_normal((count, 2 * group, d)).astype(np.float32)
    found = prompt(cache, group, q, window, operand=kind)
    for i in range(count):
        seen = length - count + 1 + i
        low = max(0, seen - window) if window else 0
        x = cache.decoded[0][0][:, :, :seen]
        of_query = Cache.__new__(Cache)
        of_query.decoded, of_query.n_kv, of_query.d = [(x, low)], 2, d
        exact = expected(of_query, group, q[i : i + 1])
        within(of_query, q[i : i + 1], found[i : i + 1], exact, rounding)


@pytest.mark.parametrize(
    ("types", "d", "maps"),
    [
        (("q4_0", "q8_0"), 64, ("hadamard", "lowrank:24")),
        (("kivi2", "q4_0"), 40, ("lowrank:24", "random")),
        (("q8_0", "kivi4"), 48, ("lowrank:40", "none")),
    ],
)
def test_mapped_pages_have_a_query_and_sums_of_their_own(types, d, maps):
    cache, group = Cache(types, d, 2, [200, 70], maps=maps), 3
    q = queries(cache, group)
    within(cache, q, attend(cache, group, q), expected(cache, group, q), 2.0**-11)
    prompt_is_right(Cache(types, d, 2, [140], maps=maps), group, 5)


@pytest.mark.parametrize(
    ("types", "tails", "operand"),
    [
        (("q4_0", "kivi2"), ("bf16", "bf16"), "f16"),
        (("q8_0", "q4_0"), ("f32", "f32"), "f32"),
        (("kivi4", "bf16"), ("f16", "bf16"), "f32"),
        (("f16", "q5_1"), ("f32", "bf16"), "f32"),
    ],
)
def test_tails_of_other_types(types, tails, operand):
    kind, rounding = OPERANDS[operand]
    cache = Cache(types, 32, 2, [150], tails=tails)
    q = queries(cache, 2)
    within(cache, q, attend(cache, 2, q, operand=kind), expected(cache, 2, q), rounding)
    prompt_is_right(cache, 2, 3, operand=operand)


@pytest.mark.parametrize(
    ("types", "d", "n_rot", "neox"),
    [
        (("nuq4", "nuq4"), 64, 64, True),
        (("nuq3", "q8_0"), 80, 32, False),
        (("nuq4:outliers=1%", "nuq3:outliers=1%"), 64, 64, True),
        (("nuq2:outliers=2%", "nuq4:outliers=1%"), 40, 16, False),
        (("kivi2", "f16"), 96, 64, True),
        (("f16", "kivi4"), 40, 40, False),
    ],
)
def test_keys_before_rope_are_turned_where_they_are_read(types, d, n_rot, neox):
    rope = Rope(neox, 10000.0 ** -(np.arange(0, n_rot, 2) / n_rot))
    cache, group = Cache(types, d, 2, [300], sinks=4), 3
    q = queries(cache, group)
    found = attend(cache, group, q, rope=rope)
    x, low = cache.decoded[0]
    k = x[0].astype(np.float64)
    cos, sin = rope.tables(np.arange(k.shape[1]))
    half = n_rot // 2
    first = slice(0, half) if neox else slice(0, n_rot, 2)
    second = slice(half, n_rot) if neox else slice(1, n_rot, 2)
    a, b = k[..., first].copy(), k[..., second].copy()
    k[..., first], k[..., second] = a * cos - b * sin, a * sin + b * cos
    cache.decoded = [(np.stack([k, x[1]]), low)]
    within(cache, q, found, expected(cache, group, q), 2.0**-11)
