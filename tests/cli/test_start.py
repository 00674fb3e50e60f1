"""Ctrl-C while modules are still being imported."""

import subprocess
import sys

import pytest

CODE = """
import builtins, os, signal

real = builtins.__import__


def importing(name, *args, **kwargs):
    if name == {module!r}:
        builtins.__import__ = real
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *args, **kwargs)


builtins.__import__ = importing
from pykv.cli._start import main

raise SystemExit(main())
"""


@pytest.mark.parametrize("module", ["pykv.cli.app", "typer"])
def test_an_early_interrupt_says_nothing(module):
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(module=module), "--version"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
