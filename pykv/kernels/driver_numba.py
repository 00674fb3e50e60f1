"""Runs a program: a list of kernels, one after the other, each split into tasks.

A program is int64 [n, 8], a line each: address of the kernel, address of its parameters, number of
tasks, two words that the driver counts in (shares handed out, shares done), the number of lines
that follow it and run beside it, tasks in a share, and one word of nothing, so that a line has a
cache line of its own. All threads run through the whole program together, taking the next share of
the line that is on, and of those beside it; the line after them is on when the last of their tasks
is done. So a launch costs nothing, and nobody waits for a thread that the operating system has set
aside unless it is in the program. A line of one share is run by the thread that ended the line
before it, since handing it out takes longer than most such lines. Which thread runs a task never
changes what it computes.

The thread that has a program posts it in a mailbox, int64 [MAIL_WORDS], and other threads that look
there join in. The ticket is odd while a program is open to them, and is never the same for two.
"""

from __future__ import annotations

from numba import types

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

ROW = 64  # bytes of one program line
# its words, in bytes
KERNEL_AT, PARAMS_AT, TASKS_AT, GIVEN_AT, DONE_AT, BESIDE_AT, SHARE_AT = 0, 8, 16, 24, 32, 40, 48
PATIENCE = 4000  # looks at a word before a thread offers its core to others
LINGER = 400  # offers, a few microseconds each, before a thread stops looking for a program

# the mailbox, in bytes; words that different threads write have a cache line each
TICKET_AT, LINE_AT, INSIDE_AT, LEAVE_AT, PROGRAM_AT, LAST_AT = 0, 64, 128, 192, 256, 264
MAIL_WORDS = 40


@jit_numba.device
def shares(line):
    """How many times something of a line is handed out."""
    share = scalar_i64(line + SHARE_AT)
    return (scalar_i64(line + TASKS_AT) + share - 1) // share


@jit_numba.device
def run_share(line, number, worker):
    """Run one share of the line's tasks."""
    share = scalar_i64(line + SHARE_AT)
    end = min((number + 1) * share, scalar_i64(line + TASKS_AT))
    for task in range(number * share, end):
        call_kernel(scalar_i64(line + KERNEL_AT), scalar_i64(line + PARAMS_AT), task, worker)


@jit_numba.device
def run_short_lines(program, i, last, worker):
    """Run line i and those after it while each has one share at most; returns the next line."""
    while i < last:
        line = program + i * ROW
        count = shares(line)
        if count > 1 or scalar_i64(line + BESIDE_AT) != 0:
            break
        if count == 1:
            run_share(line, 0, worker)
        i += 1
    return i


@jit_numba.device
def work(program, last, state, give_way, worker):
    """One thread's way through the program; `state` is the number of the line that is on."""
    while True:
        i = load_acquire(state)
        if i >= last:
            break
        line = program + i * ROW
        after = i + 1 + scalar_i64(line + BESIDE_AT)
        total = 0
        for j in range(i, after):
            total += shares(program + j * ROW)
        number = fetch_add(line + GIVEN_AT, 1)
        ended = total == 0 and number == 0  # lines that have nothing to do this time
        while number < total:
            j = line
            while number >= shares(j):
                number -= shares(j)
                j += ROW
            run_share(j, number, worker)
            ended = fetch_add(line + DONE_AT, 1) + 1 == total
            number = total if ended else fetch_add(line + GIVEN_AT, 1)
        if ended:
            store_release(state, run_short_lines(program, after, last, worker))
            continue
        # no `pause` here: a hypervisor that sees many takes the core away (pause-loop exiting),
        # which was measured to make a step half as long again
        looks = 0
        while load_acquire(state) == i:
            looks += 1
            if looks % PATIENCE == 0 and give_way != 0:
                call_plain(give_way)


def run_program(mail, program, first, last, give_way):
    """Run lines `first` to `last` - 1 of the program at that address, with whoever joins in.

    `mail` is the mailbox's address, `give_way` that of a C function that offers the core to other
    threads, or 0.
    """
    for i in range(first, last):
        put_i64(program + i * ROW + GIVEN_AT, 0)
        put_i64(program + i * ROW + DONE_AT, 0)
    put_i64(mail + PROGRAM_AT, program)
    put_i64(mail + LAST_AT, last)
    store_release(mail + LINE_AT, first)
    fetch_add(mail + TICKET_AT, 1)
    work(program, last, mail + LINE_AT, give_way, 0)
    fetch_add(mail + TICKET_AT, 1)
    # the program may be changed, or its memory given back, once this returns
    looks = 0
    while load_acquire(mail + INSIDE_AT) != 0:
        looks += 1
        if looks % PATIENCE == 0 and give_way != 0:
            call_plain(give_way)


def serve_programs(mail, worker, give_way):
    """Join in every program that is posted, until none has come for a while.

    Returns the number of programs posted that it knows of.
    """
    seen, looks, offers = 0, 0, 0
    while offers < LINGER and load_acquire(mail + LEAVE_AT) == 0:
        ticket = load_acquire(mail + TICKET_AT)
        if ticket != seen:
            if ticket % 2:
                fetch_add(mail + INSIDE_AT, 1)
                # it may have ended before its owner could see that somebody is inside
                if load_acquire(mail + TICKET_AT) == ticket:
                    work(
                        scalar_i64(mail + PROGRAM_AT), scalar_i64(mail + LAST_AT), mail + LINE_AT,
                        give_way, worker,
                    )  # fmt: skip
                fetch_add(mail + INSIDE_AT, -1)
            seen, offers, looks = ticket, 0, 0
        looks += 1
        if looks % PATIENCE == 0:
            offers += 1
            if give_way != 0:
                call_plain(give_way)
    return (seen + 1) // 2


RUN = types.void(*(types.intp,) * 5)
SERVE = types.intp(*(types.intp,) * 3)


def load():
    """Compile, or load, `run_program` and `serve_programs`."""
    return (
        jit_numba.entry(run_program, "run_program", RUN),
        jit_numba.entry(serve_programs, "serve_programs", SERVE),
    )
