"""A terminal of its own for a program, and hands that type there."""

import os
import select
import time

# readline shows its prompt a moment before it listens for signals, and nobody types that fast
PAUSE = 0.3  # seconds


class Terminal:
    """The program at a terminal of its own, where Ctrl-C is a byte."""

    def __init__(self, process, *args):
        import pty  # Windows has none

        self.master, slave = pty.openpty()
        self.program = process(
            *args, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.seen = ""

    def until(self, text, seconds=15):
        """Reads until `text` was shown; what came before it is forgotten."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            left = end - time.monotonic()
            assert left > 0, f"{text!r} was not shown, but {self.seen!r}"
            if select.select([self.master], [], [], min(left, 0.2))[0]:
                try:
                    self.seen += os.read(self.master, 65536).decode()
                except OSError:  # Linux: the program has left
                    self.seen += "<left>"
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, data):
        os.write(self.master, data)

    def close(self):
        self.program.kill()
        self.program.wait()
        os.close(self.master)
