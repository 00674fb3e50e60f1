"""The CPU kernels that a model and its caches need, compiled or loaded by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from pykv.backends import plan, transforms
from pykv.backends.base import I64, CacheFormats, LayerShape
from pykv.backends.crew import Driver
from pykv.backends.threads import give_way_address

ELEMENTWISE = (
    "rms_norm", "rope", "swiglu", "geglu", "add", "bias", "softcap", "take_rows", "resize_rows",
)  # fmt: skip
MOST_HEADS = 4  # query heads that share one pass over a page


def tiles(group: int) -> list[tuple[int, int, int]]:
    """How a group of query heads is cut: (heads in a tile, first head, number of such tiles)."""
    cut, done = [], 0
    if group >= MOST_HEADS:
        cut.append((MOST_HEADS, 0, group // MOST_HEADS))
        done = group // MOST_HEADS * MOST_HEADS
    if group > done:
        cut.append((group - done, done, 1))
    return cut


def cache_key(formats: CacheFormats) -> str:
    """The formats as part of a kernel's name: keys and values, each page and tail."""
    names = (formats.page_k, formats.tail_k, formats.page_v, formats.tail_v)
    key = "_".join(stem(name) for name in names)
    return f"{key}_read" if formats.position == "read" else key


def stem(name: str) -> str:
    """A cache type's name without its options, which are no matter of its kernels."""
    return name.partition(":")[0]


def latent_key(formats: CacheFormats) -> str:
    """The same where only keys are kept."""
    return f"{stem(formats.page_k)}_{formats.tail_k}"


def latent_block(formats: CacheFormats, shape: LayerShape) -> int:
    """The width of the equal blocks that such a layer's transform consists of; 0: it has none."""
    block = transforms.hadamard_block(shape.d_v) if formats.transform_k == "hadamard" else 0
    return block if block < shape.d_v else 0


def mapped_by(name: str, block: int) -> str:
    """The name of a kernel that maps rows, by a whole matrix or by equal blocks."""
    return f"{name}_by{block}" if block else name


