"""Calibration files: what is written is read, and read for its own model only."""

from dataclasses import replace

import gguf
import numpy as np
import pytest

from pykv.backends.base import LayerShape
from pykv.engine import calibration
from pykv.engine.calibration import Calibration, Identity
from pykv.errors import ConfigError, GGUFError
from pykv.gguf import open_gguf
from pykv.gguf.writer import write_gguf

OWNER = Identity("ab" * 32, ((2, 8, 16), (1, 8, 16)), "llama.rope.freq_base=10000.0", "m.gguf")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    # not the whole of pykv's folder: the compiled kernels of other tests are there
    monkeypatch.setattr(calibration, "folder", lambda: tmp_path / "calibration")
    return tmp_path / "calibration"


def numbers(n_kv, seed):
    rng = np.random.default_rng(seed)
    return {
        "k_scale": rng.gamma(1, size=(n_kv, 8)).astype(np.float32),
        "k_centre": rng.standard_normal((n_kv, 8)).astype(np.float32),
        "k_levels": np.sort(rng.uniform(-1, 1, 8)).astype(np.float32),
        "v_levels": np.sort(rng.uniform(-1, 1, 8)).astype(np.float32),
    }


def made(type_="nuq3:outliers=1%"):
    return Calibration(type_, 4096, (numbers(2, 0), numbers(1, 1)))


def bases():
    def one(n_kv, d, side):
        q = np.linalg.qr(np.random.default_rng(d).standard_normal((n_kv, d, d)))[0]
        s = np.sort(np.random.default_rng(d).gamma(1, size=(n_kv, d)))[:, ::-1]
        return {f"{side}_basis": q.astype(np.float32), f"{side}_singular": s.astype(np.float32)}

    layers = tuple(one(n, 8, "k") | one(n, 16, "v") for n in (2, 1))
    return Calibration("lowrank", 4096, layers)


def test_what_was_written_is_read(folder):
    path = calibration.write(made(), OWNER)
    assert path == folder / "abababababababab.nuq3-outliers-1.gguf"
    found = calibration.find("nuq3:outliers=1%", OWNER)
    assert (found.type, found.tokens) == ("nuq3:outliers=1%", 4096)
    for old, new in zip(made().layers, found.layers, strict=True):
        assert set(old) == set(new)
        for name in old:
            assert new[name].dtype == np.float32
            np.testing.assert_array_equal(new[name], old[name])
    head = found.numbers(0, "key", 1)
    np.testing.assert_array_equal(head.scale, made().layers[0]["k_scale"][1])
    np.testing.assert_array_equal(head.centre, made().layers[0]["k_centre"][1])
    np.testing.assert_array_equal(head.levels, made().layers[0]["k_levels"])
    value = found.numbers(1, "value", 0)
    assert value.scale is value.centre is None
    np.testing.assert_array_equal(value.levels, made().layers[1]["v_levels"])


def test_the_gguf_package_reads_it_too(folder):
    reader = gguf.GGUFReader(calibration.write(made(), OWNER))
    tensors = {t.name: t.data for t in reader.tensors}
    np.testing.assert_array_equal(tensors["blk.1.k_scale"], made().layers[1]["k_scale"])
    assert reader.fields["pykv.calibration.model.hash"].contents() == "ab" * 32
    assert reader.fields["pykv.calibration.model.kv_heads"].contents() == [2, 1]


def test_scales_of_heads_are_single_numbers():
    scales = tuple({"k_scale": np.ones(n, np.float32), "v_scale": np.full(n, 3, np.float32)}
                   for n in (2, 1))  # fmt: skip
    calibration.write(Calibration("fp8_e4m3", 10, scales), OWNER)
    head = calibration.find("fp8_e4m3", OWNER).numbers(0, "value", 1)
    assert (head.scale, head.centre, head.levels) == (3, None, None)


def test_bases_are_cut_to_a_rank():
    calibration.write(bases(), OWNER)
    found = calibration.require("lowrank", OWNER, "m.gguf")
    assert found.basis(0, "value", 5).shape == (2, 16, 5)
    np.testing.assert_array_equal(found.basis(1, "key", 3), bases().layers[1]["k_basis"][..., :3])
    np.testing.assert_array_equal(found.singular_values(0, "key"), bases().layers[0]["k_singular"])


def test_an_older_one_is_replaced():
    calibration.write(made(), OWNER)
    calibration.write(replace(made(), tokens=9), OWNER)
    assert calibration.find("nuq3:outliers=1%", OWNER).tokens == 9


def test_where_there_is_none_the_command_is_named():
    assert calibration.find("nuq4", OWNER) is None
    with pytest.raises(ConfigError) as error:
        calibration.require("nuq4", OWNER, "/models/m.gguf")
    assert str(error.value) == (
        "cache type nuq4 needs numbers that are measured on a text, and there are none for m.gguf "
        "yet: run `pykv calibrate /models/m.gguf -f TEXT --types nuq4`"
    )
    with pytest.raises(ConfigError, match="^the low-rank transform needs numbers"):
        calibration.require("lowrank", OWNER, "m.gguf")


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"digest": "cd" * 32}, "weights"),
        ({"heads": ((2, 8, 16), (1, 8, 8))}, "numbers or widths of KV heads"),
        ({"heads": ((2, 8, 16),)}, "numbers or widths of KV heads"),
        ({"rope": "llama.rope.freq_base=500000.0"}, "settings of RoPE"),
    ],
)
def test_another_model_s_is_refused(other, what):
    path = calibration.write(made(), OWNER)
    with pytest.raises(ConfigError) as error:
        calibration.read(path, "nuq3:outliers=1%", replace(OWNER, name="other.gguf", **other))
    assert str(error.value) == (
        f"{path}: this calibration was made for m.gguf with other {what} than those of "
        "other.gguf: run `pykv calibrate` with this model"
    )


