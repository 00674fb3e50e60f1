"""Every task of a launch runs once, and launches run in order, whatever the threads."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

from pykv.backends.crew import Crew
from pykv.backends.program import Program
from pykv.kernels import jit_numba
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
def crews(driver):
    made = {threads: Crew(driver, threads) for threads in (1, 2, 5)}
    yield made
    for crew in made.values():
        crew.close()


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("tasks", [0, 1, 2, 3, 1000])
def test_every_task_runs_once(crews, threads, tasks):
    counters, workers = np.zeros(1001, np.int64), np.full(1001, -1)
    program = Program(crews[threads])
    program.add(jit_numba.kernel(count, "test_count").address, tasks, counters, workers)
    for times in (1, 2):
        program.run(lambda: None)
        assert (counters[:tasks] == times).all()
        assert not counters[tasks:].any()
    assert set(workers[:tasks].tolist()) <= set(range(threads))
    assert (workers[tasks:] == -1).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_launch_begins_when_the_one_before_has_ended(crews, threads):
    kernel, program = jit_numba.kernel(follow, "test_follow").address, Program(crews[threads])
    rows = np.zeros((30, 700), np.int64)
    for a, b in zip(rows, rows[1:], strict=False):
        program.add(kernel, 700, a, b, 700)
    for first in range(200):
        rows[0] = first
        if first % 10 == 0:
            time.sleep(0.01)  # the other threads go to sleep
        program.run(lambda: None)
        # 2 x + 1, 29 times
        assert (rows[29] == 2**29 * (first + 1) - 1).all()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_shares_groups_and_short_lines_run_every_task_in_order(crews, threads):
    """Lines of many sizes; each reads all of the line before its group, and no other."""
    rng = np.random.default_rng(7)
    kernel, program = jit_numba.kernel(follow, "test_follow").address, Program(crews[threads])
    # values double with each line and wrap around, as NumPy's do
    last, made = np.zeros(40, np.int64), []  # of the line that a group follows
    first, groups = last, [int(n) for n in rng.integers(1, 4, 60)]
    for size in groups:
        name = object() if size > 1 else None
        outs = [np.zeros(40, np.int64) for _ in range(size)]
        for out in outs:
            tasks, share = int(rng.choice([0, 1, 7, 40])), int(rng.choice([1, 3, 40, 100]))
            if out is outs[-1]:
                tasks = 40
            program.add(kernel, tasks, last, out, tasks, share=share, group=name)
            made.append((last, out, tasks))
        last = outs[-1]
    for start in range(100):
        first[:] = np.arange(40) * start
        for _, out, _ in made:
            out[:] = -1
        program.run(lambda: None)
        for source, out, tasks in made:
            np.testing.assert_array_equal(out[:tasks], 2 * source[:tasks][::-1] + 1)
            assert (out[tasks:] == -1).all()


def test_python_work_runs_on_every_thread_between_programs(crews):
    crew, counters = crews[5], np.zeros(9, np.int64)
    program = Program(crew)
    program.add(jit_numba.kernel(count, "test_count").address, 9, counters, counters.copy())
    for times in range(1, 50):
        seen = []
        crew.call(seen.append)
        assert sorted(seen) == [0, 1, 2, 3, 4]
        program.run(lambda: None)
        assert (counters == times).all()


@pytest.mark.parametrize("bad", [0, 3])
def test_an_error_in_one_thread_is_the_callers_after_all_have_ended(crews, bad):
    ended = []

    def work(worker):
        if worker == bad:
            raise ValueError("worker")
        time.sleep(0.02)
        ended.append(worker)

    with pytest.raises(ValueError, match="worker"):
        crews[5].call(work)
    assert sorted(ended) == [n for n in range(5) if n != bad]
    crews[5].call(ended.append)
    assert sorted(ended[4:]) == [0, 1, 2, 3, 4]


def test_threads_end_with_their_crew(crews, driver):
    def living():
        return [t for t in threading.enumerate() if t.name.startswith("pykv-")]

    before = len(living())
    closed, dropped = Crew(driver, 3), Crew(driver, 3)
    for crew in (closed, dropped):
        crew.call(lambda worker: None)
    assert len(living()) == before + 4
    closed.close()
    del crew, dropped
    deadline = time.monotonic() + 10
    while len(living()) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(living()) == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own(crews):
    crew = crews[2]
    crew.call(lambda worker: None)
    child = os.fork()
    if child == 0:
        seen = []
        crew.call(seen.append)
        os._exit(len(seen))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
