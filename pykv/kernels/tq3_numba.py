"""tq3 cache pages for the CPU: layout in formats/tq4.py."""

from __future__ import annotations

from pykv.formats import tq3
from pykv.kernels.tq4_numba import functions

encode_keys, encode_values, scores, mix, read_keys, read_values, scores_read = functions(
    "tq3", 3, tq3.FORMAT.levels
)
