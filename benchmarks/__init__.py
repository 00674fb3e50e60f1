"""Measures pykv, beside llama.cpp where it is installed.  Timings live here and nowhere else."""
