"""New layouts of a head's cells, and what moving tokens does to them in every cache format."""

from __future__ import annotations

import numpy as np
import pytest
from page_oracle import SIDES, decode, encode
from page_values import numbers_of

from pykv.backends.base import PAGE
from pykv.cache.layout import cache_types
from pykv.cache.rearrange import closed, followed, gathered
from pykv.formats.coded import find

D = 40
BY_CHANNEL = ("kivi2", "kivi3", "kivi4")  # their keys' scales go over 32 tokens


def layout_of(layout, live, full):
    """A layout's cells, without what only fills up."""
    pages, alive, tail = layout
    cells = np.concatenate([pages[alive], tail[live[tail]]])
    assert sorted(cells) == np.flatnonzero(live).tolist()  # each live cell once
    assert all((live[page[a]]).all() for page, a in zip(pages, alive, strict=True))
    assert pages.shape == alive.shape == (len(pages), PAGE)
    return pages, alive, tail


@pytest.mark.parametrize("seed", range(20))
def test_closing_leaves_few_holes_and_moves_few_cells(seed):
    rng = np.random.default_rng(seed)
    full, n_tail = int(rng.integers(0, 6)), int(rng.integers(0, 130))
    live = rng.random(full * PAGE + n_tail) < rng.uniform(0.2, 1)
    pages, alive, tail = layout_of(closed(live, full, 100), live, full)
    assert alive.size - np.count_nonzero(alive) < PAGE
    assert live[tail].all()
    n = np.count_nonzero(live[full * PAGE :])
    assert len(tail) == (n - PAGE if n >= 100 else n)
    # only cells of pages that go are moved
    old = pages[: len(pages) - (n >= 100)]
    stay = {c // PAGE for c in old.flat if (old == c // PAGE * PAGE).any()}
    moved = sum(c != i + c // PAGE * PAGE for page in old for i, c in enumerate(page))
    gone = np.count_nonzero(live[: full * PAGE]) - sum(
        np.count_nonzero(live[p * PAGE : p * PAGE + PAGE]) for p in stay
    )
    assert moved <= gone + PAGE * len(old)
    assert len(old) == full - (full * PAGE - np.count_nonzero(live[: full * PAGE])) // PAGE


@pytest.mark.parametrize("seed", range(20))
def test_gathering_leaves_no_holes_but_at_the_end_and_keeps_the_order(seed):
    rng = np.random.default_rng(seed)
    full, n_tail = int(rng.integers(0, 6)), int(rng.integers(0, 130))
    live = rng.random(full * PAGE + n_tail) < rng.uniform(0.01, 1)
    pages, alive, tail = layout_of(gathered(live, full), live, full)
    kept = np.flatnonzero(live)
    assert np.concatenate([pages[alive], tail]).tolist() == kept.tolist()
    assert len(pages) == -(-np.count_nonzero(live[: full * PAGE]) // PAGE)


@pytest.mark.parametrize("full", [0, 1, 3])
@pytest.mark.parametrize("dropped", [0, 5, 64, 100, 130])
def test_where_the_oldest_go_no_cell_changes_its_slot(full, dropped):
    live = np.ones(PAGE * full + 150, bool)
    live[:dropped] = False
    pages, alive, tail = layout_of(followed(live, full, 64), live, full)
    used = np.concatenate([alive.reshape(-1), live[tail]])
    cells = np.concatenate([pages.reshape(-1), tail])
    first = dropped // PAGE * PAGE
    assert len(cells) == len(live) - first
    assert (cells - np.arange(len(cells)) == first)[used].all()
    rest = len(live) - max(full * PAGE, first) - max(dropped - max(full * PAGE, first), 0)
    assert len(pages) == max(full - first // PAGE, 0) + (rest >= 64)


def closings(name, side, rounds, offsets, seed=0, kept=4 * PAGE):
    """Live cells after each closing, as first encoded, as they lie, and as they were; f32 [n, D].

    A page joins, and as many random cells go, outside the newest page.
    """
    rng = np.random.default_rng(seed)
    numbers = numbers_of(name, SIDES[side], D)
    format_, key = find(name), {} if numbers is None else {"numbers": numbers}
    shift = rng.normal(0, offsets, D) if offsets else 0

    def fresh():
        x = (rng.normal(0, 1, (PAGE, D)) + shift).astype(np.float32)
        return x, decode(format_, side, encode(format_, side, x, **key), D, **key)

    x, first = (
        np.concatenate(y) for y in zip(*(fresh() for _ in range(kept // PAGE)), strict=True)
    )
    now, live = first.copy(), np.ones(kept, bool)
    for _ in range(rounds):
        more, coded = fresh()
        x, first, now = (np.concatenate(y) for y in ((x, more), (first, coded), (now, coded)))
        live = np.concatenate([live, np.ones(PAGE, bool)])
        old = np.flatnonzero(live[:-PAGE])
        live[rng.permutation(old)[: np.count_nonzero(live) - kept]] = False
        pages, alive, _ = closed(live, len(live) // PAGE, 1 << 30)
        for page in pages:
            if (page != page[0] + np.arange(PAGE)).any() or page[0] % PAGE:
                again = decode(format_, side, encode(format_, side, now[page], **key), D, **key)
                now[page] = again
        # each page's cells where they lie now
        x, first, now = (y[pages.reshape(-1)] for y in (x, first, now))
        live = alive.reshape(-1)
    return first[live], now[live], x[live]


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", cache_types())
def test_moving_is_exact_where_scales_belong_to_one_token(name, side):
    for offsets in (0, 3):
        first, now, x = closings(name, side, 5, offsets)
        if name in BY_CHANNEL and side == 0:
            assert (first != now).any()
            continue
        assert first.tobytes() == now.tobytes()


@pytest.mark.parametrize("offsets", [0, 3])
@pytest.mark.parametrize(
    ("name", "once", "ten"), [("kivi2", 0.39, 0.62), ("kivi3", 0.17, 0.28), ("kivi4", 0.078, 0.13)]
)
def test_what_moving_costs_where_scales_go_over_tokens(name, once, ten, offsets):
    """The figures of rearrange.py's docstring."""
    first, now, x = closings(name, 0, 10, offsets)
    size = np.linalg.norm(x - (x.mean(0) if offsets else 0))
    assert np.linalg.norm(first - x) / size == pytest.approx(once, rel=0.05)
    assert np.linalg.norm(now - x) / size == pytest.approx(ten, rel=0.05)
