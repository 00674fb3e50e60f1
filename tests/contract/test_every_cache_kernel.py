"""Every cache format's CPU functions on pages of codes, with its NumPy codec as the truth."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import os
import platform
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from page_values import (
    KINDS,
    as_blocks,
    magnitude,
    n_blocks,
    of_all_sizes,
    of_few_values,
    ordinary,
    parts,
    settings,
    values_of,
)

from pykv import registry
from pykv.backends.base import Rope
from pykv.backends.page_maps import Turns
from pykv.backends.program import word
from pykv.formats.coded import CodedFormat, find
from pykv.kernels import jit_numba
from pykv.kernels.simd_memory import scalar_i64

FORMATS = {n: registry.find("formats", n, "cache type").FORMAT for n in registry.names("formats")}
CACHE = [name for name, format_ in FORMATS.items() if "cache" in format_.roles]
MODULES = {
    name: importlib.import_module(f"pykv.kernels.{name}_numba")
    for name in CACHE
    if find_spec(f"pykv.kernels.{name}_numba") is not None
}
NAMES = [name for name in MODULES if isinstance(FORMATS[name], CodedFormat)]
NAMES += [f"{name}:outliers=1%" for name in NAMES if FORMATS[name].calibration == "levels"]
WIDTHS = [32, 40, 64, 72, 80, 96, 100, 112, 128, 192, 256]
U = 2.0**-24  # float32's unit roundoff
GUARD = 64  # bytes or floats behind a result that must survive
SENTINEL = np.float32(-12345)

function = None  # bound by `kernel`


# each takes the parameters of the format's function, in order
def call_4(ctx, task, worker):
    function(scalar_i64(ctx), scalar_i64(ctx + 8), scalar_i64(ctx + 16), scalar_i64(ctx + 24))


def call_5(ctx, task, worker):
    function(
        scalar_i64(ctx), scalar_i64(ctx + 8), scalar_i64(ctx + 16), scalar_i64(ctx + 24),
        scalar_i64(ctx + 32),
    )  # fmt: skip


def call_9(ctx, task, worker):
    function(
        scalar_i64(ctx), scalar_i64(ctx + 8), scalar_i64(ctx + 16), scalar_i64(ctx + 24),
        scalar_i64(ctx + 32), scalar_i64(ctx + 40), scalar_i64(ctx + 48), scalar_i64(ctx + 56),
        scalar_i64(ctx + 64),
    )  # fmt: skip


def call_10(ctx, task, worker):
    function(
        scalar_i64(ctx), scalar_i64(ctx + 8), scalar_i64(ctx + 16), scalar_i64(ctx + 24),
        scalar_i64(ctx + 32), scalar_i64(ctx + 40), scalar_i64(ctx + 48), scalar_i64(ctx + 56),
        scalar_i64(ctx + 64), scalar_i64(ctx + 72),
    )  # fmt: skip


def call_11(ctx, task, worker):
    function(
        scalar_i64(ctx), scalar_i64(ctx + 8), scalar_i64(ctx + 16), scalar_i64(ctx + 24),
        scalar_i64(ctx + 32), scalar_i64(ctx + 40), scalar_i64(ctx + 48), scalar_i64(ctx + 56),
        scalar_i64(ctx + 64), scalar_i64(ctx + 72), scalar_i64(ctx + 80),
    )  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _kernel_folder(request):
    before = jit_numba.cache_folder()
    jit_numba.set_cache_folder(request.config.cache.mkdir("pykv"))
    yield
    jit_numba.set_cache_folder(before.parent.parent)


def call(name, what, *parameters, group=0):
    """Run a format's function; it is compiled once. Arrays are handed over by address."""
    template = {4: call_4, 5: call_5, 9: call_9, 10: call_10, 11: call_11}[len(parameters)]
    stem = name.partition(":")[0]
    bound = getattr(MODULES[stem], what)
    if group:
        bound = jit_numba.bound(bound, f"test_{stem}_{what}_g{group}", GROUP=group)
    version = hashlib.sha256(template.__code__.co_code).hexdigest()[:8]
    made = jit_numba.kernel(template, f"test_{stem}_{what}_g{group}_{version}", function=bound)
    ctx = np.array([word(p) for p in parameters], np.int64)
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(made.address)(ctx.ctypes.data, 0, 0)


