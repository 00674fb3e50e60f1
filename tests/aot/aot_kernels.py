"""Which kernels are compiled for GPUs in every run, and the processes that compile them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from pykv.cache.layout import cache_types

SCRIPT = Path(__file__).parent / "compile_kernels.py"
PROCESSES = 2
PAIRS = ("q8_0/q8_0", "q4_0/q4_0", "kivi2/kivi2", "kivi4/kivi2")
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
WIDTHS = (64, 96, 128, 256)
EVERY = [*(f"{t}/f16" for t in cache_types()), *(f"f16/{t}" for t in cache_types() if t != "f16")]
EITHER_SIDE = [f"attend@{pair}@128@{where}" for pair in EVERY for where in ("sm_90", "gfx942")]
USUAL = [f"attend@{pair}@{d}@{where}" for pair in PAIRS for d in WIDTHS for where in TARGETS]
# what every run compiles of both lists; all of them take 11 minutes of one core, and are slow
BY_16_BYTES = ("q8_0", "q4_0", "kivi2")
OFTEN = list(
    dict.fromkeys(
        [
            "attend@f16/f16@128@sm_90",
            *(f"attend@{t}/f16@128@sm_90" for t in BY_16_BYTES),
            *(f"attend@f16/{t}@128@sm_90" for t in BY_16_BYTES),
            *[each for each in EITHER_SIDE if each.endswith("sm_90")][::4],
            *[each for each in EITHER_SIDE if each.endswith("gfx942")][3::13],
            *(f"attend@q4_0/q4_0@{d}@sm_90" for d in (64, 256)),
            "attend@kivi4/kivi2@128@sm_80",
            "attend@q8_0/q8_0@128@sm_100",
            "attend@q4_0/q4_0,kept@128@sm_90",
            "sums@q4_0/q4_0@128@sm_90",
        ]
    )
)


class Compilation:
    """Processes of the script, each taking a share; kernels of other runs are not reused."""

    def __init__(self, specs, folder, processes=PROCESSES, nice=0):
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment["TRITON_CACHE_DIR"] = str(folder)
        self.specs, self._running = specs, []
        for i in range(min(processes, len(specs))):
            said, errors = Path(folder, f"said{i}"), Path(folder, f"errors{i}")
            arguments = [sys.executable, str(SCRIPT), *specs[i::processes]]
            arguments = ["nice", "-n", str(nice), *arguments] if nice else arguments
            with said.open("w") as out, errors.open("w") as err:
                process = subprocess.Popen(arguments, stdout=out, stderr=err, env=environment)
            self._running.append((process, said, errors))

    def result(self):
        """What the compiler says of each kernel, once all are there."""
        found = []
        for process, said, errors in self._running:
            assert process.wait() == 0, errors.read_text()[-3000:]
            found += [json.loads(line) for line in said.read_text().splitlines()]
        assert len(found) == len(self.specs)
        return found

    def stop(self):
        """End what still runs."""
        for process, _, _ in self._running:
            if process.poll() is None:
                process.kill()
                process.wait()
