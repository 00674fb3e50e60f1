"""kivi2 cache pages for the CPU: layout in formats/kivi4.py."""

from __future__ import annotations

from pykv.kernels.kivi4_numba import functions

encode_keys, encode_values, scores, mix, read_keys, read_values, scores_read = functions("kivi2", 2)
