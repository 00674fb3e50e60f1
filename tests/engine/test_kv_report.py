import json
import math
from pathlib import Path

import numpy as np
import pytest

from pykv.backends.base import LayerShape
from pykv.cache import layout
from pykv.cache.layout import layouts_of
from pykv.config import CacheConfig
from pykv.engine import calibration, kv_report
from pykv.engine.calibration import Calibration
from pykv.engine.chunks import first_chunks, read_chunk
from pykv.engine.kv_report import Report, TypeErrors
from pykv.engine.spectrum import Spectrum
from pykv.errors import ConfigError
from pykv.gguf import open_gguf

TEXT = bytes(np.random.default_rng(3).integers(97, 123, 1500).astype(np.uint8))
SHAPES = [LayerShape(2, 2, 64, 64), LayerShape(1, 1, 64, 64, 128)]


def report(errors, magnitudes=None, ratio=5.0):
    """Of types whose errors of all three heads are given, alike for keys, values and both."""
    types = []
    for name, of in errors.items():
        layers = [np.array(of[:2], float), np.array(of[2:], float)]
        layouts = layouts_of(CacheConfig(type_k=name, type_v=name), SHAPES)
        parts = {"keys": layers, "values": layers, "both": layers}
        types.append(TypeErrors(name, 4.5, 4.5, layouts, parts))
    if magnitudes is None:
        magnitudes = [np.ones((s.n_kv, s.d_k), np.float32) for s in SHAPES]
    flat = [
        (Spectrum(np.ones((s.n_kv, s.d_k))), Spectrum(np.ones((s.n_kv, s.d_v)))) for s in SHAPES
    ]
    return Report(Path("m.gguf"), 512, 1, 128, 4, ratio, SHAPES, magnitudes, flat, types)


class TestReport:
    def test_the_spread_over_all_heads(self):
        spread = report({"q4_0": [0.1, 0.3, 0.2]}).types[0].spread("both")
        assert (spread.median, spread.worst, spread.layer, spread.head) == (0.2, 0.3, 0, 1)
        # between the second and the third of three, 0.9 of the way
        assert spread.p95 == pytest.approx(0.29)
        spread = report({"q4_0": [0.1, 0.1, 0.4]}).types[0].spread("keys")
        assert (spread.layer, spread.head) == (1, 0)

    def test_outlier_channels_are_found_where_they_were_planted(self):
        magnitudes = [np.full((s.n_kv, s.d_k), 2, np.float32) for s in SHAPES]
        magnitudes[0][1, 7], magnitudes[0][1, 40], magnitudes[0][1, 41] = 12, 30, 10
        magnitudes[1][0] = 0
        magnitudes[1][0, 3] = 1e-3
        made = report({"f16": [0] * 3}, magnitudes)
        assert made.outliers(0, 0) == []
        assert made.outliers(0, 1) == [(40, 15.0), (7, 6.0)]  # 10 is no more than 5 times 2
        assert made.outliers(1, 0) == [(3, math.inf)]
        assert json.loads(json.dumps(made.to_dict(), allow_nan=False))["layers"][1]["heads"][0][
            "outliers"
        ] == [{"channel": 3, "ratio": None}]

    def test_heads_that_stand_out_for_any_type_come_first(self):
        made = report({"q8_0": [0.01, 0.01, 0.05], "q4_0": [0.1, 0.9, 0.1], "f32": [0, 0, 0]})
        assert made.worst(2) == [(0, 1), (1, 0)]
        assert len(made.worst(9)) == 3


@pytest.fixture
def model(load):
    """A small model, with threads of its own."""
    return load()


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch, tmp_path):
    """Calibration files of this test only; kernels stay where they are."""
    monkeypatch.setattr(calibration, "folder", lambda: tmp_path / "calibration")


