"""Kernels that every run compiles for GPUs: in the background, while other tests run.

Compiling takes minutes of one core, which the tests leave free for most of the time.
"""

from __future__ import annotations

import pytest
from aot_kernels import OFTEN, Compilation

FIXTURE = "of_every_run"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session, config, items):
    """Tests of what compiles in the background come last, if others give it time."""
    waiting = [item for item in items if FIXTURE in getattr(item, "fixturenames", ())]
    others = [item for item in items if FIXTURE not in getattr(item, "fixturenames", ())]
    if waiting and len(others) > len(waiting) and not config.option.collectonly:
        items[:] = others + waiting
        folder = config._tmp_path_factory.mktemp("kernels")
        session.kernels = Compilation(OFTEN, folder, 1, nice=10)


def pytest_sessionfinish(session):
    """Nothing is left running."""
    if hasattr(session, "kernels"):
        session.kernels.stop()


@pytest.fixture(scope="session")
def of_every_run(request, tmp_path_factory):
    """What the compiler says of each kernel that every run compiles."""
    running = getattr(request.session, "kernels", None)
    if running is None:
        running = Compilation(OFTEN, tmp_path_factory.mktemp("kernels"))
    try:
        return running.result()
    finally:
        running.stop()
