"""The threads of a CPU backend: they run programs together, and Python's work too.

A thread that has just run a program looks for the next one for a while before it goes to sleep:
a step of decoding is followed by another within a millisecond, and waking a thread costs half of
that. Looking happens outside Python's lock and offers the core to others now and then.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pykv.backends.base import I64


@dataclass(frozen=True)
class Driver:
    """The compiled functions of kernels/driver_numba.py, and the system's that offers the core."""

    run: Callable[[int, int, int, int, int], None]
    serve: Callable[[int, int, int], int]
    give_way: int
    mail_words: int  # int64 words of a mailbox
    ticket: int  # the word that counts programs, twice
    leave: int  # the word that calls threads back to Python

    def run_here(self, line: I64) -> None:
        """Run a program of one line, int64 [8], on the calling thread, which may be any."""
        mail = np.zeros(self.mail_words, np.int64)
        self.run(int(mail.ctypes.data), int(line.ctypes.data), 0, 1, 0)


class _Shared:
    """What the threads see; they must not keep the crew itself alive."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        raw = np.zeros(driver.mail_words + 8, np.int64)
        start = -raw.ctypes.data % 64 // 8  # cache lines of its own
        self.mail: I64 = raw[start : start + driver.mail_words]
        self.bell = threading.Condition()
        self.programs = 0  # handed out so far
        self.work: Callable[[int], None] | None = None  # of Python
        self.calls = 0  # pieces of Python's work handed out so far
        self.busy = 0  # threads that have not done with it
        self.error: BaseException | None = None
        self.asleep = 0
        self.closed = False

    def close(self) -> None:
        with self.bell:
            self.closed = True
            self.mail[self.driver.leave] = 1
            self.bell.notify_all()


def _live(shared: _Shared, worker: int) -> None:
    """A thread's life."""
    programs = calls = 0
    address = int(shared.mail.ctypes.data)
    while True:
        with shared.bell:
            while not shared.closed and shared.programs == programs and shared.calls == calls:
                shared.asleep += 1
                shared.bell.wait()
                shared.asleep -= 1
            if shared.closed:
                return
            work, called = shared.work, shared.calls != calls
            calls = shared.calls
        if called and work is not None:
            _do(shared, work, worker)
        else:
            programs = shared.driver.serve(address, worker, shared.driver.give_way)


def _do(shared: _Shared, work: Callable[[int], None], worker: int) -> None:
    error: BaseException | None = None
    try:
        work(worker)
    except BaseException as raised:  # the caller's thread raises it
        error = raised
    with shared.bell:
        shared.error = shared.error or error
        shared.busy -= 1
        if shared.busy == 0:
            shared.bell.notify_all()


class Crew:
    """`threads` threads, the caller's among them; one caller at a time."""

    def __init__(self, driver: Driver, threads: int) -> None:
        self.threads, self._driver = threads, driver
        self._process = 0
        self._begin()

    def _begin(self) -> None:
        self._shared = _Shared(self._driver)
        self._mail = int(self._shared.mail.ctypes.data)
        self.close = weakref.finalize(self, self._shared.close)  # lets the threads end

    def _start(self) -> _Shared:
        """Start the threads, and again in a forked process, which has none of them."""
        if self.threads > 1 and self._process != os.getpid():
            if self._process:
                self._begin()
            self._process = os.getpid()
            for worker in range(1, self.threads):
                # a daemon: a program that ends need not close its models first
                threading.Thread(
                    target=_live, args=(self._shared, worker), name=f"pykv-{worker}", daemon=True
                ).start()
        return self._shared

    def run(self, program: int, first: int, last: int) -> None:
        """Run lines `first` to `last` - 1 of the program at that address."""
        shared, driver = self._start(), self._driver
        try:
            if self.threads > 1:
                with shared.bell:
                    shared.programs += 1
                    if shared.asleep:
                        shared.bell.notify_all()
            driver.run(self._mail, program, first, last, driver.give_way)
        finally:
            # an interrupt may have come before the program was posted
            shared.programs = int(shared.mail[driver.ticket]) // 2

    def call(self, work: Callable[[int], None]) -> None:
        """Run `work(worker)` on every thread; returns, or raises, when all have ended."""
        shared, leave = self._start(), self._driver.leave
        interrupt: BaseException | None = None
        try:
            with shared.bell:
                shared.work, shared.error = work, None
                shared.calls += 1
                shared.busy = self.threads - 1
                shared.mail[leave] = 1
                shared.bell.notify_all()
            work(0)
        finally:
            # whatever happened, nobody may touch the caller's arrays after this call
            with shared.bell:
                while shared.busy:
                    try:
                        shared.bell.wait()
                    except KeyboardInterrupt as raised:
                        interrupt = raised
                shared.work = None
                shared.mail[leave] = 0
        error = interrupt or shared.error
        if error is not None:
            raise error
