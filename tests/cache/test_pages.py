"""Pools of pages against a plain count of who holds what."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pykv.cache import pages
from pykv.cache.pages import ALIGN, HostMemory, PagePool


@pytest.fixture(autouse=True, scope="module")
def _small_slabs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "SLAB_BYTES", 1024)
        yield


class Books(RuleBasedStateMachine):
    """Takes, holds and drops pages, and counts the holders of each."""

    @initialize(n_bytes=st.sampled_from([64, 192, 1024, 4096]))
    def start(self, n_bytes):
        self.memory = HostMemory(255)
        self.pool = PagePool(n_bytes, self.memory)
        self.holders: dict[int, int] = {}

    @rule(count=st.integers(0, 40))
    def take(self, count):
        taken = self.pool.take(count).tolist()
        assert len(taken) == count
        for address in taken:
            assert address not in self.holders
            assert address % ALIGN == 0
            self.holders[address] = 1

    def some(self, data, *, unique):
        """Held pages, and address 0; drawn by number, since addresses differ from run to run."""
        order = [0, *self.holders]
        numbers = st.integers(0, len(order) - 1)
        drawn = data.draw(st.lists(numbers, max_size=40, unique=unique))
        return np.array([order[i] for i in drawn], np.int64)

    @rule(data=st.data())
    def hold(self, data):
        addresses = self.some(data, unique=False)
        self.pool.hold(addresses)
        for address in addresses[addresses > 0].tolist():
            self.holders[address] += 1

    @rule(data=st.data())
    def drop(self, data):
        addresses = self.some(data, unique=True)
        self.pool.drop(addresses)
        for address in addresses[addresses > 0].tolist():
            self.holders[address] -= 1
            if not self.holders[address]:
                del self.holders[address]

    @invariant()
    def counts_are_right(self):
        if not hasattr(self, "pool"):
            return
        assert self.pool.in_use == len(self.holders)
        assert all(self.pool.shared(a) == (n > 1) for a, n in self.holders.items())
        ends = sorted(self.holders)
        assert all(b - a >= self.pool.page_bytes for a, b in zip(ends, ends[1:], strict=False))
        assert self.memory.reserved_bytes >= len(self.holders) * self.pool.page_bytes


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_a_page_handed_out_again_is_one_that_was_given_back():
    pool = PagePool(256, HostMemory(255))
    first = pool.take(8)
    pool.drop(first[2:4])
    assert set(pool.take(2).tolist()) == set(first[2:4].tolist())


def test_a_shared_page_survives_one_drop_and_not_two():
    pool = PagePool(64, HostMemory())
    page = pool.take(1)
    pool.hold(page)
    pool.drop(page)
    assert (pool.in_use, pool.shared(int(page[0]))) == (1, False)
    assert page[0] not in pool.take(40)
    pool.drop(page)
    assert pool.in_use == 40
    assert page[0] in pool.take(1)


def test_fresh_bytes_hold_the_fill_and_slabs_stay():
    pool = PagePool(64, HostMemory(255))
    page = int(pool.take(1)[0])
    assert ctypes.string_at(page, 64) == b"\xff" * 64
    ctypes.memset(page, 7, 64)
    pool.take(200)
    assert ctypes.string_at(page, 64) == b"\x07" * 64


def test_reserved_bytes_are_those_of_the_slabs():
    memory = HostMemory()
    pool = PagePool(192, memory)
    assert memory.reserved_bytes == 0
    pool.take(1)  # 5 pages of 192 bytes in 1,024, and room to align
    assert memory.reserved_bytes == 5 * 192 + ALIGN
    pool.take(5)
    assert memory.reserved_bytes == 2 * (5 * 192 + ALIGN)
    pool.take(16)  # 4 are left, so 12 more: three slabs' worth in one piece
    assert memory.reserved_bytes == 2 * (5 * 192 + ALIGN) + 15 * 192 + ALIGN