def test_another_type_s_is_refused():
    path = calibration.write(made(), OWNER)
    with pytest.raises(ConfigError, match="a calibration of nuq3:outliers=1%, expected one of nuq"):
        calibration.read(path, "nuq3", OWNER)


@pytest.mark.parametrize(
    ("layer", "name", "array", "sentence"),
    [
        (0, "k_scale", np.ones((2, 7)), r"blk.0.k_scale has shape \[2, 7\] and 0 values"),
        (1, "k_centre", np.full((1, 8), np.nan), "and 8 values that are no numbers"),
        (0, "k_levels", np.ones(8), "blk.0.k_levels holds levels that do not rise"),
        (0, "k_scale", -np.ones((2, 8)), "holds a scale that is not above 0"),
        (0, "v_scale", np.array([1.0, 0]), "holds a scale that is not above 0"),
        (1, "v_levels", np.arange(7), r"blk.1.v_levels has shape \[7\]"),
        (1, "other", np.arange(4), "blk.1.other has shape"),
        (1, "k_levels", None, "blk.1.k_levels is missing"),
    ],
)
def test_a_damaged_file_is_refused(layer, name, array, sentence):
    layers = [dict(part) for part in made().layers]
    if array is None:
        del layers[layer][name]
    else:
        layers[layer][name] = array.astype(np.float32)
    path = calibration.write(replace(made(), layers=tuple(layers)), OWNER)
    with pytest.raises(GGUFError, match=sentence):
        calibration.read(path, "nuq3:outliers=1%", OWNER)


def test_files_that_are_none_are_refused(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGML")
    with pytest.raises(GGUFError, match="not a GGUF file"):
        calibration.read(tmp_path / "a.gguf", "nuq4", OWNER)
    write_gguf(tmp_path / "b.gguf", {"general.architecture": "llama"}, {})
    with pytest.raises(GGUFError, match="pykv.calibration.version is missing"):
        calibration.read(tmp_path / "b.gguf", "nuq4", OWNER)
    write_gguf(tmp_path / "c.gguf", {"pykv.calibration.version": 1}, {})
    with pytest.raises(ConfigError, match="version 1 of them, expected 2: run `pykv calibrate`"):
        calibration.read(tmp_path / "c.gguf", "nuq4", OWNER)


def test_a_number_that_changed_on_the_disk_is_noticed():
    path = calibration.write(made(), OWNER)
    data, value = path.read_bytes(), made().layers[1]["k_scale"][0, 3].tobytes()
    at = data.index(value)
    path.write_bytes(data[:at] + (made().layers[1]["k_scale"][0, 3] * 2).tobytes() + data[at + 4 :])
    with pytest.raises(GGUFError, match="are not those that were written.*run `pykv calibrate`"):
        calibration.read(path, "nuq3:outliers=1%", OWNER)


def test_a_place_where_no_file_can_lie_is_refused(folder):
    path = calibration.place_for("nuq4", OWNER)
    assert not folder.exists()
    path.mkdir(parents=True)
    with pytest.raises(ConfigError, match="is no file, and a calibration belongs there"):
        calibration.place_for("nuq4", OWNER)
    path.rmdir()
    folder.rmdir()
    folder.write_text("in the way")
    with pytest.raises(NotADirectoryError):
        calibration.place_for("nuq4", OWNER)


class TestIdentity:
    def of(self, path):
        with open_gguf(path) as file:
            return calibration.identity(file, [LayerShape(4, 2, 16, 16)] * 2)

    def test_it_is_the_weights_and_not_the_name_or_the_template(self, files, small, tmp_path):
        first = self.of(files())
        assert first.heads == ((2, 16, 16),) * 2
        assert first.rope == "llama.context_length=512"
        other = small.write_model(tmp_path / "other.gguf", template=None)
        assert self.of(other) == replace(first, name="other.gguf")
        assert self.of(files(recite=True)).digest != first.digest

    def test_a_single_weight_at_a_tensor_s_end_tells(self, small, tmp_path):
        path = small.write_model(tmp_path / "m.gguf")
        before = self.of(path).digest
        with open_gguf(path) as file:
            ends = {name: t.data.reshape(-1)[-4:].tobytes() for name, t in file.tensors.items()}
        raw = bytearray(path.read_bytes())
        at = raw.rindex(ends["blk.1.attn_k.weight"])
        raw[at] ^= 1
        path.write_bytes(raw)
        assert self.of(path).digest != before


def test_a_loaded_model_s_calibrations_are_written_under_its_name(load):
    model = load()
    layers = tuple({"k_scale": np.ones(2, np.float32), "v_scale": np.ones(2, np.float32)}
                   for _ in range(2))  # fmt: skip
    ((each, path),) = calibration.write_all(model, [Calibration("fp8_e5m2", 1, layers)])
    with open_gguf(model.path) as file:
        owner = calibration.identity(file, model.store.shapes)
    assert path == calibration.path_of("fp8_e5m2", owner)
    assert calibration.find("fp8_e5m2", owner).tokens == each.tokens == 1
