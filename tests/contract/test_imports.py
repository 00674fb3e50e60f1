"""What an import loads: nothing that is not needed, and fast."""

from __future__ import annotations

import subprocess
import sys

import pytest

RUNS = 5  # the fastest counts: a busy machine only ever adds time
BUDGET_S = 0.25
HELP_ALLOWED = {"pykv", "typer", "click", "shellingham", "annotated_doc", "typing_extensions"}
HEAVY = {"numba", "llvmlite", "torch", "triton", "transformers", "matplotlib"}


def loaded_by(code):
    """Top-level modules outside the standard library that the code adds, and its seconds."""
    script = (
        "import sys, time\n"
        "before, started = set(sys.modules), time.perf_counter()\n"
        f"{code}\n"
        "seconds = time.perf_counter() - started\n"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
        "sys.stderr.write(f'{seconds} ' + ' '.join(new - set(sys.stdlib_module_names)))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    seconds, *modules = run.stderr.split()
    return {m for m in modules if m != "__main__"}, float(seconds)


def test_importing_pykv_loads_no_third_party_and_is_fast():
    runs = [loaded_by("import pykv") for _ in range(RUNS)]
    assert runs[0][0] == {"pykv"}
    assert min(seconds for _, seconds in runs) < BUDGET_S


def test_help_loads_typer_only_and_is_fast():
    code = "from pykv.cli import app\nassert app.run(['--help']) == 0"
    runs = [loaded_by(code) for _ in range(RUNS)]
    assert runs[0][0] <= HELP_ALLOWED
    assert min(seconds for _, seconds in runs) < BUDGET_S


@pytest.mark.parametrize(
    "code",
    [
        "import pykv; pykv.load, pykv.Model, pykv.load_tokenizer",
        "import pykv.engine.model, pykv.backends.base, pykv.cache.store, pykv.models.llama",
        "import pykv.formats.q4_0, pykv.gguf, pykv.tokenizer",
    ],
)
def test_no_compiler_and_no_torch_before_a_backend_is_chosen(code):
    assert not loaded_by(code)[0] & HEAVY


def test_the_tokenizer_package_loads_no_numpy():
    # an application that only counts tokens need not pay for it
    assert "numpy" not in loaded_by("import pykv.tokenizer.metadata, pykv.tokenizer.spm")[0]
