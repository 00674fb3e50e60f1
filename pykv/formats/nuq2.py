"""nuq2: two bits into uneven levels.

Layout and error: nuq4.py.
Source: that of nuq4: Hooper et al. 2024, KVQuant, arXiv:2401.18079, section 3.
"""

from __future__ import annotations

from pykv.formats.nuq4 import Nuq4


class Nuq2(Nuq4):
    """Two bits into levels of the layer."""

    bits, residual = 2, 128


FORMAT = Nuq2()
