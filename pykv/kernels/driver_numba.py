"""Runs a program: a list of kernels, one after the other, each split into tasks.

A program is int64 [n, 6], a line each: address of the kernel, address of its parameters, number of
tasks, and three words that the driver counts in: tasks handed out, tasks done, unused. All threads
run through the whole program together, taking the next task of the line that is on; the line after
it is on when the last of its tasks is done. So a launch costs nothing, and nobody waits for a
thread that the operating system has set aside unless it holds a task. Which thread runs a task
never changes what it computes.
"""

from __future__ import annotations

import numba
from numba import prange, types

from pykv.kernels import jit_numba
from pykv.kernels.simd_control import (
    call_kernel,
    call_plain,
    fetch_add,
    load_acquire,
    store_release,
)
from pykv.kernels.simd_memory import (
    put_i64,
    scalar_i64,
)

ROW = 48  # bytes of one program line
PATIENCE = 4000  # looks at the line that is on before a thread offers its core to others


@jit_numba.device
def work(program, last, state, give_way, worker):
    """One thread's way through the program; `state` is the number of the line that is on."""
    while True:
        i = load_acquire(state)
        if i >= last:
            break
        line = program + i * ROW
        tasks, task = scalar_i64(line + 16), fetch_add(line + 24, 1)
        if task < tasks:
            call_kernel(scalar_i64(line), scalar_i64(line + 8), task, worker)
            if fetch_add(line + 32, 1) + 1 == tasks:
                store_release(state, i + 1)
        elif task == 0:
            store_release(state, i + 1)  # a line that has nothing to do this time
        else:
            # no `pause` here: a hypervisor that sees many takes the core away (pause-loop exiting),
            # which was measured to make a step half as long again
            looks = 0
            while load_acquire(state) == i:
                looks += 1
                if looks % PATIENCE == 0 and give_way != 0:
                    call_plain(give_way)


def run_program(program, first, last, threads, state, give_way):
    """Run lines `first` to `last` - 1 of the program at that address on `threads` threads.

    `state` is the address of an int64 to count in, `give_way` that of a C function that offers the
    core to other threads, or 0.
    """
    for i in range(first, last):
        put_i64(program + i * ROW + 24, 0)
        put_i64(program + i * ROW + 32, 0)
    store_release(state, first)
    if threads == 1:
        work(program, last, state, give_way, 0)
    else:
        for worker in prange(threads):
            work(program, last, state, give_way, worker)


SIGNATURE = types.void(*(types.intp,) * 6)


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
