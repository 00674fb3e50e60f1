"""Names to files: catalogue, paths, the Hugging Face hub (replaced), the models folder."""

from __future__ import annotations

import errno
import functools
import hashlib
import os

import huggingface_hub
import platformdirs
import pytest
from huggingface_hub import errors

from pykv.engine import hub, wheels
from pykv.errors import ConfigError, DownloadError, GGUFError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A private cache, a private current folder, and no pull that is not asked for."""
    monkeypatch.setenv("PYKV_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def refuse(entry, *args):
        raise AssertionError(f"{entry.name} was pulled")

    monkeypatch.setattr(wheels, "fetch", refuse)
    return tmp_path / "cache"


@pytest.fixture
def entry(monkeypatch):
    """The catalogue's only model, of 7 bytes."""
    raw = b"a model"
    part = hub.WheelMember("toy", "1.0", "toy/m.gguf", 10)
    entry = hub.CatalogEntry(
        "toy-1m", ("toy",), "Toy.gguf", hashlib.sha256(raw).hexdigest(), 7, (part,), "none", "a toy"
    )
    monkeypatch.setattr(hub, "CATALOG", (entry,))
    monkeypatch.setattr(hub, "DEFAULT_MODEL", entry.name)
    return entry


def put(path, raw=b"a model"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return path


def test_cache_dir_is_the_variable_or_the_systems_place(cache, monkeypatch):
    assert hub.cache_dir() == cache
    monkeypatch.setenv("PYKV_CACHE_DIR", "models here")
    assert hub.cache_dir() == cache.parent / "here" / "models here"
    monkeypatch.setenv("PYKV_CACHE_DIR", "")
    assert str(hub.cache_dir()) == platformdirs.user_cache_dir("pykv", appauthor=False)


def test_catalogue_names_are_distinct_and_found():
    names = [n for e in hub.CATALOG for n in (e.name, *e.aliases)]
    assert len(set(names)) == len(names)
    assert len({e.file for e in hub.CATALOG}) == len(hub.CATALOG)
    for e in hub.CATALOG:
        for name in (e.name, *e.aliases):
            assert hub.find(name.upper()) is e
    assert hub.find(hub.DEFAULT_MODEL).file == "SmolLM2-135M-Instruct.Q4_1.gguf"
    # the sizes of the four members, as the wheels' directories list them
    assert hub.find("gemma-3-270m").size_bytes == 3 * 63_963_136 + 61_223_616


@pytest.mark.models
def test_catalogue_describes_the_real_files(smollm2_path, gemma_path):
    for name, path in ("smollm2", smollm2_path), ("gemma3", gemma_path):
        e = hub.find(name)
        assert path.stat().st_size == e.size_bytes
        with path.open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == e.sha256


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(ConfigError) as caught:
        hub.resolve("smolm2")
    sentence = str(caught.value)
    assert "unknown model 'smolm2'" in sentence
    assert "smollm2-135m-instruct, gemma-3-270m; did you mean smollm2?" in sentence
    with pytest.raises(ConfigError, match=r"gemma-3-270m$"):
        hub.resolve("zzz")
    with pytest.raises(ConfigError, match="unknown model ''"):
        hub.resolve("")
    with pytest.raises(ConfigError, match="unknown model"):
        hub.resolve("x" * 5000)


def test_a_path_is_taken_as_it_is(tmp_path, monkeypatch):
    path = put(tmp_path / "m.gguf")
    assert hub.resolve(str(path)) == path
    assert hub.resolve("../m.gguf").samefile(path)
    plain = put(tmp_path / "here" / "toy")  # a file goes before a name of the catalogue
    assert hub.resolve("toy").samefile(plain)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert hub.resolve("~/m.gguf") == path


def test_a_bare_file_name_may_lie_in_the_models_folder(cache):
    path = put(cache / "models" / "mine.gguf")
    assert hub.resolve("mine.gguf") == path


@pytest.mark.parametrize("name", ["none.gguf", "NONE.GGUF", "folder/none", "./none"])
def test_a_path_without_a_file_is_named(name):
    with pytest.raises(GGUFError, match="no such file.*expected a GGUF file") as caught:
        hub.resolve(name)
    assert os.path.normpath(name) in str(caught.value)


def test_a_folder_is_no_model(tmp_path):
    with pytest.raises(GGUFError, match="this is a folder"):
        hub.resolve(str(tmp_path))


def test_a_catalogue_name_is_pulled_once(entry, cache, monkeypatch):
    pulls = []

    def fetch(e, folder, environ, progress):
        pulls.append((e, folder, progress))
        return put(folder / e.file)

    monkeypatch.setattr(wheels, "fetch", fetch)
    bar = object()
    path = cache / "models" / "Toy.gguf"
    assert hub.resolve(None, progress=bar) == path
    assert pulls == [(entry, cache / "models", bar)]
    for name in None, "toy-1m", "TOY":
        assert hub.resolve(name, offline=True) == path
    assert len(pulls) == 1
    put(path, b"half")  # not ours: a pull renames whole files only
    assert hub.resolve("toy") == path
    assert len(pulls) == 2


def test_offline_pulls_nothing(entry, cache):
    with pytest.raises(DownloadError, match="toy-1m: not on this machine .*run `pykv pull toy-1m`"):
        hub.resolve("toy", offline=True)


def test_installed_lists_the_models_folder(entry, cache):
    assert hub.installed() == []
    models = cache / "models"
    put(models / "other.gguf", b"123")
    put(models / "notes.txt")
    put(models / ".pull-1-ab" / "Toy.gguf")
    toy = put(models / "Toy.gguf")

    def listing(**kwargs):
        return [(m.name, m.path, m.nbytes, m.checksum) for m in hub.installed(**kwargs)]

    other = ("other.gguf", models / "other.gguf", 3, "unknown")
    assert listing() == [("toy-1m", toy, 7, "ok"), other]
    toy.write_bytes(b"a motel")
    assert listing() == [("toy-1m", toy, 7, "wrong"), other]
    assert listing(verify=False) == [("toy-1m", toy, 7, "unknown"), other]


REPO = [
    "README.md",
    "mmproj-m-Q4_K_M.gguf",
    "m-Q8_0.gguf",
    "m-UD-Q4_K_M.gguf",
    "m-q4_k_m.gguf",
    "m.Q4_K_S.gguf",
    "BF16/m-BF16-00001-of-00002.gguf",
    "BF16/m-BF16-00002-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("quant", "expected"),
    [
        (None, ["m-q4_k_m.gguf"]),
        ("Q4_K_M", ["m-q4_k_m.gguf"]),
        ("q8_0", ["m-Q8_0.gguf"]),
        ("Q4_K_S", ["m.Q4_K_S.gguf"]),
        ("UD-Q4_K_M", ["m-UD-Q4_K_M.gguf"]),
        ("bf16", REPO[-2:]),
    ],
)
def test_a_quant_chooses_its_files(quant, expected):
    assert hub.choose_files(REPO, quant, "u/r") == expected
    assert hub.choose_files(REPO[::-1], quant, "u/r") == expected


def test_without_the_default_quant_the_first_file_is_taken():
    assert hub.choose_files(["b-Q8_0.gguf", "a-F16.gguf"], None, "u/r") == ["a-F16.gguf"]


@pytest.mark.parametrize(
    ("names", "quant", "fragments"),
    [
        (["README.md", "mmproj-F16.gguf"], None, ["u/r", "no GGUF model"]),
        (REPO, "Q4_K", ["u/r", "no file is of quant Q4_K,", "m-Q8_0.gguf"]),
        (REPO[:-1], "BF16", ["u/r", "BF16/m-BF16-00002-of-00002.gguf is missing"]),
    ],
)
def test_files_that_are_not_there_are_named(names, quant, fragments):
    with pytest.raises(DownloadError) as caught:
        hub.choose_files(names, quant, "u/r")
    assert [f for f in fragments if f not in str(caught.value)] == [], str(caught.value)


@pytest.fixture
def repo(tmp_path, monkeypatch):
    """Replaces the Hugging Face hub: `u/r` holds REPO, and downloads are noted."""
    fetched = []

    def list_files(self, repo_id):
        assert repo_id == "u/r"
        return REPO

    def download(repo_id, filename, tqdm_class):
        fetched.append(filename)
        bar = tqdm_class(disable=None, name="x", desc=filename, total=10, unit="B", initial=0)
        for n in 4, 6, 6:
            bar.update(n)
        bar.close()
        return str(put(tmp_path / "snapshot" / filename))

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", list_files)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return fetched


def test_hf_fetches_the_chosen_files(repo, tmp_path, capfd):
    calls = []
    path = hub.resolve("hf:u/r", progress=lambda *call: calls.append(call))
    assert path == tmp_path / "snapshot" / "m-q4_k_m.gguf"
    assert calls == [("m-q4_k_m.gguf", 4, 10), ("m-q4_k_m.gguf", 10, 10)]
    assert hub.resolve("HF:u/r:bf16") == tmp_path / "snapshot" / REPO[-2]
    assert repo == ["m-q4_k_m.gguf", *REPO[-2:]]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "name", ["hf:", "hf:user", "hf:a/b/c", "hf:a/b:", "hf:a/../b:x", "hf:a/b?c"]
)
def test_hf_names_have_one_shape(name, repo):
    with pytest.raises(ConfigError, match=r"expected hf:user/repo\[:quant\]"):
        hub.resolve(name)


