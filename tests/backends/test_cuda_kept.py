"""Policies on the GPU backend, in Triton's interpreter: pages made of others, and a small model."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton", reason="the GPU's compiler is not installed")
torch = pytest.importorskip("torch", reason="the GPU's tensors are not installed")

from page_values import numbers_of  # noqa: E402
from verbs import Run  # noqa: E402

from pykv.backends import cuda, cuda_kept, transforms  # noqa: E402
from pykv.backends.base import CacheFormats, LayerShape, Move, Step  # noqa: E402
from pykv.backends.cuda_maps import LayerMaps  # noqa: E402
from pykv.backends.cuda_memory import UNIT, DeviceMemory  # noqa: E402
from pykv.config import CacheConfig  # noqa: E402
from pykv.formats.coded import CodedFormat, HeadNumbers, find  # noqa: E402

CPU = torch.device("cpu")
HEADS = 2
TOKENS = np.random.default_rng(1).integers(0, 61, 80).astype(np.int32)


class Pages:
    """Pages of one layer in device memory, read and written by the NumPy formats."""

    def __init__(self, side, page, tail, d, transform="none"):
        self.side, self.d = side, d
        types = (page, tail) if side == 0 else (tail, page)
        maps = (transform, "none") if side == 0 else ("none", transform)
        self.formats = CacheFormats(*types, tail, tail, *maps)
        self.shape = LayerShape(HEADS, HEADS, d, d)
        self.numbers = [
            [numbers_of(name, ("key", "value")[s], d, h) or HeadNumbers() for h in range(HEADS)]
            for s, name in enumerate(types)
        ]
        self.memory = DeviceMemory(CPU, fill=255)
        self.memory.reserve(1 << 20)
        self.maps = LayerMaps(self.shape, self.formats, self.numbers, CPU)
        self.matrix = transforms.matrices(transform, d, self.numbers[side])

    def keyword(self, name, head):
        return {"numbers": self.numbers[self.side][head]} if coded(name) else {}

    def encode(self, name, x, head):
        format_ = find(name)
        encode = (format_.encode_keys, format_.encode_values)[self.side]
        return np.asarray(encode(x, **self.keyword(name, head)))

    def put(self, name, x, head):
        """A page's place, and the values that it stands for."""
        page, format_ = self.encode(name, x, head), find(name)
        place = self.memory.slab(len(page))
        self.memory._bytes(place, len(page))[:] = torch.from_numpy(page)
        decode = (format_.decode_keys, format_.decode_values)[self.side]
        return place, decode(page, x.shape[1], 64, **self.keyword(name, head))

    def bytes(self, place, count):
        start = self.memory.pool.data_ptr() + int(place) * UNIT
        return np.frombuffer((np.ctypeslib.ctypes.c_uint8 * count).from_address(start), np.uint8)


def coded(name):
    return isinstance(find(name), CodedFormat)


