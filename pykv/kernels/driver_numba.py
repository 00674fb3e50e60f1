"""Runs a program: a list of kernels, one after the other, each split into tasks.

A program is int64 [n, 4]: address of the kernel, address of its parameters, number of tasks, and a
word that the driver uses to hand out tasks. All threads take the next task from that counter, so
that a thread which the operating system has set aside costs the others one task and not a share of
the work. Which thread runs a task never changes what it computes.
"""

from __future__ import annotations

import numba
from numba import prange, types

from pykv.kernels import jit_numba
from pykv.kernels.simd import call_kernel, fetch_add, put_i64, scalar_i64

ROW = 32  # bytes of one program line


@jit_numba.device
def drain(line, tasks, worker):
    """Run tasks of one program line until none is left."""
    function, ctx = scalar_i64(line), scalar_i64(line + 8)
    while True:
        task = fetch_add(line + 24, 1)
        if task >= tasks:
            break
        call_kernel(function, ctx, task, worker)


def run_program(program, first, last, threads):
    """Run lines `first` to `last` - 1 of the program at that address on `threads` threads."""
    for i in range(first, last):
        line = program + i * ROW
        tasks = scalar_i64(line + 16)
        if tasks <= 1:
            # a program may hold lines that have nothing to do this time
            if tasks == 1:
                call_kernel(scalar_i64(line), scalar_i64(line + 8), 0, 0)
        else:
            put_i64(line + 24, 0)
            if threads == 1:
                drain(line, tasks, 0)
                continue
            for worker in prange(threads):
                drain(line, tasks, worker)


SIGNATURE = types.void(types.intp, types.intp, types.intp, types.intp)


def load():
    """Compile, or load, `run_program`."""
    return jit_numba.entry(run_program, "run_program", SIGNATURE, parallel=True)


def layer() -> str:
    """The threading layer in use: tbb, omp or workqueue; `none` before the first launch."""
    try:
        name: str = numba.threading_layer()
    except ValueError:
        return "none"
    return name
