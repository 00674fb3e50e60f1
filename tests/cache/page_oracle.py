"""What a layer's pages must hold, worked out from the sentences of the design."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from page_values import numbers_of

from pykv.backends import transforms
from pykv.backends.base import PAGE, Rope
from pykv.config import CacheConfig
from pykv.formats.coded import HeadNumbers
from pykv.formats.coded import find as codec

SIDES = ("key", "value")
TURNED = ("q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")  # Hadamard under auto
ROTATED = ("tq3", "tq4")
# newest tokens that stay exact: none for 8 bits and more, 64 for 4 and 5, 128 for 2 and 3
RESIDUALS = dict.fromkeys((*TURNED, "kivi4", "tq4", "nuq4"), 64) | dict.fromkeys(
    ("kivi2", "kivi3", "tq3", "nuq2", "nuq3"), 128
)
ROPE = Rope(True, np.array([1.0, 0.03]))  # where keys are turned as they are read


class Formats(NamedTuple):
    """How keys and values are kept; the fields of CacheConfig that say so."""

    page_k: str
    page_v: str
    tail: str | None = None
    transform_k: str = "auto"
    transform_v: str = "auto"
    override: str | None = None
    position: str = "write"
    calibrated: bool = False  # numbers of a calibration file are there

    def config(self, sinks, residual):
        """nuq's ranges are measured without the first four tokens, so that it wants them exact."""
        if "nuq" in f"{self.page_k} {self.page_v}":
            sinks = max(sinks, 4)
        return CacheConfig(
            self.page_k,
            self.page_v,
            sinks,
            residual,
            self.tail,
            transform_k=self.transform_k,
            transform_v=self.transform_v,
            override=self.override,
            position=self.position,
        )


# exact pages, encoded ones, and one side of each; then codes
FORMATS = [
    Formats("f16", "f16"),
    Formats("f32", "bf16"),
    Formats("f16", "f16", "f32"),
    Formats("f32", "f32", "f16"),
    Formats("bf16", "f16", "f16"),
    Formats("f16", "bf16", "f16"),
    Formats("q8_0", "q5_1"),
    Formats("kivi3", "f16"),
    Formats("f16", "f16", None, "random", "none"),
    Formats("int8", "kivi2", "f32", "random", "none"),
    Formats("q4_0", "fp8_e4m3", "bf16", "none", "random"),
    Formats("f16", "tq3", override="0=k:q5_0,v:kivi2;2=k:iq4_nl"),
    Formats("kivi4", "q4_1", override="1=k:f16,v:f16"),
    Formats("fp8_e5m2", "tq4", override="0-1=v:int8"),
    Formats("kivi3", "fp8_e4m3", position="read", calibrated=True),
    Formats("f16", "q8_0", None, "none", "lowrank:2", position="read", calibrated=True),
    Formats("q5_0", "kivi4", "f32", "lowrank:3", calibrated=True),
    Formats("nuq4:outliers=1%", "nuq3", calibrated=True),
    Formats("nuq2", "nuq4:outliers=3%", "f32", "auto", "random", calibrated=True),
]
ENCODED = FORMATS[2:]


def coded(format_):
    """Whether its pages hold codes."""
    return hasattr(format_, "bits")


def encode(format_, side, x, **keyword):
    return (format_.encode_values if side else format_.encode_keys)(x, **keyword)


def decode(format_, side, page, d, slots=PAGE, **keyword):
    return (format_.decode_values if side else format_.decode_keys)(page, d, slots, **keyword)


def bytes_at(address, n_bytes):
    return np.frombuffer((ctypes.c_uint8 * n_bytes).from_address(address), np.uint8)


