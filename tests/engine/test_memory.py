"""The check of free memory: exact sums, exact advice, and what a system says is free."""

from pathlib import Path

import pytest

from pykv.engine import memory
from pykv.errors import OutOfMemoryError

MIB = 1 << 20


def check(free, *, n_ctx=4096, weights=100 * MIB, scratch=20 * MIB, per_token=10_000):
    return memory.check(
        "model.gguf", weights, scratch, n_ctx, lambda n: n * per_token + 5 * MIB, free
    )


@pytest.mark.parametrize("free", [None, 10**12, 125 * MIB + 4096 * 10_000])
def test_what_fits_passes(free):
    assert check(free) is None


def test_the_numbers_and_the_advice():
    # 120 MiB are fixed and 5 MiB of the cache; 2,000 tokens of 10,000 bytes are left
    with pytest.raises(OutOfMemoryError) as error:
        check(125 * MIB + 2000 * 10_000)
    assert str(error.value) == (
        "model.gguf does not fit the 144 MiB of memory that are free (weights 100 MiB, cache of "
        "4,096 tokens 44 MiB, scratch 20 MiB); --ctx-size 1792 would fit, and so may a smaller "
        "--cache-type-k and --cache-type-v"
    )


@pytest.mark.parametrize(
    ("tokens", "n_ctx", "advised"),
    [(256, 4096, 256), (255, 4096, 255), (1, 4096, 1), (200, 201, 200), (4095, 4096, 3840)],
)
def test_the_advice_fits_and_is_round_where_it_can_be(tokens, n_ctx, advised):
    free = 125 * MIB + tokens * 10_000
    with pytest.raises(OutOfMemoryError, match=rf"--ctx-size {advised} would fit"):
        check(free, n_ctx=n_ctx)
    assert check(free, n_ctx=advised) is None


@pytest.mark.parametrize("free", [0, MIB, 125 * MIB])
def test_where_no_context_fits(free):
    with pytest.raises(OutOfMemoryError, match="no context would fit: use a smaller model"):
        check(free)


class TestFreeBytes:
    """Against files in a folder of ours, in the place of the system's."""

    @pytest.fixture
    def system(self, tmp_path, monkeypatch):
        def read_text(path, *args):
            return (tmp_path / str(path).strip("/").replace("/", "-")).read_bytes().decode()

        monkeypatch.setattr(Path, "read_text", read_text)

        def put(path, text):
            (tmp_path / path.strip("/").replace("/", "-")).write_text(text)

        put("/proc/meminfo", "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    5000 kB\n")
        return put

    def test_what_is_available(self, system):
        assert memory.free_bytes() == 5000 * 1024

    def test_no_limit(self, system):
        system("/sys/fs/cgroup/memory.max", "max\n")
        system("/sys/fs/cgroup/memory.current", "100\n")
        assert memory.free_bytes() == 5000 * 1024

    @pytest.mark.parametrize(
        ("limit", "used", "free"),
        [(3_000_000, 1_000_000, 2_000_000), (10**10, 1, 5000 * 1024), (100, 200, 0)],
    )
    @pytest.mark.parametrize(
        ("most", "current"),
        [
            ("memory.max", "memory.current"),
            ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
        ],
    )
    def test_the_limit_of_a_container(self, system, most, current, limit, used, free):
        system(f"/sys/fs/cgroup/{most}", f"{limit}\n")
        system(f"/sys/fs/cgroup/{current}", f"{used}\n")
        assert memory.free_bytes() == free

    def test_on_this_machine(self):
        free = memory.free_bytes()
        assert free is None or 0 < free < 1 << 50
