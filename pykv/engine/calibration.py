"""Calibration files: numbers of cache types and transforms, measured on a text for one model.

A file is a GGUF in the folder `calibration` of pykv's cache, named by the model's hash and the
type. Per layer it holds, each where the type has it: `blk.N.k_scale` and `k_centre` f32 [G, D] or
[G], `k_levels` [2**bits], `k_basis` [G, D, D] whose columns fall in weight, `k_singular` [G, D],
and the same with `v_`. It also holds what it is good for: the hash, the KV heads' numbers and
widths, and the settings of RoPE, and a hash of its own arrays. It is read for that model only, and
only while it is whole.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pykv.backends.base import F32, LayerShape
from pykv.engine import hub
from pykv.errors import ConfigError, GGUFError
from pykv.formats.coded import HeadNumbers
from pykv.gguf import GGUFFile, open_gguf
from pykv.gguf.writer import write_gguf

if TYPE_CHECKING:
    from pykv.engine.model import Model

Side = Literal["key", "value"]
VERSION = 2
PIECE_BYTES = 4096  # of a tensor that its model's hash reads at the start, middle and end
LOWRANK = "lowrank"
_KEY = "pykv.calibration"
_NAME_DIGITS = 16  # of the hash, in a file's name


@dataclass(frozen=True)
class Identity:
    """What a calibration belongs to."""

    digest: str  # hash of the weights, 64 hexadecimal digits
    heads: tuple[tuple[int, int, int], ...]  # per layer: KV heads, channels of keys and of values
    rope: str  # the file's settings of it, as text
    name: str  # of the model's file, for messages


@dataclass(frozen=True, eq=False)
class Calibration:
    """The numbers of one cache type, or of `lowrank`, for all layers."""

    type: str  # with its options: nuq4:outliers=1%
    tokens: int  # that were read
    layers: tuple[dict[str, F32], ...]  # arrays by name: k_scale, v_levels, ...

    def numbers(self, layer: int, side: Side, head: int) -> HeadNumbers:
        """What a KV head's pages are encoded and decoded with."""
        arrays, prefix = self.layers[layer], side[0]
        scale, centre = (arrays.get(f"{prefix}_{what}") for what in ("scale", "centre"))
        return HeadNumbers(
            None if scale is None else scale[head],
            None if centre is None else centre[head],
            arrays.get(f"{prefix}_levels"),
        )

    def basis(self, layer: int, side: Side, rank: int) -> F32:
        """Of `lowrank`: f32 [G, D, rank]; keys or values x become x @ basis[head]."""
        return self.layers[layer][f"{side[0]}_basis"][:, :, :rank]

    def singular_values(self, layer: int, side: Side) -> F32:
        """Of `lowrank`: f32 [G, D], falling."""
        return self.layers[layer][f"{side[0]}_singular"]


def folder() -> Path:
    """Where calibration files lie; it need not exist yet."""
    return hub.cache_dir() / "calibration"


def path_of(type_: str, identity: Identity) -> Path:
    """The file of a type for a model, whether or not it exists."""
    words = type_.replace("%", "").replace(":", "-").replace("=", "-")
    return folder() / f"{identity.digest[:_NAME_DIGITS]}.{words}.gguf"