class Kernels:
    """Addresses of kernels by name.  `progress` is told each kernel that has to be compiled."""

    def __init__(
        self,
        progress: Callable[[str], None] | None = None,
        folder: Path | None = None,
    ) -> None:
        from pykv.kernels import driver_numba, jit_numba

        if folder is not None:
            jit_numba.set_cache_folder(folder)

        self._jit, self._progress = jit_numba, progress
        self._kernels: dict[str, Any] = {}
        self._modules: dict[str, ModuleType] = {}
        self.cache_plan: list[str] = []
        self._vnni = jit_numba.has_features("avx512f", "avx512bw", "avx512vnni")
        with self._listening():
            run, serve = driver_numba.load()  # type: ignore[no-untyped-call]
        self.driver = Driver(
            run, serve, give_way_address(), driver_numba.MAIL_WORDS,
            driver_numba.TICKET_AT // 8, driver_numba.LEAVE_AT // 8,
        )  # fmt: skip

    def run_here(self, name: str, ctx: I64) -> None:
        """Run a kernel as one task on the calling thread, which may be any."""
        self.driver.run_here(np.array([self[name], ctx.ctypes.data, 1, 0, 0, 0, 1, 0], np.int64))

    def __getitem__(self, name: str) -> int:
        """The kernel's address; what was not foreseen is compiled now."""
        if not self._have(name):
            with self._listening():
                self._load_by_name(name)
        address: int = self._kernels[name].address
        return address

    def load(self, names: Iterable[str]) -> None:
        """Compile or load kernels now."""
        for name in names:
            _ = self[name]

    @contextmanager
    def _listening(self) -> Iterator[None]:
        compiled, before = self._jit.compiled, self._jit.compiled.listener
        compiled.listener = self._progress
        try:
            yield
        finally:
            compiled.listener = before

    @property
    def compile_seconds(self) -> float:
        """Seconds that this process has spent compiling kernels."""
        return self._jit.compiled.seconds

    def _have(self, name: str) -> bool:
        """Whether the kernel is here, or this process has loaded it for somebody else."""
        if name not in self._kernels:
            known = self._jit.loaded(name)
            if known is None:
                return False
            self._kernels[name] = known
        return True

    def _add(self, name: str, template: Any, **names: Any) -> None:
        if name not in self._kernels:
            self._kernels[name] = self._jit.kernel(template, name, **names)

    def _load_by_name(self, name: str) -> None:
        from pykv.kernels import elementwise_numba, heads_numba, matvec_numba, statistics_numba

        if name in ELEMENTWISE:
            self._add(name, getattr(elementwise_numba, name))
            return
        kind, _, rest = name.partition("_")
        if name == "copy_columns":
            self._add(name, heads_numba.copy_columns)
            return
        if name in ("column_sums", "keep_query"):
            self._add(name, getattr(statistics_numba, name))
            return
        if kind == "gather":
            self._load_gather(name, *rest.split("_", 2))
            return
        if kind in ("vnni", "quantize"):
            self._load_vnni(kind, name, rest)
            return
        type_ = rest.rpartition("_r")[0] if kind == "matvec" else rest
        module = self._weight_module(type_)
        names = {
            "unpack": module.unpack,
            "BLOCK_LEN": module.BLOCK_LEN,
            "BLOCK_BYTES": module.BLOCK_BYTES,
        }
        if kind == "matvec":
            names["ROWS"] = int(rest.rpartition("_r")[2])
        self._add(name, getattr(heads_numba if kind == "heads" else matvec_numba, kind), **names)

    def _load_gather(self, name: str, side: str, kind: str, types: str) -> None:
        from pykv.kernels import statistics_numba, turn_numba

        what = {"k": "keys", "v": "values"}[side]
        tail, _, page = types.partition("_")
        old, new = {"tail": (tail, tail), "seal": (tail, page), "page": (page, page)}[kind]
        modules = plan.cpu_cache_modules(CacheFormats(old, new, old, new))
        self._add(
            name, statistics_numba.gather, KEYS=side == "k", SEAL=kind == "seal",
            read=getattr(modules[old], f"read_{what}"),
            encode=getattr(modules[new], f"encode_{what}"),
            turn_page=getattr(turn_numba, f"turn_{what}"),
        )  # fmt: skip

    def _load_vnni(self, kind: str, name: str, rest: str) -> None:
        from pykv.kernels import vnni_numba

        if kind == "quantize":
            layout, most, zero = (float(part.replace("m", "-")) for part in rest.split("_"))
            self._add(name, vnni_numba.quantize, LAYOUT=int(layout), RANGE=np.float32(most),
                      ZERO=np.float32(zero))  # fmt: skip
            return
        module = self._weight_module(rest)
        names = {
            "group_dot": module.group_dot,
            "group_scales": getattr(module, "group_scales", vnni_numba.no_scales),
            "QUARTERS": getattr(module, "QUARTERS", 0),
        }
        rows = self._bound(vnni_numba.four_rows, f"four_rows_{rest}", **names)
        tile = self._bound(vnni_numba.row_tile, f"row_tile_{rest}", rows=rows)
        self._add(name, vnni_numba.matvec, tile=tile)

    def vnni_inputs(self, type_: str) -> str | None:
        """The kernel that writes input rows for this type's byte products; None: use float32."""
        module = self._weight_module(type_)
        if not self._vnni or "group_dot" not in vars(module):
            return None
        numbers = (module.LAYOUT, int(module.RANGE), int(module.ZERO))
        return "quantize_" + "_".join(str(n).replace("-", "m") for n in numbers)

    def _weight_module(self, type_: str) -> ModuleType:
        if type_ not in self._modules:
            module = plan.cpu_module(type_)
            if module is None:
                raise KeyError(f"no CPU kernels for weight type {type_}")
            self._modules[type_] = module
        return self._modules[type_]

    def block_len(self, type_: str) -> int:
        """Weights in a block."""
        n: int = self._weight_module(type_).BLOCK_LEN
        return n

    def load_weights(self, types: Sequence[str]) -> None:
        """Compile what a first token needs of these weight types."""
        for type_ in types:
            names, inputs = [f"panel_{type_}"], self.vnni_inputs(type_)
            if inputs is not None:
                names += [inputs, f"vnni_{type_}"]
            else:
                names += [f"matvec_{type_}_r1", f"matvec_{type_}_r4"]
            for name in names:
                _ = self[name]
        for name in ELEMENTWISE:
            _ = self[name]

    def load_heads(self, types: Sequence[str]) -> None:
        """Compile what products by head need of these weight types."""
        for name in ("copy_columns", *(f"heads_{t}" for t in types)) if types else ():
            _ = self[name]

    def load_cache(self, shapes: Sequence[LayerShape], formats: Sequence[CacheFormats]) -> None:
        """Compile what the attention of these layers needs."""
        with self._listening():
            for shape, names in dict.fromkeys(zip(shapes, formats, strict=True)):
                if shape.shared:
                    self._load_latent(shape, names)
                else:
                    self._load_attention(shape, names)

    def _load_attention(self, shape: LayerShape, formats: CacheFormats) -> None:
        from pykv.kernels import attention_numba, cache_numba, prompt_numba

        modules, key = plan.cpu_cache_modules(formats), cache_key(formats)
        read = formats.position == "read"
        scores = "scores_read" if read else "scores"
        page_k, tail_k = modules[formats.page_k], modules[formats.tail_k]
        page_v, tail_v = modules[formats.page_v], modules[formats.tail_v]
        for heads, _, _ in tiles(shape.n_head // shape.n_kv):
            bound = {
                "scores_page": self._grouped(page_k, scores, heads),
                "scores_tail": self._grouped(tail_k, scores, heads),
                "mix_page": self._grouped(page_v, "mix", heads),
                "mix_tail": self._grouped(tail_v, "mix", heads),
            }
            name = f"attend_{key}_g{heads}"
            walk = self._bound(
                attention_numba.walk_chunk, f"walk_{name}", GROUP=heads, READ=read, **bound
            )
            self._add(name, attention_numba.attend_rows, GROUP=heads, one_chunk=walk)
        self._add("combine", attention_numba.combine)
        walk = self._bound(
            prompt_numba.walk_pages, f"walk_prompt_{key}", READ=read,
            read_keys_page=page_k.read_keys, read_keys_tail=tail_k.read_keys,
            read_values_page=page_v.read_values, read_values_tail=tail_v.read_values,
        )  # fmt: skip
        self._add(f"prompt_{key}", prompt_numba.attend_prompt, walk=walk)
        self._add(
            f"write_{formats.tail_k}_{formats.tail_v}", cache_numba.write,
            write_key=tail_k.write_key, write_value=tail_v.write_value,
            LIMIT_K=tail_k.LIMIT, LIMIT_V=tail_v.LIMIT,
        )  # fmt: skip
        self._load_encoders(formats, modules)
        line = f"attention: attend_{key}, prompt_{key}"
        if line not in self.cache_plan:
            self.cache_plan.append(line)

    def _load_latent(self, shape: LayerShape, formats: CacheFormats) -> None:
        from pykv.kernels import attention_numba, latent_numba, turn_numba

        modules, key = plan.cpu_cache_modules(formats), latent_key(formats)
        page, tail = modules[formats.page_k], modules[formats.tail_k]
        walk = self._bound(
            latent_numba.walk_entries, f"walk_latent_{key}",
            read_keys_page=page.read_keys, read_keys_tail=tail.read_keys,
        )  # fmt: skip
        self._add(f"latent_{key}", latent_numba.attend, walk=walk)
        block, product = latent_block(formats, shape), turn_numba.times_matrix
        if block:
            product = self._bound(latent_numba._times_blocks, f"times_blocks{block}", BLOCK=block)
        self._add(mapped_by("combine", block), attention_numba.combine, times_matrix=product)
        self._add(
            f"latent_write_{formats.tail_k}", latent_numba.write,
            write_key=tail.write_key, LIMIT_K=tail.LIMIT,
        )  # fmt: skip
        if not formats.exact_k:
            self._add(
                f"latent_encode_{formats.tail_k}_{stem(formats.page_k)}", latent_numba.encode_page,
                read_tail=tail.read_keys, encode=page.encode_keys,
            )  # fmt: skip
        if formats.transform_k != "none":
            self._add(mapped_by("latent_turn", block), latent_numba.turn, times_matrix=product)
        line = f"attention: latent_{key}"
        if line not in self.cache_plan:
            self.cache_plan.append(line)

    def _load_encoders(self, formats: CacheFormats, modules: dict[str, ModuleType]) -> None:
        from pykv.kernels import cache_numba, turn_numba

        sides = (
            ("k", "keys", formats.tail_k, formats.page_k, formats.exact_k),
            ("v", "values", formats.tail_v, formats.page_v, formats.exact_v),
        )
        for side, what, tail, page, exact in sides:
            if not exact:
                self._add(
                    f"encode_{side}_{tail}_{stem(page)}", cache_numba.encode_page,
                    read_tail=getattr(modules[tail], f"read_{what}"),
                    encode=getattr(modules[page], f"encode_{what}"),
                    turn_page=getattr(turn_numba, f"turn_{what}"),
                )  # fmt: skip
        if (formats.transform_k, formats.transform_v) != ("none", "none"):
            self._add("turn", turn_numba.turn)

    def _grouped(self, module: ModuleType, what: str, heads: int) -> Any:
        template = getattr(module, what)
        return self._bound(template, f"{template.__qualname__}_g{heads}", GROUP=heads)

    def _bound(self, template: Any, name: str, **names: Any) -> Any:
        """A function for kernels to call, with `names` bound."""
        return self._jit.bound(template, name, **names)
