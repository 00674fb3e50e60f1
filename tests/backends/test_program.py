"""Programs, their parameters and their memory."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from pykv.backends import program
from pykv.backends.program import SLACK, Arena, Buffer, Program, word


def lines_of(address, first, last):
    """Kernel, parameters' address and tasks of some program lines."""
    return [tuple(row[:3]) for row in table_of(address, last)[first:]]


def table_of(address, last):
    """All words of the lines before `last`."""
    table = np.frombuffer((ctypes.c_int64 * (8 * last)).from_address(address), np.int64)
    return table.reshape(-1, 8).tolist()


class Spy:
    """Takes the place of the crew."""

    def __init__(self):
        self.launches = []
        self.table = []

    def run(self, address, first, last):
        assert address % 64 == 0
        self.table = table_of(address, last)
        self.launches.append(lines_of(address, first, last))


def nothing():
    pass


def test_words_of_parameters():
    x = np.arange(3)
    memory = Arena().take(8)
    assert word(-7) == -7
    assert word(np.int32(9)) == 9
    assert word(1.5) == 0x3FC00000
    assert word(np.float32(1.5)) == word(np.float64(1.5)) == 0x3FC00000
    assert word(x) == x.ctypes.data
    assert word(Buffer(memory, (2,))) == memory.address


def test_lines_run_in_order_with_their_parameters():
    spy = Spy()
    p = Program(spy)
    a = p.add(11, 5, 1, 2.0)
    b = p.add(12, 1, np.arange(4))
    assert len(p) == 2
    p.run(nothing)
    assert spy.launches == [[(11, a.ctypes.data, 5), (12, b.ctypes.data, 1)]]
    assert a.tolist() == [1, 0x40000000]


def test_tasks_may_change_before_and_between_runs():
    spy = Spy()
    p = Program(spy)
    p.add(1, 5)
    p.add(2, 6)
    p.set_tasks(0, 7)
    p.run(nothing)
    p.set_tasks(1, 0)
    p.run(nothing)
    tasks = [[t for _, _, t in launch] for launch in spy.launches]
    assert tasks == [[7, 6], [7, 0]]


def test_launches_of_a_group_run_beside_its_first():
    spy, x, y = Spy(), object(), object()
    p = Program(spy)
    for kernel, group in enumerate((None, x, x, x, y, None, None, x, x)):
        p.add(kernel, 1, group=group)
    p.run(nothing)
    assert [row[5] for row in spy.table] == [0, 2, 0, 0, 0, 0, 0, 1, 0]


def test_shares_are_in_the_table_and_may_change():
    spy = Spy()
    p = Program(spy)
    p.add(1, 5)
    p.add(2, 6, share=4)
    p.run(nothing)
    assert [row[6] for row in spy.table] == [1, 4]
    p.set_tasks(1, 12, 7)
    p.run(nothing)
    assert [row[2:7:4] for row in spy.table] == [[5, 1], [12, 7]]


def test_no_slice_ends_inside_a_group(monkeypatch):
    monkeypatch.setattr(program, "SLICE_BYTES", 100)
    spy, x = Spy(), object()
    p = Program(spy)
    for kernel, (cost, group) in enumerate(
        [(10, None), (60, x), (60, x), (1, x), (99, None), (1, x), (0, x), (0, None)]
    ):
        p.add(kernel, 1, cost=cost, group=group)
    p.run(nothing)
    assert [[k for k, _, _ in launch] for launch in spy.launches] == [[0, 1, 2, 3], [4, 5, 6], [7]]


def test_an_empty_program_runs_nothing():
    spy = Spy()
    Program(spy).run(nothing)
    assert spy.launches == []


def test_costly_lines_end_a_slice_and_the_check_comes_before_each(monkeypatch):
    monkeypatch.setattr(program, "SLICE_BYTES", 100)
    spy, checks = Spy(), []
    p = Program(spy)
    for kernel, cost in ((1, 60), (2, 60), (3, 0), (4, 500), (5, 10)):
        p.add(kernel, 1, cost=cost)
    p.run(lambda: checks.append(len(spy.launches)))
    assert [[k for k, _, _ in launch] for launch in spy.launches] == [[1, 2], [3, 4], [5]]
    assert checks == [0, 1, 2]

    def stop():
        if len(spy.launches) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        p.run(stop)
    assert len(spy.launches) == 4


def test_memory_comes_back_when_the_last_reference_goes():
    arena = Arena()
    first = Buffer(arena.take(1000), (250,))
    view = first.reshape(10, -1)
    address = first.address
    del first
    assert arena.take(1000).address != address
    del view
    assert arena.take(1000).address == address


def test_blocks_are_aligned_and_have_slack():
    arena = Arena()
    for n in (1, 64, 4096 - SLACK, 4096, 100_001):
        memory = arena.take(n)
        assert memory.address % 64 == 0
        assert memory.block.nbytes >= n + SLACK


def test_buffers_are_arrays_of_their_shape():
    b = Buffer(Arena().take(24 * 4), (4, 6))
    b.array[...] = np.arange(24).reshape(4, 6)
    assert b.array.dtype == np.float32
    assert b.reshape(-1, 3, 2).shape == (4, 3, 2)
    np.testing.assert_array_equal(b.reshape(2, 12).array, np.arange(24).reshape(2, 12))


def test_parameters_that_are_arrays_stay_alive():
    p = Program(Spy())
    x = np.arange(5)
    ctx = p.add(1, 1, x)
    address = x.ctypes.data
    del x
    assert [np.frombuffer((ctypes.c_int64 * 5).from_address(address), np.int64).tolist()] == [
        [0, 1, 2, 3, 4]
    ]
    assert ctx[0] == address
    assert any(k.ctypes.data == address for k in p._keep if isinstance(k, np.ndarray))
