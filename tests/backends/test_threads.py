"""How many threads: a made-up /sys and a made-up affinity."""

from __future__ import annotations

import os

import numpy as np
import pytest

from pykv.backends import threads


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that lays out a machine; cores: {logical CPU: (package, core)}."""

    def make(cores, allowed=None, quota=None):
        files = {f"fs/cgroup/{name}": text for name, text in (quota or {}).items()}
        for cpu, (package, core) in cores.items():
            folder = f"devices/system/cpu/cpu{cpu}/topology"
            files |= {f"{folder}/core_id": f"{core}\n"}
            files |= {f"{folder}/physical_package_id": f"{package}\n"}
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(threads, "_SYSTEM", tmp_path)
        allowed = set(cores) if allowed is None else allowed
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed, raising=False)

    return make


SMT = {cpu: (0, cpu % 4) for cpu in range(8)}  # four cores, two threads each


def test_physical_cores_count_once(machine):
    machine(SMT)
    assert threads.default_threads() == 4


def test_cores_of_two_packages_are_different_ones(machine):
    machine({0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)})
    assert threads.default_threads() == 4


def test_affinity_limits(machine):
    machine(SMT, allowed={1, 5, 2})  # 1 and 5 are one core
    assert threads.default_threads() == 2


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 4), ("300000 100000", 3), ("250000 100000", 2), ("50000 100000", 1), ("", 4)],
)
def test_a_quota_of_cgroup_2(machine, quota, expected):
    machine(SMT, quota={"cpu.max": quota})
    assert threads.default_threads() == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", 4), ("200000", 2), ("1000", 1)])
def test_a_quota_of_cgroup_1(machine, quota, expected):
    machine(SMT, quota={"cpu/cpu.cfs_quota_us": quota, "cpu/cpu.cfs_period_us": "100000"})
    assert threads.default_threads() == expected


def test_where_the_system_tells_nothing_logical_cpus_count(machine):
    machine({}, allowed={0, 1, 2})
    assert threads.default_threads() == 3


def test_where_there_is_no_affinity(machine, monkeypatch):
    machine({})
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert threads.default_threads() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert threads.default_threads() == 1


def test_the_blas_gets_its_threads_back():
    from threadpoolctl import ThreadpoolController

    def counts():
        return [c["num_threads"] for c in ThreadpoolController().info() if c["user_api"] == "blas"]

    np.ones((2, 2)) @ np.ones((2, 2))  # so that it is loaded
    before = counts()
    assert before
    blas = threads.BlasThreads()
    for _ in range(2):
        with blas.one():
            assert set(counts()) == {1}
        assert counts() == before
