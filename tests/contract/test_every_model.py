"""What holds for every file of `models`: batches of any size give the same logits.

Each architecture gets a random file of whatever tensors its graph asks for, so that a new one needs
no line here, unless its cache has a shape of its own.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from pykv import registry
from pykv.cache.pages import HostMemory
from pykv.cache.store import Store
from pykv.config import CacheConfig
from pykv.gguf import open_gguf

NAMES = registry.names("models")
N_VOCAB, N = 96, 150
# Two layers' float32 sums of 64 to 150 terms, each off by about 1e-6; scores below 10 and the
# second layer pass errors on about tenfold.
TOLERANCE = 1e-4
# An error as small as that can push a cached value over an edge of rounding, and so move it by
# 2^-10 of itself in f16, by 2^-8 in bf16; values reach 4, and a token may see a single one.
ROUNDED = {"exact": TOLERANCE, "default": 4 * 2**-10, "encoded": 4 * 2**-8}
KEYS = {
    "context_length": 512,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.sliding_window": 24,
    "attention.sliding_window_pattern": 2,
}
# of architectures whose cached keys are no head's
OWN = {
    "deepseek2": {
        "attention.head_count_kv": 1,
        "attention.key_length": 80,
        "attention.value_length": 64,
        "attention.kv_lora_rank": 64,
        "attention.key_length_mla": 48,
        "attention.value_length_mla": 32,
        "rope.dimension_count": 16,
    },
}


def _writer(path, arch):
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (KEYS | OWN.get(arch, {})).items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(
            f"{arch}.{key}", value
        )
    return writer


def _finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Wishes:
    """A file that has every tensor it is asked for, and remembers which."""

    def __init__(self, file):
        self.file, self.metadata, self.tensors = file.file, file.metadata, {}
        self.get_int, self.get_float, self.get_str = file.get_int, file.get_float, file.get_str
        self.get_bool, self.get_ints = file.get_bool, file.get_ints
        self.wanted = {}

    def require(self, name, shape=None):
        self.wanted[name] = shape
        zeros = np.zeros(shape, np.float32)
        return SimpleNamespace(name=name, shape=shape, type="f32", data=zeros.view(np.uint8))


def _random_file(folder, arch, kind, seed=0):
    """A GGUF file of an architecture, two layers deep, its matrices of one type."""
    bare = folder / f"{arch}-bare.gguf"
    _finish(_writer(bare, arch))
    with open_gguf(bare) as file:
        wishes = Wishes(file)
        dev = importlib.import_module("pykv.backends.reference").create()
        registry.find("models", arch.replace("-", "_"), "architecture").GRAPH(wishes, N_VOCAB, dev)
    assert len(wishes.wanted) > 10
    rng, writer = np.random.default_rng(seed), _writer(folder / f"{arch}-{kind}.gguf", arch)
    for name, shape in wishes.wanted.items():
        x = rng.standard_normal(shape)
        x = x * 1.3 / np.sqrt(shape[-1]) if len(shape) > 1 else np.clip(1 + 0.2 * x, 0.5, 2)
        type_ = gguf.GGMLQuantizationType[kind.upper() if len(shape) > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(x.astype(np.float32), type_), raw_dtype=type_)
    _finish(writer)
    return folder / f"{arch}-{kind}.gguf"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """files(name, kind) -> path; each is written once."""
    made = {}

    def get(name, kind):
        if (name, kind) not in made:
            made[name, kind] = _random_file(tmp_path_factory.mktemp(name), name, kind)
        return made[name, kind]

    return get


class Reader:
    """One graph, backend and store; `logits` reads a text in batches of the given sizes."""

    def __init__(self, path, backend, config, **settings):
        self.file = open_gguf(path)
        self.dev = importlib.import_module(f"pykv.backends.{backend}").create(**settings)
        arch = self.file.metadata["general.architecture"].replace("-", "_")
        self.graph = registry.find("models", arch, "architecture").GRAPH(
            self.file, N_VOCAB, self.dev
        )
        if any(s.shared for s in self.graph.shapes):  # one tensor has one type
            config = replace(config, type_v=config.type_k)
        self.store = Store(self.graph.shapes, config, 512, memory=HostMemory(255))
        self.dev.prepare(self.graph.shapes, self.store.formats)

    def logits(self, ids, sizes):
        sequence, out, at = self.store.new_sequence(), [], 0
        while at < len(ids):
            part = ids[at : at + sizes[len(out) % len(sizes)]]
            step = self.store.begin([(sequence, part)], np.arange(len(part), dtype=np.int32))
            out.append(self.dev.run(self.graph, step))
            self.store.commit()
            at += len(part)
        self.store.free(sequence)
        assert not self.store.nbytes
        return np.concatenate(out)


@pytest.fixture
def reader():
    opened = []

    def start(*args, **settings):
        opened.append(Reader(*args, **settings))
        return opened[-1]

    # products of these sizes take longer to hand to a second thread than to do
    with threadpool_limits(1):
        yield start
    for each in opened:
        each.dev.close()
        each.file.close()


IDS = np.random.default_rng(1).integers(0, N_VOCAB, N).astype(np.int32)
CUTS = [[1], [2], [7], [8], [64], [4, 1, 60, 3]]
CACHES = {
    "default": CacheConfig(),
    "exact": CacheConfig(type_k="f32", type_v="f32", sinks=0),
    # pages are encoded while the text is read, in the middle of batches too
    "encoded": CacheConfig(type_k="f16", type_v="bf16", tail_type="f32", residual=5),
}


def test_there_are_models():
    assert {"llama", "gemma3", "deepseek2"} <= set(NAMES)


@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_0"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", NAMES)
def test_deterministic_runs_do_not_depend_on_the_batches(name, cache, kind, files, reader):
    run = reader(files(name, kind), "cpu", CACHES[cache], deterministic=True)
    whole = run.logits(IDS, [N])
    assert whole.std() > 0.1
    for sizes in CUTS:
        np.testing.assert_array_equal(run.logits(IDS, sizes), whole, err_msg=str(sizes))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", NAMES)
def test_batches_agree(name, cache, backend, files, reader):
    run = reader(files(name, "q8_0"), backend, CACHES[cache])
    whole = run.logits(IDS, [N])
    for sizes in CUTS if backend == "cpu" else [[1], [4, 1, 60, 3]]:
        error = np.abs(run.logits(IDS, sizes) - whole).max()
        assert error < ROUNDED[cache], (sizes, error)


@pytest.mark.parametrize("name", NAMES)
def test_backends_agree(name, files, reader):
    path, config = files(name, "q8_0"), CACHES["exact"]
    expected = reader(path, "reference", config).logits(IDS, [N])
    for settings in ({}, {"deterministic": True}, {"threads": 1}):
        error = np.abs(reader(path, "cpu", config, **settings).logits(IDS, [N]) - expected).max()
        assert error < TOLERANCE, (settings, error)


@pytest.mark.parametrize("name", NAMES)
def test_a_token_depends_on_those_before_it_only(name, files, reader):
    run = reader(files(name, "q8_0"), "cpu", CACHES["exact"], deterministic=True)
    whole, changed = run.logits(IDS, [N]), IDS.copy()
    changed[100] = (changed[100] + 1) % N_VOCAB
    other = run.logits(changed, [N])
    np.testing.assert_array_equal(other[:100], whole[:100])
    assert (np.abs(other[100:110] - whole[100:110]).max(axis=1) > 1e-3).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_named_as_the_architecture(name, files):
    """`general.architecture` with - as _: its keys were read with the prefix that it has."""
    with open_gguf(files(name, "f32")) as file:
        arch = file.metadata["general.architecture"]
        module = registry.find("models", arch.replace("-", "_"), "architecture")
        assert module.__name__.rsplit(".", 1)[-1] == name
        assert {key.split(".")[0] for key in file.metadata} <= {arch, "general", "GGUF"}
