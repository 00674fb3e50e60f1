"""Every task of a launch runs once, and launches run in order, whatever the threads."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.backends.program import Program
from pykv.backends.threads import give_way_address, load_tbb
from pykv.kernels import driver_numba, jit_numba
from pykv.kernels.simd_control import (
    fetch_add,
)
from pykv.kernels.simd_memory import (
    put_i64,
    scalar_i64,
)


# ctx: counters int64 [tasks], workers int64 [tasks]
def count(ctx, task, worker):
    fetch_add(scalar_i64(ctx) + task * 8, 1)
    put_i64(scalar_i64(ctx + 8) + task * 8, worker)


# ctx: x, y, tasks: y[task] = 2 * x[tasks - 1 - task] + 1
def follow(ctx, task, worker):
    other = scalar_i64(ctx + 16) - 1 - task
    put_i64(scalar_i64(ctx + 8) + task * 8, 2 * scalar_i64(scalar_i64(ctx) + other * 8) + 1)


@pytest.fixture(scope="module")
def run():
    load_tbb()
    driver, give_way = driver_numba.load(), give_way_address()
    return lambda *where: driver(*where, give_way)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("tasks", [0, 1, 2, 3, 1000])
def test_every_task_runs_once(run, threads, tasks):
    counters, workers = np.zeros(1001, np.int64), np.full(1001, -1)
    program = Program(run, threads)
    program.add(jit_numba.kernel(count, "test_count").address, tasks, counters, workers)
    for times in (1, 2):
        program.run(lambda: None)
        assert (counters[:tasks] == times).all()
        assert not counters[tasks:].any()
    assert set(workers[:tasks].tolist()) <= set(range(threads))
    assert (workers[tasks:] == -1).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_launch_begins_when_the_one_before_has_ended(run, threads):
    kernel, program = jit_numba.kernel(follow, "test_follow").address, Program(run, threads)
    rows = np.zeros((30, 700), np.int64)
    for a, b in zip(rows, rows[1:], strict=False):
        program.add(kernel, 700, a, b, 700)
    for first in range(20):
        rows[0] = first
        program.run(lambda: None)
        # 2 x + 1, 29 times
        assert (rows[29] == 2**29 * (first + 1) - 1).all()


def test_the_layer_is_one_of_numbas(run):
    counters = np.zeros(2, np.int64)
    program = Program(run, 2)
    program.add(jit_numba.kernel(count, "test_count").address, 2, counters, counters.copy())
    program.run(lambda: None)
    assert driver_numba.layer() in ("tbb", "omp", "workqueue")
