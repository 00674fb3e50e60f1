"""nuq3: three bits into uneven levels.

Layout and error: nuq4.py.
Source: that of nuq4: Hooper et al. 2024, KVQuant, arXiv:2401.18079, section 3.
"""

from __future__ import annotations

from pykv.formats.nuq4 import Nuq4


class Nuq3(Nuq4):
    """Three bits into levels of the layer."""

    bits, residual = 3, 128


FORMAT = Nuq3()