def bare(kind, text=""):
    """An error of the hub without the HTTP response that its constructor asks for."""
    error = kind.__new__(kind)
    error.args = (text,)
    return error


@pytest.mark.parametrize(
    ("error", "fragments"),
    [
        (bare(errors.GatedRepoError), ["https://huggingface.co/u/r", "hf auth login"]),
        (bare(errors.RepositoryNotFoundError), ["no such repository", "spelling"]),
        (bare(errors.HTTPError, "\n503 busy\nRequest ID: 1"), ["hub: 503 busy; check the network"]),
        (errors.LocalEntryNotFoundError("no \x1b[2Jway"), ["no [2Jway", "network"]),
        (errors.OfflineModeIsEnabled("offline mode is on"), ["offline mode is on"]),
        (errors.HFValidationError("bad id"), ["bad id"]),
        (RuntimeError("xet broke"), ["xet broke"]),
        (OSError(errno.ENOSPC, "full"), ["disk", "HF_HOME"]),
        (ConnectionError(), ["ConnectionError", "network"]),
    ],
)
def test_hf_errors_become_sentences(error, fragments, repo, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(DownloadError) as caught:
        hub.resolve("hf:u/r")
    sentence = str(caught.value)
    assert sentence.startswith("u/r: ")
    assert sentence.isprintable()
    assert [f for f in fragments if f not in sentence] == [], sentence


def test_hf_offline_reads_the_hubs_own_cache(tmp_path, monkeypatch, repo):
    """The cache is laid out as the hub does it, and scanned by the hub itself."""
    root = tmp_path / "hf" / "models--u--r"
    old = put(root / "snapshots" / ("a" * 40) / "deep" / "m-Q8_0.gguf")
    new = put(root / "snapshots" / ("b" * 40) / "m-Q4_K_M.gguf")
    put(root / "refs" / "main", b"b" * 40)
    os.utime(old, (1, 1))
    scan = functools.partial(huggingface_hub.scan_cache_dir, tmp_path / "hf")
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", scan)
    assert hub.resolve("hf:u/r", offline=True) == new
    assert hub.resolve("hf:u/r:q8_0", offline=True) == old
    for name, wanted in (
        ("hf:u/r:q2_k", "u/r: no file of quant q2_k"),
        ("hf:u/x", "u/x: no file is"),
    ):
        with pytest.raises(DownloadError, match=wanted):
            hub.resolve(name, offline=True)
    monkeypatch.setattr(
        huggingface_hub, "scan_cache_dir", functools.partial(scan.func, tmp_path / "none")
    )
    with pytest.raises(DownloadError, match="offline was asked for"):
        hub.resolve("hf:u/r", offline=True)
    assert repo == []