def identity(file: GGUFFile, shapes: Sequence[LayerShape]) -> Identity:
    """Who a model is: its weights, its heads, its RoPE.

    The hash covers every tensor's name, shape and type and three pieces of its bytes, so that it
    takes milliseconds; metadata that keys do not depend on, a chat template say, may change.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(file.tensors.items()):
        digest.update(f"{name} {tensor.shape} {tensor.type}\n".encode("utf-8", "surrogateescape"))
        data = tensor.data.reshape(-1)
        for start in (0, data.size // 2, data.size - PIECE_BYTES):
            digest.update(data[max(start, 0) :][:PIECE_BYTES].tobytes())
    marks = (".rope.", ".context_length")
    settings = (f"{k}={_text(v)}" for k, v in file.metadata.items() if any(m in k for m in marks))
    return Identity(
        digest.hexdigest(),
        tuple((s.n_kv, s.d_k, s.d_v) for s in shapes),
        "; ".join(sorted(settings)),
        file.file,
    )


def _text(value: Any) -> str:
    return str(value.tolist()) if isinstance(value, np.ndarray) else str(value)


def place_for(type_: str, identity: Identity) -> Path:
    """`path_of`, where a file can be written or replaced.

    Raises ConfigError: something else lies there; OSError: its folder cannot be written to.
    """
    path = path_of(type_, identity)
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is no file, and a calibration belongs there: move it away")
    there = next(folder for folder in path.parents if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        reason = errno.EACCES if there.is_dir() else errno.ENOTDIR
        raise OSError(reason, os.strerror(reason), str(there))
    return path


def write(calibration: Calibration, identity: Identity) -> Path:
    """Write a calibration's file, in the place of an older one, and return its path."""
    path = place_for(calibration.type, identity)
    path.parent.mkdir(parents=True, exist_ok=True)
    heads = np.array(identity.heads, np.int32).T
    metadata: dict[str, Any] = {
        "general.type": "calibration",
        f"{_KEY}.version": VERSION,
        f"{_KEY}.type": calibration.type,
        f"{_KEY}.tokens": calibration.tokens,
        f"{_KEY}.model.hash": identity.digest,
        f"{_KEY}.model.file": identity.name,
        f"{_KEY}.model.rope": identity.rope,
        f"{_KEY}.model.kv_heads": heads[0],
        f"{_KEY}.model.key_widths": heads[1],
        f"{_KEY}.model.value_widths": heads[2],
        f"{_KEY}.arrays.hash": _digest(calibration.layers),
    }
    tensors = {
        f"blk.{i}.{name}": array.astype(np.float32, copy=False)
        for i, arrays in enumerate(calibration.layers)
        for name, array in arrays.items()
    }
    write_gguf(path, metadata, tensors)
    return path


def _digest(layers: Sequence[dict[str, F32]]) -> str:
    digest = hashlib.sha256()
    for i, arrays in enumerate(layers):
        for name, array in sorted(arrays.items()):
            digest.update(f"{i} {name} {array.shape}\n".encode())
            digest.update(array.astype("<f4").tobytes())
    return digest.hexdigest()


def places(model: Model, types: Sequence[str]) -> list[Path]:
    """Where a loaded model's calibrations will lie; raises as `place_for`."""
    owner = _owner(model)
    return [place_for(type_, owner) for type_ in types]


def write_all(model: Model, calibrations: Sequence[Calibration]) -> list[tuple[Calibration, Path]]:
    """Write a loaded model's calibrations; each with its file."""
    owner = _owner(model)
    return [(each, write(each, owner)) for each in calibrations]


def _owner(model: Model) -> Identity:
    with open_gguf(model.path) as file:
        return identity(file, model.store.shapes)


def find(type_: str, identity: Identity) -> Calibration | None:
    """A model's calibration of a type, or None where there is none; raises as `read`."""
    path = path_of(type_, identity)
    return read(path, type_, identity) if path.is_file() else None


def require(type_: str, identity: Identity, model: Path) -> Calibration:
    """A model's calibration of a type; `model` is its path, for the message.

    Raises ConfigError: there is none; and as `read`.
    """
    found = find(type_, identity)
    if found is None:
        what = "the low-rank transform" if type_ == LOWRANK else f"cache type {type_}"
        raise ConfigError(
            f"{what} needs numbers that are measured on a text, and there are none for "
            f"{identity.name} yet: run `pykv calibrate {model} -f TEXT --types {type_}`"
        )
    return found


