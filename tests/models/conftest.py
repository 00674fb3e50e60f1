"""Random small model files, their twins in `transformers`, and a hand that runs batches."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from pykv import registry
from pykv.cache.pages import HostMemory
from pykv.cache.store import Store
from pykv.config import CacheConfig
from pykv.gguf import open_gguf
from pykv.tokenizer import from_metadata

N_VOCAB = 288
BASE = {
    "context_length": 512,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


@pytest.fixture(autouse=True)
def _one_thread(request):
    """Products of these sizes take longer to hand to a second thread than to do."""
    if request.node.get_closest_marker("models"):
        yield
        return
    with threadpool_limits(1):
        yield


def _add(writer, key, value):
    """One metadata key: bools, integers as u32, floats as f32, strings, arrays of one of them."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value) if value >= 0 else writer.add_int32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _spm_vocabulary(writer, n):
    """Three control tokens, the 256 bytes, pieces of growing length."""
    pieces = ["▁", "a", "e", "t", "h", "n", "▁t", "he", "▁the", "an", "▁an"]
    pieces += [f"x{i}" for i in range(n - 259 - len(pieces))]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces][:n]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(pieces)][:n]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([float(-i) for i in range(n)])
    writer.add_token_types(kinds)


def _bpe_vocabulary(writer, n):
    """The 256 bytes in their printable spelling, three merges, fillers, an end."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    tokens = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(rest))]
    tokens += ["th", "the", "an"]
    tokens += [f"xx{i}" for i in range(n - len(tokens) - 1)] + ["<|endoftext|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (n - 1) + [3])
    writer.add_token_merges(["t h", "th e", "a n"])
    writer.add_eos_token_id(n - 1)
    writer.add_bos_token_id(n - 1)


@dataclass
class Made:
    """A file, and what stands in it after the types' rounding, by name."""

    path: Path
    arch: str
    keys: dict[str, object]
    weights: dict[str, np.ndarray] = field(default_factory=dict)


