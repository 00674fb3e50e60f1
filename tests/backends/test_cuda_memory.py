"""Pages, tables and changing numbers in device memory, here on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU's tensors are not installed")

from pykv.backends import cuda_memory  # noqa: E402
from pykv.backends.base import LayerShape  # noqa: E402
from pykv.backends.cuda_memory import UNIT, Changing, DeviceMemory, Tables  # noqa: E402
from pykv.cache.store import Store  # noqa: E402
from pykv.config import CacheConfig  # noqa: E402
from pykv.errors import OutOfMemoryError  # noqa: E402

CPU = torch.device("cpu")
SHAPES = [LayerShape(4, 2, 32, 32), LayerShape(2, 1, 32, 64, window=70)]


def page(memory, place, n_bytes):
    """A page's bytes by its place, as a kernel finds them."""
    start = memory.pool.data_ptr() + place * UNIT
    return np.frombuffer((np.ctypeslib.ctypes.c_uint8 * n_bytes).from_address(start), np.uint8)


def test_slabs_lie_side_by_side_and_later_ones_are_found(monkeypatch):
    monkeypatch.setattr(cuda_memory, "LEAST_SLAB_BYTES", 4096)
    memory = DeviceMemory(CPU, fill=255)
    memory.reserve(3000)
    places = [memory.slab(n) for n in (64, 100, 1000, 2000, 5000, 64, 4000)]
    sizes = [64, 128, 1024, 2048, 5056, 64, 4032]
    assert 0 not in places
    assert memory.reserved_bytes >= sum(sizes)
    ends = sorted((p * UNIT, p * UNIT + n) for p, n in zip(places, sizes, strict=True))
    assert all(a[1] <= b[0] for a, b in zip(ends, ends[1:], strict=False))
    assert memory.pool.data_ptr() % UNIT == 0
    for place, n in zip(places, sizes, strict=True):
        assert (page(memory, place, n) == 255).all()
    far, near = places[4], places[0]
    memory._bytes(far, 64).copy_(torch.arange(64, dtype=torch.uint8))
    memory.copy(far, near, 64)
    np.testing.assert_array_equal(page(memory, near, 64), np.arange(64))


def test_a_gpu_that_is_full_is_said_in_a_sentence(monkeypatch):
    def full(*_, **__):
        raise torch.cuda.OutOfMemoryError("full")

    monkeypatch.setattr(cuda_memory.torch, "empty", full)
    with pytest.raises(OutOfMemoryError, match="no 64 MiB left for the cache; use a smaller"):
        DeviceMemory(CPU).reserve(64 << 20)


def test_changing_numbers_go_across_together():
    arrays = {
        "tokens": np.arange(3, dtype=np.int32), "none": np.empty((0, 2), np.int64),
        "cos": np.ones((2, 5), np.float32), "records": np.zeros((2, 3, 16), np.int64),
    }  # fmt: skip
    changing = Changing(CPU, arrays)
    changing.host["records"][1, 2, 5] = 77
    changing.host["cos"][:] = 0.5
    assert int(changing.far["tokens"].data_ptr()) % UNIT == 0
    changing.send()
    for name, array in changing.host.items():
        np.testing.assert_array_equal(changing.far[name].numpy(), array, strict=True)
    assert changing.far["records"][1, 2, 5] == 77


class Cache:
    """A store in device memory, and its tables' copies."""

    def __init__(self):
        config = CacheConfig("q4_0", "q8_0", residual=0)
        self.store = Store(SHAPES, config, 500, DeviceMemory(CPU))
        self.tables = Tables(CPU)

    def step(self, *parts):
        batch = [(s, np.zeros(n, np.int32)) for s, n in parts]
        step = self.store.begin(batch, np.zeros(1, np.int32))
        self.tables.update(step)
        return step

    def check(self, step):
        """What kernels find at the records' addresses is what the store's tables hold."""
        records = np.zeros_like(step.records)
        self.tables.records(step, records)
        np.testing.assert_array_equal(records[..., 3:], step.records[..., 3:])
        for part in step.parts:
            tables = part.sequence.tables
            entries = self.store._paging.entries(int(step.positions[part.first]) + part.count)
            for layer in range(len(SHAPES)):
                for row in (part.first, part.first + part.count - 1):
                    for side in (0, 1):
                        capacity = int(records[layer, row, 2])
                        found = np.ctypeslib.as_array(
                            (np.ctypeslib.ctypes.c_int64 * (2 * capacity)).from_address(
                                int(records[layer, row, side])
                            )
                        ).reshape(2, capacity)[: SHAPES[layer].n_kv, :entries]
                        lowest = self.store._paging.entry(int(records[layer, row, 6]))
                        expected = tables[side, layer, : SHAPES[layer].n_kv, :entries]
                        np.testing.assert_array_equal(found[:, lowest:], expected[:, lowest:])


def encode(tables, step):
    """What the encoders do: the device's entries point to the new pages."""
    for round_ in step.rounds:
        for layer in round_.moves:
            for moves in layer:
                for entry, new in tables.moves(step, moves).tolist():
                    np.ctypeslib.ctypes.c_int64.from_address(entry).value = new


def test_copies_follow_the_stores_tables(monkeypatch):
    cache = Cache()
    a, b = cache.store.new_sequence(), cache.store.new_sequence()
    for parts in ([(a, 40)], [(a, 1), (b, 3)], [(a, 200), (b, 70)], [(a, 1)], [(b, 1), (a, 90)]):
        step = cache.step(*parts)
        encode(cache.tables, step)
        cache.check(step)
        cache.store.commit()
    c = cache.store.fork(a)
    cache.store.truncate(a, 150)
    for parts in ([(c, 1), (a, 2)], [(a, 130), (c, 5)]):
        step = cache.step(*parts)
        encode(cache.tables, step)
        cache.check(step)
        cache.store.commit()


def test_a_batch_that_broke_off_leaves_nothing_behind():
    cache = Cache()
    a = cache.store.new_sequence()
    encode(cache.tables, cache.step((a, 100)))
    cache.store.commit()
    encode(cache.tables, cache.step((a, 70)))
    cache.store.abort()
    other = cache.store.new_sequence()  # takes the pages that were given back
    encode(cache.tables, cache.step((other, 90)))
    cache.store.commit()
    step = cache.step((a, 3), (other, 1))
    encode(cache.tables, step)
    cache.check(step)


def test_few_copies_are_kept_and_none_of_a_sequence_that_is_gone(monkeypatch):
    monkeypatch.setattr(cuda_memory, "MOST_TABLES", 2)
    cache = Cache()
    sequences = [cache.store.new_sequence() for _ in range(4)]
    for s in sequences:
        encode(cache.tables, cache.step((s, 5)))
        cache.store.commit()
    assert len(cache.tables._copies) == 2
    cache.check(cache.step(*((s, 1) for s in sequences)))
    cache.store.commit()
    for s in sequences:
        cache.store.free(s)
    cache.store._open = []
    assert len(cache.tables._copies) <= 2