@pytest.mark.parametrize(
    ("kind", "side", "page", "tail", "d", "transform"),
    [
        ("tail", 0, "q4_0", "f16", 40, "none"),
        ("tail", 1, "q4_0", "bf16", 40, "none"),
        ("seal", 0, "kivi2", "f16", 40, "none"),
        ("seal", 1, "q8_0", "f32", 32, "hadamard"),
        ("page", 0, "q4_0", "f16", 64, "none"),
        ("page", 1, "kivi2", "f16", 40, "none"),
        ("page", 0, "nuq4:outliers=1%", "f16", 64, "none"),
        ("page", 1, "nuq4:outliers=2%", "f16", 40, "none"),
        ("page", 0, "tq3", "f16", 40, "none"),
        ("page", 1, "fp8_e4m3", "f16", 32, "none"),
    ],
)
def test_pages_are_made_of_tokens_of_others(kind, side, page, tail, d, transform):
    """Bytes are those of the NumPy format's page of the decoded tokens."""
    rng, pages = np.random.default_rng(d), Pages(side, page, tail, d, transform)
    old, new = {"tail": (tail, tail), "seal": (tail, page), "page": (page, page)}[kind]
    heads, sources, expected, picks = np.array([1, 0, 1]), [], [], []
    for n, head in enumerate(heads):
        held = [pages.put(old, rng.standard_normal((64, d)).astype(np.float32), head)
                for _ in range(2)]  # fmt: skip
        pick = rng.integers(0, 64 if n == 1 else 128, 64).astype(np.int32)
        pick[rng.random(64) < 0.1] = -1
        sources.append([place if n != 1 or i == 0 else 0 for i, (place, _) in enumerate(held)])
        tokens = np.concatenate([x for _, x in held])[np.maximum(pick, 0)]
        tokens = np.where(pick[:, None] >= 0, tokens, np.float32(0))
        if pages.matrix is not None:
            matrix = torch.from_numpy(pages.matrix[0].copy())
            tokens = torch.matmul(torch.from_numpy(tokens), matrix).numpy()
        expected.append(pages.encode(new, tokens, head))
        picks.append(pick)
    places = np.array([pages.memory.slab(len(expected[0])) for _ in heads])
    work = Move(0, side, kind, places, heads, np.array(sources), np.stack(picks))
    none = np.zeros(0, np.int64)
    step = Step([pages.shape], [pages.formats], none, none, none, none, [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_kept, "SCRATCH_BYTES", 2 * 2 * 64 * d * 4)  # two pages at a time
        cuda_kept.move(CPU, pages.memory.pool, [pages.maps], step, [work])
    for place, page_bytes in zip(places, expected, strict=True):
        found = pages.bytes(place, len(page_bytes)).copy()
        # what lies between a page's last number and its end, below 64 bytes, is nobody's
        nobodys = np.cumprod(found[::-1] == 255)[::-1].astype(bool)
        assert nobodys[:-63].sum() == 0
        found[nobodys] = page_bytes[nobodys]
        np.testing.assert_array_equal(found, page_bytes)


class Conversation:
    """A prompt, its end, single tokens, and a second prompt beside one of another sequence.

    `kept` and `sums` are the first layer's.
    """

    def __init__(self, backend, config, first, more, last):
        run = Run(backend, config)
        out = [run.read(TOKENS[:first])]
        self.sums = self.end(run)
        out.append(run.read(TOKENS[first : first + more], 1))
        if last:
            other, at = run.store.new_sequence(), first + more
            out.append(run.step([(run.sequence, TOKENS[at : at + last]), (other, TOKENS[:2])]))
        self.logits = np.concatenate(out)
        self.kept = [run.store.positions(run.sequence, 0, h) for h in range(2)]
        self.nbytes = run.store.nbytes

    @staticmethod
    def end(run):
        ending = run.store.end_prompt(run.sequence)
        if ending is None:
            return None
        backend = run.backend
        sums = {n: backend.window_sums(ending.step, n, q) for n, q in ending.queries.items()}
        backend.move(ending.step, run.store.select(run.sequence, ending, sums))
        run.store.commit()
        return sums[0]


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (CacheConfig("f16", "f16", policy="sinks", budget="7"), (8, 1, 0)),
        (CacheConfig("f16", "f16", policy="h2o", budget="7"), (8, 2, 0)),
        (CacheConfig("f16", "f16", policy="snapkv:window=4", budget="9"), (13, 1, 2)),
    ],
)  # fmt: skip
def test_a_model_keeps_what_it_keeps_on_the_cpu(config, sizes, make_cpu):
    check_model(config, sizes, make_cpu, 0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (CacheConfig("kivi2", "f16", policy="sinks", budget="7", position="read"), (8, 1, 0)),
        (CacheConfig("q4_0", "q4_0", residual=0, policy="snapkv:window=4", budget="40"),
         (72, 1, 1)),
        (CacheConfig("q8_0", "q4_0", residual=0, policy="snapkv:window=4", budget="40",
                     transform_k="random", transform_v="random"), (72, 1, 1)),
        (CacheConfig("q8_0", "q4_0", residual=0, policy="h2o", budget="12"), (78, 2, 0)),
    ],
)  # fmt: skip
def test_pages_are_encoded_and_keys_turned_when_they_are_read(config, sizes, make_cpu):
    check_model(config, sizes, make_cpu, 0.3)  # a code may be rounded to its neighbour


def check_model(config, sizes, make_cpu, bound):
    """The same conversation on both; tiles are multiplied in float16."""
    cpu = Conversation(make_cpu(1), config, *sizes)
    gpu = Conversation(cuda.create(device="cpu", deterministic=True), config, *sizes)
    assert gpu.kept == cpu.kept
    assert gpu.nbytes == cpu.nbytes
    np.testing.assert_allclose(gpu.logits, cpu.logits, rtol=0, atol=bound)
    if cpu.sums is not None:
        np.testing.assert_allclose(gpu.sums, cpu.sums, rtol=0, atol=4 * 2.0**-11 * 18)