def read(path: Path, type_: str, identity: Identity) -> Calibration:
    """A calibration file.

    Raises ConfigError: it was made for another model, another type or by an older pykv; GGUFError:
    it is damaged.
    """
    again = f"run `pykv calibrate` with --types {type_} again"
    try:
        with open_gguf(path) as file:
            version = file.get_int(f"{_KEY}.version")
            if version != VERSION:
                raise ConfigError(
                    f"{path}: this is a calibration of pykv's version {version} of them, expected "
                    f"{VERSION}: {again}"
                )
            found = file.get_str(f"{_KEY}.type")
            if found != type_:
                raise ConfigError(
                    f"{path}: this is a calibration of {found}, expected one of {type_}: {again}"
                )
            _check_model(path, file, identity)
            layers = [_arrays(file, i) for i in range(len(identity.heads))]
            _check_arrays(layers, identity)
            if file.get_str(f"{_KEY}.arrays.hash") != _digest(layers):
                raise GGUFError("its numbers are not those that were written")
            return Calibration(type_, file.get_int(f"{_KEY}.tokens"), tuple(layers))
    except GGUFError as error:
        reason = "".join(c for c in str(error) if c.isprintable())
        raise GGUFError(f"{path}: the calibration is damaged ({reason[:200]}): {again}") from error


def _check_model(path: Path, file: GGUFFile, identity: Identity) -> None:
    n = len(identity.heads)
    made_for = file.get_str(f"{_KEY}.model.file")
    keys = ("kv_heads", "key_widths", "value_widths")
    of_file = file.metadata.get(f"{_KEY}.model.kv_heads")
    heads: tuple[tuple[int, ...], ...] = ()
    if isinstance(of_file, np.ndarray) and of_file.size == n:
        columns = [file.get_ints(f"{_KEY}.model.{key}", n) for key in keys]
        heads = tuple(zip(*columns, strict=True))
    for same, what in (
        (file.get_str(f"{_KEY}.model.hash") == identity.digest, "weights"),
        (heads == identity.heads, "numbers or widths of KV heads"),
        (file.get_str(f"{_KEY}.model.rope") == identity.rope, "settings of RoPE"),
    ):
        if not same:
            raise ConfigError(
                f"{path}: this calibration was made for {made_for} with other {what} than those of "
                f"{identity.name}: run `pykv calibrate` with this model"
            )


def _arrays(file: GGUFFile, layer: int) -> dict[str, F32]:
    prefix, out = f"blk.{layer}.", {}
    for name, tensor in file.tensors.items():
        if name.startswith(prefix) and tensor.type == "f32":
            values = np.array(tensor.data).view("<f4").astype(np.float32).reshape(tensor.shape)
            values.setflags(write=False)
            out[name.removeprefix(prefix)] = values
    return out


def _check_arrays(layers: list[dict[str, F32]], identity: Identity) -> None:
    """Raise GGUFError: an array is missing, of another shape, or makes no sense."""
    names = set(layers[0]) if layers else set()
    for i, (arrays, (n_kv, d_k, d_v)) in enumerate(zip(layers, identity.heads, strict=True)):
        for name in sorted(names | set(arrays)):
            what = f"tensor blk.{i}.{name}"
            if name not in arrays:
                raise GGUFError(f"{what} is missing")
            array, side = arrays[name], name.partition("_")[0]
            width = d_k if side == "k" else d_v
            ranges = {(n_kv,), (n_kv, width)}
            shapes: dict[str, set[tuple[int, ...]]] = {
                "scale": ranges, "centre": ranges, "singular": {(n_kv, width)},
                "basis": {(n_kv, width, width)}, "levels": {(2**bits,) for bits in range(1, 9)},
            }  # fmt: skip
            allowed = shapes.get(name.partition("_")[2], set())
            if array.shape not in allowed or not np.isfinite(array).all():
                raise GGUFError(
                    f"{what} has shape {list(array.shape)} and "
                    f"{np.count_nonzero(~np.isfinite(array))} values that are no numbers, expected "
                    f"one of {sorted(list(s) for s in allowed)} and none"
                )
            if name.endswith("levels") and not (np.diff(array) > 0).all():
                raise GGUFError(f"{what} holds levels that do not rise")
            # a channel may have a range of no width, but a head's scale divides
            if name.endswith("scale") and (
                array.min() < 0 or (array.ndim == 1 and not array.all())
            ):
                raise GGUFError(f"{what} holds a scale that is not above 0")