def cells_of(page, format_, side, d, slots, used):
    """A page without what fills it up, its last axis but one the first `used` tokens.

    Of codes, whose pages are always full, the bytes as they lie.
    """
    if coded(format_):
        n = format_._code_bytes(d, SIDES[side])
        n += 2 * format_.n_parameters * format_._groups(d, SIDES[side]) + 4 * format_.n_outliers(d)
        return page[None, None, :n]
    numbers = page.view(format_.layout)
    if side == 0:
        return numbers[: d * slots].reshape(d, slots, 1)[:, :used]
    blocks = -(-d // 32)
    return numbers[: blocks * slots * 32].reshape(blocks, slots, 32)[:, :used]


def rounded(format_, side, x):
    """As `format_` holds x [n, d], 64 tokens to a page."""
    n, d = x.shape
    filled = np.zeros((-(-n // PAGE) * PAGE, d), np.float32)
    filled[:n] = x
    for start in range(0, n, PAGE):
        page = encode(format_, side, filled[start : start + PAGE])
        filled[start : start + PAGE] = decode(format_, side, page, d)
    return filled[:n]


def turned(x, rope, positions):
    """f64 [n, ..., d], each row turned by its position: pairs of channels as complex numbers."""
    n, half = rope.n_rot, rope.n_rot // 2
    first, second = (slice(0, half), slice(half, n)) if rope.neox else (
        slice(0, n, 2), slice(1, n, 2))  # fmt: skip
    angles = np.multiply.outer(positions, rope.inv_freq)
    angles = angles.reshape(len(x), *[1] * (x.ndim - 2), half)
    z = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles) * rope.magnitude
    y = x.astype(np.float64)
    y[..., first], y[..., second] = z.real, z.imag
    return y


class Kept(NamedTuple):
    """How a layer keeps keys, or values."""

    page: object  # codec
    tail: object
    matrices: np.ndarray | None  # of encoded pages, f32 [heads or 1, d, r]
    numbers: list  # of each head out of a calibration file, or none

    @property
    def exact(self):
        return self.page is self.tail and self.matrices is None

    def matrix(self, head):
        return None if self.matrices is None else self.matrices[head % len(self.matrices)]

    def keyword(self, head):
        """What the page's codec is told of a head."""
        if getattr(self.page, "calibration", "none") == "none" or not self.numbers:
            return {}
        return {"numbers": self.numbers[head]}


def numbers_for(name, side, d, transform, n_kv):
    """Numbers of a calibration file for each head."""
    rank = transforms.width(transform, d)
    numbers = [numbers_of(name, SIDES[side], rank, head) or HeadNumbers() for head in range(n_kv)]
    if rank == d:
        return numbers
    bases = [np.linalg.qr(np.random.default_rng(h).normal(size=(d, d)))[0] for h in range(n_kv)]
    return [replace(n, basis=b.astype(np.float32)) for n, b in zip(numbers, bases, strict=True)]


def kept(name, side, config, shape, calibrated):
    d = (shape.d_k, shape.d_v)[side]
    transform = (config.transform_k, config.transform_v)[side]
    if transform == "auto":
        transform = "hadamard" if name in TURNED else "random" if name in ROTATED else "none"
        if transform == "hadamard" and d % 32:
            transform = "random"
    tail = config.tail_type or (name if name in ("f32", "bf16") else "f16")
    numbers = numbers_for(name, side, d, transform, shape.n_kv) if calibrated else []
    if transform.startswith("lowrank"):
        matrices = np.stack([n.basis for n in numbers])[:, :, : transforms.width(transform, d)]
    else:
        matrices = transforms.matrix(transform, d)
        matrices = None if matrices is None else matrices[None]
    return Kept(codec(name), codec(tail), matrices, numbers)


class Layer:
    """How one layer's cache is kept."""

    def __init__(self, config, types, shape, calibrated):
        self.sides = [kept(types[side], side, config, shape, calibrated) for side in (0, 1)]
        self.exact = all(side.exact for side in self.sides)
        self.residual = config.residual
        if config.residual is None:
            self.residual = max(RESIDUALS.get(name.partition(":")[0], 0) for name in types)
        self.sinks = config.sinks

    def n_encoded(self, n):
        """Pages that are encoded once n tokens are there: the tail holds under residual + 64."""
        if self.exact:
            return 0
        pages = 0
        while n - self.sinks - PAGE * pages >= self.residual + PAGE:
            pages += 1
        return pages


def layers_of(config, shapes, calibrated=False):
    types = [[config.type_k, config.type_v] for _ in shapes]
    for part in config.override.split(";") if config.override else []:
        span, _, sides = part.partition("=")
        first, _, last = span.partition("-")
        for layer in range(int(first), int(last or first) + 1):
            for side in sides.split(","):
                which, name = side.split(":", 1)
                types[layer]["kv".index(which)] = name
    layers = zip(types, shapes, strict=True)
    return [Layer(config, pair, shape, calibrated) for pair, shape in layers]
