"""What `lowrank:R` does to attention: nothing where R is the head's width, less the larger R is."""

from pathlib import Path

import numpy as np
import pytest

import pykv
from pykv.config import CacheConfig
from pykv.engine import calibration, kv_report
from pykv.engine.calibrate import calibrate
from pykv.gguf import open_gguf

ROOT = Path(__file__).resolve().parents[2]
# an orthogonal map there and back rounds each value by some 2**-24, and sums and exp pass it on
WHOLE = 1e-5


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch, tmp_path):
    """Calibration files of this test only."""
    monkeypatch.setattr(calibration, "folder", lambda: tmp_path / "calibration")


def calibrated(model, text, ctx_size):
    with open_gguf(model.path) as file:
        owner = calibration.identity(file, model.store.shapes)
    (made,) = calibrate(model, text, ["lowrank"], ctx_size, 1)
    calibration.write(made, owner)


def errors(model, text, side, rank, ctx_size):
    """Each head's error with that side's pages of rank R in float32, f64 [layers * G]."""
    cache = CacheConfig(residual=0, **{f"transform_{side}": f"lowrank:{rank}"})
    part = "keys" if side == "k" else "values"
    made = kv_report.measure(model, text, ["f32"], cache, ctx_size=ctx_size)
    return np.concatenate(made.types[0].errors[part])


@pytest.mark.parametrize("side", ["k", "v"])
def test_a_small_model(load, side):
    text = bytes(np.random.default_rng(3).integers(97, 123, 400).astype(np.uint8))
    model = load()
    calibrated(model, text, 288)
    found = [errors(model, text, side, rank, 288) for rank in (16, 12, 8, 4, 2)]
    assert 0 < found[0].max() < WHOLE
    assert found[1].min() > 100 * WHOLE
    means = [float(of.mean()) for of in found]
    assert means == sorted(means)


@pytest.mark.slow
@pytest.mark.models
@pytest.mark.parametrize("side", ["k", "v"])
def test_a_real_model(smollm2_path, side):
    text = (ROOT / "LICENSE").read_bytes()
    settings = pykv.LoadConfig(device="cpu", ctx_size=256, threads=1)
    with pykv.load(smollm2_path, load=settings) as model:
        calibrated(model, text, 256)
        found = [errors(model, text, side, rank, 256) for rank in (64, 48, 32, 16)]
    assert 0 < found[0].max() < WHOLE
    # in nearly every head a lower rank costs more
    for wide, narrow in zip(found, found[1:], strict=False):
        assert (wide < narrow).mean() > 0.95