def test_a_model_of_two_layers(model):
    told = []
    made = kv_report.measure(
        model, TEXT, ctx_size=288, chunks=2, progress=lambda *args: told.append(args[:2])
    )
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert (made.n_chunks, made.n_queries, made.sinks) == (2, 72, 4)
    # all types that need no calibration, the widest first
    assert [t.name for t in made.types][:3] == ["f32", "bf16", "f16"]
    needing = {"nuq2", "nuq3", "nuq4"}
    assert {t.name for t in made.types} == set(layout.cache_types()) - needing
    assert made.left_out.keys() == needing
    assert "run `pykv calibrate" in made.left_out["nuq3"]
    median = {t.name: t.spread("both").median for t in made.types}
    assert median["f32"] == 0
    assert 0 < median["f16"] < median["q8_0"] < median["q5_0"] < median["q4_0"] < median["tq3"]
    found = json.loads(json.dumps(made.to_dict(), allow_nan=False))
    kivi = next(t for t in found["types"] if t["type"] == "kivi2")
    assert (kivi["residual"], kivi["transform_k"], kivi["position"]) == (128, "none", "write")
    worst = kivi["both"]["worst"]
    of_head = found["layers"][worst["layer"]]["heads"][worst["head"]]
    assert of_head["errors"]["kivi2"]["both"] == worst["error"]
    assert of_head["key_magnitudes"] == made.magnitudes[worst["layer"]][worst["head"]].tolist()
    assert model.dev.listener is None


@pytest.mark.parametrize("position", ["write", "read"])
def test_spectra_are_those_of_what_the_cache_holds(load, position):
    model, heard = load(cache=CacheConfig(sinks=5, position=position)), {0: [], 1: []}
    made = kv_report.measure(model, TEXT, ["f16"], ctx_size=288, chunks=2)

    def note(layer, q, k, v, rope, scale):
        pairs = k[..., 0::2] + 1j * k[..., 1::2]  # of a llama's file, neighbours turn together
        if position == "write":
            pairs = pairs * np.exp(1j * np.arange(288)[:, None] * rope.inv_freq)[:, None]
        heard[layer].append((np.stack([pairs.real, pairs.imag], -1).reshape(k.shape)[5:], v[5:]))

    model.dev.listener = note
    for chunk in first_chunks(model, TEXT, 288, 2):
        read_chunk(model, chunk)
    found = json.loads(json.dumps(made.to_dict(), allow_nan=False))
    assert found["rank_keeps"] == 0.99
    for layer, chunks in heard.items():
        for side, parts in zip(("key", "value"), zip(*chunks, strict=True), strict=True):
            x = np.concatenate(parts)
            for g, head in enumerate(found["layers"][layer]["heads"]):
                singular = np.linalg.svd(x[:, g], compute_uv=False)
                np.testing.assert_allclose(head[f"{side}_singular"], singular, rtol=1e-5)
                energy = np.square(singular) / np.square(singular).sum()
                rank = head[f"{side}_rank"]
                assert energy[: rank - 1].sum() < 0.99 <= energy[:rank].sum()
                assert 1 < rank <= 16


def test_the_models_own_batches_do_not_matter(load):
    made = [kv_report.measure(load(ubatch=n), TEXT, ["q4_0"], ctx_size=288) for n in (64, 100, 288)]
    errors = [np.concatenate(of.types[0].errors["both"]) for of in made]
    # hidden states differ in the last bit, and codes on a border with them
    np.testing.assert_allclose(errors[0], errors[1], rtol=0.02)
    np.testing.assert_allclose(errors[0], errors[2], rtol=0.02)


def test_settings_of_the_cache_are_those_of_the_types(model):
    cache = CacheConfig(sinks=0, residual=32, transform_k="random", override="0=k:q8_0")
    made = kv_report.measure(model, TEXT, ["q4_0", "kivi4", "q4_0"], cache, ctx_size=160)
    assert [t.name for t in made.types] == ["q4_0", "kivi4"]
    for t in made.types:
        for each in t.layouts:
            assert (each.residual, each.formats.transform_k) == (32, "random")
            assert each.formats.page_k == t.name


