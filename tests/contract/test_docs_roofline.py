"""docs/gpu-roofline.md: `python docs/generate_roofline.py` writes it."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from pykv.cache.store import Store
from pykv.config import CacheConfig

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def roofline():
    spec = importlib.util.spec_from_file_location("roofline", DOCS / "generate_roofline.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["roofline"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules["roofline"]


def test_the_page_is_up_to_date(roofline):
    written = (DOCS / "gpu-roofline.md").read_text(encoding="utf-8")
    assert roofline.page() == written, "run python docs/generate_roofline.py"


@pytest.mark.parametrize("type_", ["f16", "q8_0", "q4_0", "kivi2"])
@pytest.mark.parametrize("tokens", [3, 68, 69, 1000, 8192])
def test_pages_are_those_that_a_store_holds(roofline, type_, tokens):
    store = Store([roofline.SHAPE], CacheConfig(type_, type_), 10_000)
    store.begin([(store.new_sequence(), np.zeros(tokens, np.int32))], np.zeros(1, np.int32))
    store.commit()
    (sequence,) = store._sequences.values()
    held = store.nbytes - sequence.tables.nbytes
    assert roofline.moved(type_, tokens).pages == roofline.LAYERS * held
    entries = np.count_nonzero(sequence.tables)
    assert roofline.moved(type_, tokens).tables == roofline.LAYERS * entries * 8


def test_a_few_figures_by_hand(roofline):
    f16, q8_0 = (roofline.moved(type_, 131_072) for type_ in ("f16", "q8_0"))
    # 64 layers and sides of 8 heads: 128 channels of 2 bytes in 2,048 pages (131,068 tokens) and
    # 16 slots of sinks
    assert f16.pages == 64 * 8 * 256 * (2048 * 64 + 16)
    # 2,047 pages full of codes, 34 bytes for 32 values, and 60 tokens in a page of halves
    assert q8_0.pages == 64 * 8 * 128 * (2047 * 64 * 34 // 32 + (64 + 16) * 2)
    assert f16.new == 64 * 8 * 256
    assert q8_0.new == 64 * 8 * (256 + 256 + 128 * 34 // 32)
    # 2,049 entries are 257 chunks; each is written and read
    assert f16.partials == q8_0.partials == 2 * 32 * 32 * 257 * (128 + 2) * 4


def test_all_fit_in_the_smaller_card_as_the_page_says(roofline):
    largest = roofline.moved("f16", 131_072)
    assert largest.pages + largest.tables + roofline.weights()[0] < 24e9


def test_the_weights_are_those_of_a_q4_k_m_file(roofline):
    held, read = roofline.weights()
    # such files are 4.92 GB, of which a vocabulary of 128,256 tokens and its merges are some MB
    assert 4.905e9 < held < 4.92e9
    assert held - read == (128_256 - 1) * 4096 // 256 * 144
