"""Where `truncate` stops, in numbers, and against trying every length."""

from __future__ import annotations

import pytest
from store_oracle import fill, oracle

from pykv.backends.base import LayerShape


def cut(formats, sinks, residual, tokens, n, window=0):
    o = oracle(formats, sinks, residual, [LayerShape(1, 1, 4, 4, window)])
    sequence = fill(o, tokens)
    m = o.truncate(sequence, n)
    o.check()
    o.write({sequence: o.tokens(90)})
    o.check()
    return m


@pytest.mark.parametrize(
    ("residual", "tokens", "n", "m"),
    [
        # sinks 4: pages end at 68, 132, 196; at residual 0 a page is encoded as it ends
        (0, 200, 200, 200),
        (0, 200, 500, 200),
        (0, 200, 196, 196),  # three encoded pages end at 196
        (0, 200, 195, 132),  # in the third: back to its start
        (0, 200, 133, 132),
        (0, 200, 132, 132),
        (0, 200, 5, 4),
        (0, 200, 4, 4),
        (0, 200, 3, 3),  # in the sinks
        (0, 200, 0, 0),
        (0, 67, 20, 20),  # nothing is encoded yet
        # residual 64: a page is encoded once 64 tokens follow it
        (64, 200, 196, 196),  # pages end at 68 and 132, and 132 + 64 <= 196
        (64, 200, 195, 4),  # the second page would be exact, and that is gone
        (64, 200, 4, 4),
        (64, 200, 2, 2),
        (64, 131, 90, 90),  # nothing is encoded yet
        (64, 132, 131, 4),
        (64, 150, 133, 133),
    ],
)
def test_truncate_stops_where_the_design_says(residual, tokens, n, m):
    assert cut(("f16", "f16", "f32"), 4, residual, tokens, n) == m


@pytest.mark.parametrize(("n", "m"), [(199, 199), (100, 100), (4, 4), (1, 1), (0, 0)])
def test_truncate_stops_anywhere_in_exact_pages(n, m):
    assert cut(("f16", "f16", None), 4, 0, 200, n) == m


@pytest.mark.parametrize(
    ("formats", "n", "m"),
    [
        # Window 40, 200 tokens: the next query sees 161 to 200, so pages up to 132 are gone. From
        # n on, the first to be seen is n - 39.
        (("f16", "f16", None), 180, 180),
        (("f16", "f16", None), 171, 171),  # 132 is the first of its page
        (("f16", "f16", None), 170, 0),  # 131 was let go of
        (("f16", "f16", "f32"), 197, 197),
        (("f16", "f16", "f32"), 190, 0),  # would be 132, which sees 93
    ],
)
def test_truncate_under_a_window(formats, n, m):
    assert cut(formats, 4, 0, 200, n, window=40) == m


@pytest.mark.parametrize("residual", [0, 1, 63, 64, 65, 130])
@pytest.mark.parametrize("sinks", [0, 3])
def test_truncate_agrees_with_trying_every_length(residual, sinks):
    o = oracle(("bf16", "f16", "f16"), sinks, residual, [LayerShape(1, 1, 1, 1)])
    whole = fill(o, 250)
    for n in (0, 1, 2, 3, 4, 64, 66, 67, 68, 130, 131, 132, 150, 192, 194, 195, 196, 249):
        o.truncate(o.fork(whole), n)
    o.check()