def test_a_type_with_levels_takes_its_calibration(model):
    with open_gguf(model.path) as file:
        owner = calibration.identity(file, model.store.shapes)
    levels = np.linspace(-1, 1, 16).astype(np.float32)
    layers = tuple(
        {
            "k_scale": np.full((s.n_kv, s.d_k), 8, np.float32),
            "k_centre": np.zeros((s.n_kv, s.d_k), np.float32),
            "k_levels": levels, "v_levels": levels,
        }
        for s in model.store.shapes
    )  # fmt: skip
    calibration.write(Calibration("nuq4", 1000, layers), owner)
    made = kv_report.measure(model, TEXT, ["nuq4"], ctx_size=288)
    # sixteen even levels of each token's range, where kivi4 has sixteen of its channels'
    assert 0.01 < made.types[0].spread("values").median < 0.2
    assert made.types[0].layouts[0].formats.position == "read"
    assert "nuq4" not in kv_report.candidates(model, None, model.config)[1]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"ctx_size": 600}, "a chunk of 600 tokens is longer than the context, 512"),
        ({"ctx_size": 400, "text": b"short"}, "the text has 5 tokens, and a chunk has 400"),
        ({"chunks": 0}, "chunks must be 1 or more, or None for all, not 0"),
        ({"types": []}, "no cache types were named"),
        ({"types": ["nope"]}, "unknown cache type 'nope': it is one of bf16, "),
        ({"types": ["q4_k"]}, "unknown cache type 'q4_k': it is one of bf16, "),
        ({"types": ["nuq3"]}, r"cache type nuq3 needs numbers .*run `pykv calibrate .*nuq3`"),
        (
            {"types": ["q8_0", "kivi2"], "ctx_size": 260},
            "kivi2 keeps 4 first and 128 newest tokens exact, so a chunk needs 261 tokens",
        ),
    ],
)
def test_what_cannot_be_done(model, how, said):
    how = {"text": TEXT, "types": ["q8_0"], "ctx_size": 128} | how
    with pytest.raises(ConfigError, match=said):
        kv_report.measure(model, **how)
    assert model.dev.listener is None


def test_the_least_chunk_that_is_named_suffices(model):
    made = kv_report.measure(model, TEXT, ["kivi2"], ctx_size=261)
    assert made.types[0].spread("both").median > 0.05


def test_another_backend_cannot_be_watched(load):
    with pytest.raises(ConfigError, match="watches the cpu backend, not reference"):
        kv_report.measure(load(device="reference"), TEXT, ["q8_0"], ctx_size=128)


def test_after_an_interrupt_the_model_is_as_before(model):
    def stop(done, total, seconds):
        raise KeyboardInterrupt

    before = model.store.nbytes
    with pytest.raises(KeyboardInterrupt):
        kv_report.measure(model, TEXT, ["q8_0"], ctx_size=128, progress=stop)
    assert (model.dev.listener, model.store.nbytes) == (None, before)


def test_where_no_type_runs_the_reasons_are_said(model):
    # a low-rank map needs a calibration, whatever the type
    with pytest.raises(ConfigError, match="the low-rank transform needs numbers"):
        kv_report.measure(model, TEXT, None, CacheConfig(transform_v="lowrank:8"), ctx_size=288)


def test_types_are_checked_before_a_model_is_there():
    kv_report.check_types(["q4_0", "nuq3:outliers=1%"], CacheConfig())
    with pytest.raises(ConfigError, match="unknown cache type 'q4'"):
        kv_report.check_types(["q8_0", "q4"], CacheConfig())
    with pytest.raises(ConfigError, match="outliers=1%, from 0 to"):
        kv_report.check_types(["nuq3:outliers=x"], CacheConfig())


def test_a_policy_is_refused(model):
    with pytest.raises(ConfigError, match="kv-report looks at every token: leave out --kv-policy"):
        kv_report.measure(model, "text", cache=CacheConfig(policy="sinks", budget="64"))
