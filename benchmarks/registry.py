"""The benchmarks by name, each with the tests that must be green before its figure counts."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks import cache_kernel, cache_quality, cache_speed, policies, process, speed
from benchmarks.report import Benchmark

_KERNELS = ("tests/contract/test_every_kernel.py", "tests/contract/test_every_model.py")
_MODELS = ("tests/models", "tests/backends")
_CACHES = ("tests/contract/test_every_cache_format.py", "tests/formats", "tests/cache")
_POLICIES = ("tests/policies", "tests/cache", "tests/backends/test_cpu.py")


@dataclass(frozen=True)
class Entry:
    """A benchmark and its tests."""

    run: Benchmark
    tests: tuple[str, ...]

    @property
    def what(self) -> str:
        """The first line of its docstring."""
        return (self.run.__doc__ or "").splitlines()[0]


BENCHMARKS = {
    "decode": Entry(speed.decode, (*_KERNELS, *_MODELS)),
    "sampler": Entry(speed.sampler, ("tests/engine/test_sampler.py",)),
    "prompt": Entry(speed.prompt, (*_KERNELS, *_MODELS)),
    "long": Entry(speed.long, (*_KERNELS, *_MODELS, "tests/cache")),
    "busy": Entry(speed.busy, _KERNELS),
    "cache-decode": Entry(cache_speed.decode, (*_CACHES, *_KERNELS, *_MODELS)),
    "cache-prompt": Entry(cache_speed.prompt, (*_CACHES, *_KERNELS, *_MODELS)),
    "cache-position": Entry(cache_speed.position, (*_CACHES, *_KERNELS, *_MODELS)),
    "cache-kernel": Entry(cache_kernel.kernel, (*_CACHES, "tests/backends")),
    "cache-bytes": Entry(cache_quality.nbytes, _CACHES),
    "cache-quality": Entry(
        cache_quality.quality,
        (*_CACHES, *_MODELS, "tests/engine/test_perplexity.py", "tests/engine/test_divergence.py"),
    ),
    "policy-decode": Entry(policies.policy_decode, _POLICIES),
    "policy-prompt": Entry(policies.policy_prompt, _POLICIES),
    "policy-stream": Entry(policies.policy_stream, _POLICIES),
    "start": Entry(process.start, ("tests/cli/test_generate.py",)),
    "compile": Entry(process.compile, ("tests/cli/test_generate.py",)),
    "memory": Entry(process.memory, ("tests/cache",)),
    "open": Entry(process.opening, ("tests/gguf",)),
    "import": Entry(process.importing, ("tests/contract/test_imports.py",)),
}