def group_of(name, what):
    """One of 1 to 4: each format has one for keys and another for values, to compile few."""
    number = NAMES.index(name.partition(":")[0])
    return 1 + (number + number // 4 + 2 * (what == "mix")) % 4


def sides_of(name, d, which=0):
    """Side, the codec's encoder and decoder, its keyword, and what the kernel is told."""
    format_ = find(name)
    yield "key", format_.encode_keys, format_.decode_keys, *settings(name, "key", d, which)
    yield "value", format_.encode_values, format_.decode_values, *settings(name, "value", d, which)


def test_every_cache_format_has_kernels():
    assert set(MODULES) == set(CACHE)
    for module in MODULES.values():
        assert {"encode_keys", "encode_values", "scores", "mix", "read_keys", "read_values"} <= set(
            vars(module)
        )


# encoding: code for code


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_encoded_pages_are_the_codecs(name, kind):
    for i, d in enumerate(WIDTHS):
        x = values_of(kind, d)
        for side, encode, _, keyword, extra in sides_of(name, d, i):
            expected = encode(x, **keyword)
            page = np.full(len(expected) + GUARD, 0xFF, np.uint8)
            laid = as_blocks(x, 1e30) if side == "value" else np.ascontiguousarray(x.T)
            call(name, f"encode_{side}s", laid, d, page, extra)
            pairs = zip(parts(name, side, d, page), parts(name, side, d, expected), strict=True)
            for got, wanted in pairs:
                np.testing.assert_array_equal(got, wanted, err_msg=f"{side} {d}")
            assert (page[len(expected) :] == 0xFF).all()


# reading: exact


def read(name, side, page, d, extra):
    """A page by the format's function, f32 [64, d]."""
    rows = (d + 1, 64) if side == "key" else (n_blocks(d) + 1, 64, 32)
    out = np.full(rows, SENTINEL)
    call(name, f"read_{side}s", page, d, 64, out, extra)
    assert (out[-1] == SENTINEL).all()
    if side == "key":
        return out[:d].T
    return out[:-1].transpose(1, 0, 2).reshape(64, -1)[:, :d]


@pytest.mark.parametrize("name", NAMES)
def test_pages_are_read_as_the_codec_decodes_them(name):
    for i, d in enumerate(WIDTHS):
        for kind in (ordinary, of_all_sizes):
            x = values_of(kind, d, 1)
            for side, encode, decode, keyword, extra in sides_of(name, d, i):
                page = encode(x, **keyword)
                expected = decode(page, d, **keyword)
                np.testing.assert_array_equal(read(name, side, page, d, extra), expected)


@pytest.mark.parametrize("name", NAMES)
def test_every_code_is_read(name):
    """Any bytes for codes; scales and minima are ordinary ones."""
    rng, d = np.random.default_rng(7), 72
    for side, encode, decode, keyword, extra in sides_of(name, d, 1):
        page = encode(values_of(ordinary, d), **keyword)
        codes = parts(name, side, d, page)[0]
        codes[:] = np.resize(rng.permutation(np.arange(256, dtype=np.uint8)), len(codes))
        expected = decode(page, d, **keyword)
        bad = ~np.isfinite(expected)  # codes that a float8 has for NaN and infinity
        assert not bad.any() or name.startswith("fp8")
        got = read(name, side, page, d, extra)
        np.testing.assert_array_equal(got[~bad], expected[~bad])


# products: within the bound of any order of sums


def gamma(n):
    """Higham, section 3.1: what n roundings on the way of a product leave of its size."""
    return n * U / (1 - n * U)


def call_scores(name, q, page, d, group, extra, what="scores", turns=()):
    """f32 [group, 64]: each row of q with the page's keys."""
    out = np.full((group, 64 + GUARD), SENTINEL)
    call(name, what, q, q.strides[0], page, page, d, 64, out, out.strides[0], extra, *turns,
         group=group)  # fmt: skip
    assert (out[:, 64:] == SENTINEL).all()
    return out[:, :64]


# the others' keys are always turned at read; see below
@pytest.mark.parametrize("name", [n for n in NAMES if find(n).key_position == "write"])
def test_scores_are_within_the_bound(name):
    group = group_of(name, "scores")
    for i, d in enumerate(WIDTHS):
        _, encode, decode, keyword, extra = next(sides_of(name, d, i))
        for kind in (ordinary, of_few_values):
            page = encode(values_of(kind, d, 2), **keyword)
            q = np.random.default_rng(d).standard_normal((group, d + 3)).astype(np.float32)
            out = call_scores(name, q, page, d, group, extra)
            q = q[:, :d].astype(np.float64)
            exact = q @ decode(page, d, **keyword).T.astype(np.float64)
            # d products, d sums of minima; a scale, the codec's own sum, and the blocks' sums
            size = np.abs(q) @ magnitude(name, "key", page, d, keyword.get("numbers")).T
            assert (np.abs(out - exact) <= gamma(2 * d + 16) * size).all(), d


TURNED = [n for n in NAMES if find(n).key_axis == "channel" or find(n).key_position == "read"]


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("name", TURNED)
def test_scores_of_keys_that_are_turned_at_read_are_within_the_bound(name, neox):
    """Token j's key by j positions: the query was turned back by the first one's."""
    group, magnitude_of_rope = group_of(name, "scores"), 1.25
    for d, n_rot in ((64, 64), (40, 20), (128, 2)):
        rope = Rope(neox, 100.0 ** (-np.arange(n_rot // 2) / n_rot), magnitude_of_rope)
        turns = Turns(rope, 4, 2)
        _, encode, decode, keyword, extra = next(sides_of(name, d))
        page = encode(values_of(ordinary, d, 4), **keyword)
        q = np.random.default_rng(d).standard_normal((group, d)).astype(np.float32)
        out = call_scores(name, q, page, d, group, extra, "scores_read", (turns.words,))
        keys = decode(page, d, **keyword).astype(np.float64)
        size = magnitude(name, "key", page, d, keyword.get("numbers"))
        first, second = (np.arange(n_rot // 2), np.arange(n_rot // 2, n_rot)) if neox else (
            np.arange(0, n_rot, 2), np.arange(1, n_rot, 2))  # fmt: skip
        angles = np.arange(64)[:, None] * rope.inv_freq
        z = (keys[:, first] + 1j * keys[:, second]) * np.exp(1j * angles) * magnitude_of_rope
        keys[:, first], keys[:, second] = z.real, z.imag
        pairs = (size[:, first] + size[:, second]) * magnitude_of_rope
        size[:, first] = size[:, second] = pairs
        # as above, and a rounded sine or cosine, its product, and the sum of two
        error = np.abs(out - q.astype(np.float64) @ keys.T)
        assert (error <= gamma(2 * d + 20) * (np.abs(q) @ size.T)).all(), d


@pytest.mark.parametrize("name", NAMES)
def test_mixtures_are_within_the_bound(name):
    group = group_of(name, "mix")
    for i, d in enumerate(WIDTHS):
        *_, (_, encode, decode, keyword, extra) = sides_of(name, d, i)
        for kind, count in ((ordinary, 1 + i % 3), (of_few_values, 1)):
            rng, width = np.random.default_rng(d), n_blocks(d) * 32
            pages = [encode(values_of(kind, d, seed), **keyword) for seed in range(count)]
            p = rng.exponential(size=(group, count * 64 + 5)).astype(np.float32)
            p[:, ::7] = 0  # as a mask leaves them
            entries = np.array([page.ctypes.data for page in pages], np.int64)
            out = np.full((group, width + GUARD), SENTINEL)
            before = rng.standard_normal((group, width)).astype(np.float32)
            out[:, :width] = before
            call(name, "mix", p, p.strides[0], entries, count, 64, 64, d, out, out.strides[0],
                 extra, pages[0], group=group)  # fmt: skip
            assert (out[:, width:] == SENTINEL).all()
            p = p[:, : count * 64].astype(np.float64)
            values = [decode(page, d, **keyword) for page in pages]
            exact = before[:, :d] + p @ np.concatenate(values).astype(np.float64)
            sizes = [magnitude(name, "value", p, d, keyword.get("numbers")) for p in pages]
            size = np.abs(before[:, :d]) + p @ np.concatenate(sizes)
            # a product and a sum for each token's code and minimum; scales, and halves joined
            error = np.abs(out[:, :d] - exact)
            assert (error <= gamma(2 * 64 * count + 16) * size).all(), d


@pytest.mark.parametrize("group", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["q4_1"])
def test_a_heads_scores_and_mixture_are_the_same_in_every_group(name, group):
    """Heads that share a pass over a page do not notice each other."""
    rng, d = np.random.default_rng(group), 80
    x = values_of(ordinary, d, 3)
    keys, values = find(name).encode_keys(x), find(name).encode_values(x)
    q, p = (rng.standard_normal((n, w)).astype(np.float32) for n, w in ((4, d), (4, 64)))
    entries, none = np.array([values.ctypes.data], np.int64), np.zeros(1, np.float32)

    def results(n, first):
        mixed = np.zeros((n, 96), np.float32)
        call(name, "mix", p[first:], 256, entries, 1, 64, 64, d, mixed, 384, none, values, group=n)
        return call_scores(name, q[first:], keys, d, n, none), mixed

    together = results(group, 0)
    for head in range(group):
        for whole, part in zip(together, results(1, head), strict=True):
            np.testing.assert_array_equal(part[0], whole[head])


ON_THE_OLDEST_X86 = """
import pathlib, sys
sys.path[:0] = sys.argv[1:3]
import test_every_cache_kernel as contract
contract.jit_numba.set_cache_folder(pathlib.Path(sys.argv[3]))
contract.WIDTHS[:] = [40, 64]
both = contract.sides_of
for part in sys.argv[4:]:
    name, _, only = part.partition("-")
    contract.sides_of = lambda *args: [s for s in both(*args) if only in ("", s[0])]
    for kind in contract.KINDS:
        contract.test_encoded_pages_are_the_codecs(name, kind)
    contract.test_pages_are_read_as_the_codec_decodes_them(name)
    contract.test_every_code_is_read(name)
    if only != "value":
        contract.sides_of = both
        contract.test_scores_are_within_the_bound(name)
    if only != "key":
        contract.sides_of = both
        contract.test_mixtures_are_within_the_bound(name)
    print(part)
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="an x86 CPU is needed")
def test_kernels_run_on_the_oldest_x86(request):
    """A table, five bits, a float8: without F16C, AVX or even SSSE3's byte shuffles.

    The other side of two of them is in kernels/test_oldest_x86.py.
    """
    folder, names = Path(__file__).parent, ["iq4_nl-value", "q5_1-key", "fp8_e4m3"]
    environment = {**os.environ, "NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder.parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", ON_THE_OLDEST_X86, folder, folder.parent / "cache",
         request.config.cache.mkdir("pykv"), *names],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == names
