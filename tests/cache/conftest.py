"""Lets the tests of this folder import their helper module."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="module")
def _small_slabs():
    """Slabs of few pages, so that pools grow in tests."""
    from pykv.cache import pages

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "SLAB_BYTES", 1 << 14)
        yield
