"""Calibration of small models, from a text to numbers that a page is encoded with."""

import logging

import numpy as np
import pytest

from pykv.engine.calibrate import calibrate, choose, types_known
from pykv.errors import ConfigError, NumericsError
from pykv.formats.coded import find

TEXT = "The theory of an ancient anthem: the band and the hand, then another land. " * 40
ALL = [
    "fp8_e4m3", "fp8_e5m2", "nuq2", "nuq2:outliers=1%", "nuq3", "nuq3:outliers=1%", "nuq4",
    "nuq4:outliers=1%", "lowrank",
]  # fmt: skip


def heard(model, text, ctx, n_chunks):
    """k and v of each layer, chunk by chunk, as the backend's listener is told them."""
    found = {}

    def listen(layer, q, k, v, rope, scale):
        found.setdefault(layer, []).append((k, v))

    ids = model.tokenizer.encode(text, add_special=False)
    model.dev.listener = listen
    for i in range(n_chunks):
        model.logits(ids[i * ctx : (i + 1) * ctx])
    model.dev.listener = None
    return found


class TestTypes:
    def test_all_of_them(self):
        assert choose("all") == types_known() == ALL

    def test_each_once_in_their_order(self):
        assert choose("nuq4, fp8_e4m3,nuq4") == ["nuq4", "fp8_e4m3"]
        assert choose("nuq3:outliers=2.0%,nuq3:outliers=2%") == ["nuq3:outliers=2%"]
        assert choose("lowrank") == ["lowrank"]

    @pytest.mark.parametrize("name", ["q4_0", "f16", "tq4", "kivi2"])
    def test_one_that_needs_none(self, name):
        with pytest.raises(ConfigError, match=f"cache type {name} needs no calibration"):
            choose(f"nuq4,{name}")

    def test_unknown_ones(self):
        with pytest.raises(ConfigError, match=r"unknown type 'nuk4' .* did you mean nuq4\?"):
            choose("nuk4")
        with pytest.raises(ConfigError, match="unknown type ''"):
            choose("nuq4,")
        with pytest.raises(ConfigError, match="is no option"):
            choose("nuq4:outlier=1%")
        with pytest.raises(ConfigError, match="serves every rank"):
            choose("lowrank:32")


class TestNumbers:
    @pytest.fixture
    def model(self, load):
        return load(deterministic=True, ubatch=256)

    def test_ranges_and_scales_are_those_of_the_text(self, model):
        made = calibrate(model, TEXT, ["nuq4", "fp8_e5m2"], 256, 3)
        assert [(c.type, c.tokens, len(c.layers)) for c in made] == [
            ("nuq4", 768, 2), ("fp8_e5m2", 768, 2),
        ]  # fmt: skip
        assert model.dev.listener is None
        assert model.store.nbytes == 0
        for layer, chunks in heard(model, TEXT, 256, 3).items():
            keys = np.concatenate([k[4:] for k, _ in chunks])
            values = np.concatenate([v for _, v in chunks])
            numbers = [made[0].numbers(layer, "key", g) for g in range(2)]
            low = np.stack([n.centre - n.scale for n in numbers])
            high = np.stack([n.centre + n.scale for n in numbers])
            np.testing.assert_allclose(low, keys.min(0), atol=1e-5)
            np.testing.assert_allclose(high, keys.max(0), atol=1e-5)
            for g in range(2):
                found = made[1].numbers(layer, "value", g)
                most = np.abs(values[:, g]).max()
                assert found.scale == pytest.approx(most / 57344, rel=1e-6)
                assert found.levels is None

    def test_its_levels_serve_the_text_s_keys(self, model):
        for made in calibrate(model, TEXT, ["nuq4", "nuq3:outliers=1%", "nuq2"], 256, 3):
            format_ = find(made.type)
            for layer, chunks in heard(model, TEXT, 256, 3).items():
                k, v = chunks[1]
                for g in range(2):
                    head = made.numbers(layer, "key", g)
                    page = format_.encode_keys(k[68:132, g], head)
                    error = format_.decode_keys(page, 16, numbers=head) - k[68:132, g]
                    # as much as even steps of four times the width would err in the mean
                    step = 4 * 2 * head.scale / 2**format_.bits
                    assert np.sqrt((error**2).mean(0) / (step**2 / 12)).max() < 1
                    head = made.numbers(layer, "value", g)
                    page = format_.encode_values(v[68:132, g], head)
                    error = format_.decode_values(page, 16, numbers=head) - v[68:132, g]
                    width = np.ptp(v[68:132, g], 1)
                    step = 4 * width / 2**format_.bits
                    assert np.sqrt((error**2).mean(1) / (step**2 / 12)).max() < 1

    def test_small_batches_measure_the_same(self, load, model):
        types = ["nuq3:outliers=1%", "fp8_e4m3", "lowrank"]
        expected = calibrate(model, TEXT, types, 256, 2)
        small = calibrate(load(deterministic=True, ubatch=48), TEXT, types, 256, 2)
        for one, other in zip(expected, small, strict=True):
            for a, b in zip(one.layers, other.layers, strict=True):
                assert list(a) == list(b)
                for name in a:
                    np.testing.assert_array_equal(a[name], b[name], err_msg=name)

    def test_chunks_begin_with_bos_where_the_vocabulary_wants_it(self, load):
        seen = []
        model = load(bos=True)
        real = model.step
        model.step = lambda batch, outputs: seen.append(batch[0][1]) or real(batch, outputs)
        calibrate(model, TEXT, ["fp8_e4m3"], 128, 2)
        assert [int(tokens[0]) for tokens in seen] == [model.tokenizer.bos] * 2

    def test_progress_and_the_number_of_chunks(self, load):
        told, n = [], len(load().tokenizer.encode(TEXT)) // 256
        (made,) = calibrate(load(), TEXT, ["fp8_e4m3"], 256, None, lambda *a: told.append(a[:2]))
        assert told == [(i + 1, n) for i in range(n)]
        assert made.tokens == n * 256


class TestRefusals:
    def test_a_short_text(self, load):
        with pytest.raises(ConfigError, match=r"the text has 99 tokens, and a chunk has 128"):
            calibrate(load(), "b" * 99, ["nuq4"], 128)

    def test_chunks_that_make_no_sense(self, load):
        with pytest.raises(ConfigError, match="a chunk needs at least 68 tokens"):
            calibrate(load(), TEXT, ["nuq4"], 67)
        with pytest.raises(ConfigError, match="a chunk of 513 tokens is longer than the context"):
            calibrate(load(), TEXT, ["nuq4"], 513)
        with pytest.raises(ConfigError, match="chunks must be 1 or more"):
            calibrate(load(), TEXT, ["nuq4"], 128, 0)

    def test_another_backend(self, load):
        with pytest.raises(ConfigError, match="runs on the cpu backend, not on reference"):
            calibrate(load(device="reference"), TEXT, ["nuq4"], 128)

    def test_a_broken_model_leaves_no_listener(self, load):
        model = load(broken=True)
        with pytest.raises(NumericsError):
            calibrate(model, TEXT, ["nuq4"], 128)
        assert model.dev.listener is None
        assert model.store.nbytes == 0

    def test_few_tokens_are_warned_of(self, load, caplog):
        with caplog.at_level(logging.WARNING, "pykv"):
            calibrate(load(), TEXT, ["fp8_e4m3"], 128, 1)
        assert "128 tokens are few to calibrate on" in caplog.text
