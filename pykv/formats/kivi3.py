"""kivi3: kivi4 with three bits; 4 bits a value.

Layout and error: kivi4.py.
Source: that of kivi4: Liu et al. 2024, KIVI, arXiv:2402.02750, section 3.
"""

from __future__ import annotations

from pykv.formats.kivi4 import Kivi4


class Kivi3(Kivi4):
    """Three bits, a scale and a minimum."""

    bits, residual = 3, 128


FORMAT = Kivi3()