def shapes_of(arch, k, *, tied=True, biases=(), fused=False, fused_bias=False):
    """Tensor shapes by name; `biases` holds names such as "attn_q"."""
    # head counts may be listed by layer; the lists of these tests hold one number each
    k = {key: value[0] if isinstance(value, list) else value for key, value in k.items()}
    e, ff, heads = k["embedding_length"], k["feed_forward_length"], k["attention.head_count"]
    kv = k.get("attention.head_count_kv", heads)
    d_k = k.get("attention.key_length", e // heads)
    d_v = k.get("attention.value_length", e // heads)
    out = {"token_embd.weight": (N_VOCAB, e), "output_norm.weight": (e,)}
    if not tied:
        out["output.weight"] = (N_VOCAB, e)
    sizes = {"attn_q": heads * d_k, "attn_k": kv * d_k, "attn_v": kv * d_v}
    for i in range(k["block_count"]):
        matrices = {
            **{name: (size, e) for name, size in sizes.items()},
            "attn_output": (e, heads * d_v),
            "ffn_gate": (ff, e), "ffn_up": (ff, e), "ffn_down": (e, ff),
        }  # fmt: skip
        vectors = {name: matrices[name][:1] for name in biases}
        if fused:
            matrices = {n: s for n, s in matrices.items() if n not in sizes}
            matrices["attn_qkv"] = (sum(sizes.values()), e)
        if fused_bias:
            vectors["attn_qkv"] = (sum(sizes.values()),)
        norms = {"attn_norm": (e,), "ffn_norm": (e,)}
        if arch == "gemma3":
            norms |= {"attn_q_norm": (d_k,), "attn_k_norm": (d_k,)}
            norms |= {"post_attention_norm": (e,), "post_ffw_norm": (e,)}
        out |= {f"blk.{i}.{n}.weight": s for n, s in (matrices | norms).items()}
        out |= {f"blk.{i}.{n}.bias": s for n, s in vectors.items()}
    return out


def _values(rng, name, shape):
    """Weights by which activations keep their size, and attention is far from uniform."""
    x = rng.standard_normal(shape)
    if name.endswith(".bias"):
        return (0.5 * x).astype(np.float32)
    if len(shape) == 1:
        # what remains after taking Gemma's 1 away is exact in float32
        return np.clip(1 + 0.2 * x, 0.5, 2).astype(np.float32)
    gain = 1.5 if any(part in name for part in ("attn_q", "attn_k")) else 1.0
    return (gain * x / np.sqrt(shape[-1])).astype(np.float32)


def write_model(path, arch, keys, shapes, *, types="F32", seed=0, vocab="spm", extra=None):
    """A GGUF file with random weights; `types` names one type, or one per part of a tensor's name.

    `extra` holds tensors as arrays, in place of random ones.
    """
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        _add(writer, f"{arch}.{key}", value)
    {"spm": _spm_vocabulary, "gpt2": _bpe_vocabulary}[vocab](writer, N_VOCAB)
    rng, made = np.random.default_rng(seed), Made(path, arch, dict(keys))
    tensors = {name: _values(rng, name, shape) for name, shape in shapes.items()}
    for name, x in (tensors | (extra or {})).items():
        chosen = types if isinstance(types, str) else next(
            (t for part, t in types.items() if part in name), "F32")  # fmt: skip
        kind = gguf.GGMLQuantizationType[chosen if x.ndim > 1 else "F32"]
        data = gguf.quants.quantize(x, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        made.weights[name] = gguf.quants.dequantize(data, kind).reshape(x.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made


@pytest.fixture
def make(tmp_path):
    """make(arch, keys={}, types=, vocab=, seed=, extra=, drop=(), **shapes_of's) -> Made.

    A key given as None is left out of the file; `drop` lists tensors to leave out, `reshape`
    gives other shapes, and `plain` takes the shapes of the base model, whatever `keys` says.
    """
    count = 0

    def build(arch, keys=None, *, drop=(), reshape=None, types="F32", seed=0, vocab="spm",
              extra=None, plain=False, **shape_options):  # fmt: skip
        nonlocal count
        count += 1
        merged = BASE | (keys or {})
        keys = {key: value for key, value in merged.items() if value is not None}
        shapes = shapes_of(arch, BASE if plain else BASE | keys, **shape_options)
        shapes = {n: s for n, s in shapes.items() if n not in drop} | (reshape or {})
        path = tmp_path / f"{arch}-{count}.gguf"
        return write_model(
            path, arch, keys, shapes, types=types, seed=seed, vocab=vocab, extra=extra
        )

    return build


class Runner:
    """A file's graph on a backend, with a store beside it."""

    def __init__(self, path, backend, cache=None, **settings):
        self.file = open_gguf(path)
        self.dev = importlib.import_module(f"pykv.backends.{backend}").create(**settings)
        arch = self.file.metadata["general.architecture"]
        n_vocab = len(self.file.metadata["tokenizer.ggml.tokens"])
        self.graph = registry.find("models", arch, "architecture").GRAPH(
            self.file, n_vocab, self.dev
        )
        config = cache or CacheConfig(type_k="f32", type_v="f32")
        self.store = Store(self.graph.shapes, config, 4096, memory=HostMemory(255))
        self.dev.prepare(self.graph.shapes, self.store.formats)

    def logits(self, ids, chunk=None):
        """Logits of every token, f32 [T, V], the tokens handed over `chunk` at a time."""
        sequence, out = self.store.new_sequence(), []
        ids = np.asarray(ids, np.int32)
        for first in range(0, len(ids), chunk or len(ids)):
            part = ids[first : first + (chunk or len(ids))]
            step = self.store.begin([(sequence, part)], np.arange(len(part), dtype=np.int32))
            out.append(self.dev.run(self.graph, step))
            self.store.commit()
        self.store.free(sequence)
        return np.concatenate(out)

    def close(self):
        self.dev.close()
        self.file.close()


@pytest.fixture
def load():
    """load(path, backend="reference", cache=None, **settings) -> Runner, closed after the test."""
    open_ = []

    def start(path, backend="reference", cache=None, **settings):
        open_.append(Runner(path, backend, cache, **settings))
        return open_[-1]

    yield start
    for runner in open_:
        runner.close()


@pytest.fixture
def tokens():
    """tokens(n, seed=0) -> ids of the small vocabulary."""
    return lambda n, seed=0: np.random.default_rng(100 + seed).integers(0, N_VOCAB, n)


def _interleaved_to_halves(x, n_head):
    """Rows of q or k as NORM rope pairs them (2i, 2i + 1) to (i, i + D / 2)."""
    per_head = x.reshape(n_head, -1, 2, *x.shape[1:])
    return np.ascontiguousarray(per_head.swapaxes(1, 2)).reshape(x.shape)


NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def _split_fused(weights, sizes):
    """`attn_qkv` as three tensors."""
    out = {}
    for name, x in weights.items():
        if ".attn_qkv." in name:
            parts = np.split(x, np.cumsum(sizes)[:-1])
            for letter, part in zip("qkv", parts, strict=True):
                out[name.replace("attn_qkv", f"attn_{letter}")] = part
        else:
            out[name] = x
    return out


def _state(arch, weights, n_head, n_kv, d_k, d_v):
    """The weights under transformers' names, in its order of rows."""
    import torch

    names = dict(NAMES)
    llama = arch == "llama"
    names["ffn_norm"] = "post_attention_layernorm" if llama else "pre_feedforward_layernorm"
    sizes = (n_head * d_k, n_kv * d_k, n_kv * d_v)
    state = {}
    for name, x in _split_fused(weights, sizes).items():
        if name == "rope_freqs.weight":
            continue
        stem, kind = name.rsplit(".", 1)
        if llama and stem.endswith(("attn_q", "attn_k")):
            x = _interleaved_to_halves(x, n_head if stem.endswith("attn_q") else n_kv)
        if not llama and stem.endswith("norm"):
            x = x - np.float32(1)
        if stem.startswith("blk."):
            _, i, part = stem.split(".")
            stem = f"model.layers.{i}.{names[part]}"
        else:
            stem = TOP[stem]
        state[f"{stem}.{kind}"] = torch.from_numpy(np.require(x, requirements="W"))
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    return state


def _twin_logits(arch, keys, weights, ids, *, tied=True, **settings):
    """Logits of transformers' model, f32 [T, V], of the same weights: the outsider."""
    import torch
    import transformers as hf

    heads = keys["attention.head_count"]
    n_kv = keys.get("attention.head_count_kv", heads)
    d_k = keys.get("attention.key_length", keys["embedding_length"] // heads)
    config_class, model_class = {
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM),
        "gemma3": (hf.Gemma3TextConfig, hf.Gemma3ForCausalLM),
    }[arch]
    config = config_class(
        vocab_size=weights["token_embd.weight"].shape[0],
        hidden_size=keys["embedding_length"],
        intermediate_size=keys["feed_forward_length"],
        num_hidden_layers=keys["block_count"],
        num_attention_heads=heads,
        num_key_value_heads=n_kv,
        head_dim=d_k,
        rms_norm_eps=keys["attention.layer_norm_rms_epsilon"],
        max_position_embeddings=keys["context_length"],
        tie_word_embeddings=tied,
        attn_implementation="eager",
        **settings,
    )
    # weights are assigned, so none are drawn first; what is no weight is then made anew
    with torch.device("meta"):
        model = model_class(config)
    model.load_state_dict(_state(arch, weights, heads, n_kv, d_k, d_k), assign=True)
    model.tie_weights()
    inner = model.model
    inner.rotary_emb = type(inner.rotary_emb)(config)
    if arch == "gemma3":
        inner.embed_tokens.embed_scale = torch.tensor(inner.embed_tokens.scalar_embed_scale)
    with torch.no_grad():
        out = model.eval()(torch.as_tensor(np.asarray(ids, np.int64))[None], use_cache=False)
    return out.logits[0].numpy()


@pytest.fixture(scope="session")
def twin():
    return _twin_logits


# The opening of Herman Melville's Moby-Dick (1851), in the public domain.
TEXT = """\
Call me Ishmael. Some years ago\u2014never mind how long precisely\u2014having little or no money \
in my purse, and nothing particular to interest me on shore, I thought I would sail about a \
little and see the watery part of the world. It is a way I have of driving off the spleen and \
regulating the circulation. Whenever I find myself growing grim about the mouth; whenever it is \
a damp, drizzly November in my soul; whenever I find myself involuntarily pausing before coffin \
warehouses, and bringing up the rear of every funeral I meet; and especially whenever my hypos \
get such an upper hand of me, that it requires a strong moral principle to prevent me from \
deliberately stepping into the street, and methodically knocking people\u2019s hats off\u2014then, \
I account it high time to get to sea as soon as I can. This is my substitute for pistol and \
ball. With a philosophical flourish Cato throws himself upon his sword; I quietly take to the \
ship. There is nothing surprising in this. If they but knew it, almost all men in their degree, \
some time or other, cherish very nearly the same feelings towards the ocean with me.
There now is your insular city of the Manhattoes, belted round by wharves as Indian isles by \
coral reefs\u2014commerce surrounds it with her surf. Right and left, the streets take you \
waterward.
"""


@pytest.fixture(scope="session")
def real(twin):
    """real(path, n, **settings of the twin) -> path, a text's first n ids, the twin's logits.

    The twin's weights are dropped at once.
    """

    def read(path, n, **settings):
        with open_gguf(path) as file:
            arch = file.metadata["general.architecture"]
            keys = {k.removeprefix(f"{arch}."): v for k, v in file.metadata.items()}
            ids = from_metadata(file.metadata, where=path.name).encode(TEXT)[:n]
            assert len(ids) == n
            weights = {
                name: gguf.quants.dequantize(t.data, gguf.GGMLQuantizationType[t.type.upper()])
                .reshape(t.shape)
                for name, t in file.tensors.items()
            }  # fmt: skip
        logits = twin(arch, keys, weights, ids, **settings)
        return SimpleNamespace(path=path, ids=np.array(ids), logits=logits)

    return read


@pytest.fixture(scope="session")
def divergence():
    """divergence(logits p, logits q) -> mean over rows of KL(p || q), in nats."""

    def mean(p, q):
        total = 0.0
        for row_p, row_q in zip(p, q, strict=True):
            a, b = (r.astype(np.float64) - r.max() for r in (row_p, row_q))
            a, b = (r - np.log(np.exp(r).sum()) for r in (a, b))
            total += float(np.exp(a) @ (a - b))
        return total / len(p)

    return mean
