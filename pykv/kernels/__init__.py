"""Compiled kernels: Numba on the CPU."""
