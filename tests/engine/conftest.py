"""Loads small model files, written for the tests, through `pykv.load`."""

import importlib.util
import logging
import sys
from pathlib import Path

import pytest

import pykv

_spec = importlib.util.spec_from_file_location(
    "small_model", Path(__file__).parent / "small_model.py"
)
small_model = importlib.util.module_from_spec(_spec)
sys.modules["small_model"] = small_model  # so that the tests can import it
_spec.loader.exec_module(small_model)


@pytest.fixture(scope="session")
def small():
    """The module that writes the small models: their vocabulary, and what one recites."""
    return small_model


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """files(name, **how) -> a model file, written once; `how` is small_model.write_model's."""
    folder, made = tmp_path_factory.mktemp("small"), {}

    def get(**how):
        key = repr(sorted(how.items()))
        if key not in made:
            made[key] = small_model.write_model(folder / f"small-{len(made)}.gguf", **how)
        return made[key]

    return get


@pytest.fixture
def load(files):
    """load(cache=, temperature=0, file's and LoadConfig's settings) -> Model, closed afterwards."""
    opened = []

    def start(*, cache=None, temperature=0.0, seed=None, file=None, threads=1, **settings):
        how = {k: v for k, v in settings.items() if k in small_model.write_model.__kwdefaults__}
        rest = {k: v for k, v in settings.items() if k not in how}
        model = pykv.load(
            file or files(**how),
            cache=cache,
            load=pykv.LoadConfig(threads=threads, **rest),
            sampling=pykv.SamplingConfig(temperature=temperature, seed=seed),
        )
        opened.append(model)
        return model

    yield start
    for model in opened:
        model.close()


@pytest.fixture(autouse=True)
def _quiet_log():
    """pykv's log as a library leaves it."""
    logger = logging.getLogger("pykv")
    before = logger.level, logger.handlers[:], logger.propagate
    yield
    assert (logger.level, logger.handlers, logger.propagate) == before


@pytest.fixture
def plain(load, small):
    """A deterministic model whose answers can be tokenised in one way only."""
    return lambda **how: load(suppress=tuple(small.NOT_PLAIN), deterministic=True, **how)


@pytest.fixture
def fed(monkeypatch):
    """fed(model) -> a list to which every token that the model reads is added."""

    def watch(model):
        seen, real = [], model.step

        def step(batch, *rest):
            seen.extend(t for _, tokens in batch for t in tokens.tolist())
            return real(batch, *rest)

        monkeypatch.setattr(model, "step", step)
        return seen

    return watch
