"""tq3: tq4 with three bits; 3 + 16 / d bits a value.

Layout and error: tq4.py.
Source: that of tq4: Zandieh et al. 2025, TurboQuant, arXiv:2504.19874, section 3.
"""

from __future__ import annotations

from pykv.formats.tq4 import Tq4, mirrored

UPPER = (0.2451, 0.7560, 1.3439, 2.1519)


class Tq3(Tq4):
    """Three bits into normal quantiser levels, and a length."""

    bits, residual = 3, 128
    levels = mirrored(UPPER)


FORMAT = Tq3()
