"""Small models: one with random weights, and one that recites a text that the tests know."""

import gguf
import numpy as np

from pykv.tokenizer import encode_chat, select

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# as many templates do, it trims what was said, so a rendering may differ from what was generated
TRIMMING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
MERGES = {"th": "t h", "the": "th e", "an": "a n"}
RECITED = "abcdefghijklmnopqrstuvwxyzé€!"  # what the reciting model says after a newline
E, FF, HEADS, KV, D = 64, 96, 4, 2, 16


def _byte_texts():
    """GPT-2's printable spelling of each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return [chr(b) if b in shown else chr(256 + hidden.index(b)) for b in range(256)]


TOKENS = [*_byte_texts(), *MERGES, *CONTROLS]
ID = {text: i for i, text in enumerate(TOKENS)}
# what is left can be tokenised in one way only: ASCII letters that no merge holds, and the ends
PLAIN = [ord(c) for c in "bcdfgijklmopqrsuvwxyz ,.\n"]
NOT_PLAIN = [i for i in range(len(TOKENS)) if i not in [*PLAIN, ID["<|im_end|>"]]]


def _weights(rng, recite):
    """Random tensors; reciting, each token's output row is the embedding of the one before it."""

    def matrix(n_out, n_in, gain=1.0):
        return (gain * rng.standard_normal((n_out, n_in)) / np.sqrt(n_in)).astype(np.float32)

    # the layers move a reciting model's state a little, never to another token
    gain = 0.02 if recite else 1.0
    out = {"token_embd.weight": matrix(len(TOKENS), E) * 8, "output_norm.weight": np.ones(E)}
    for i in range(2):
        layer = {
            "attn_norm": np.ones(E), "ffn_norm": np.ones(E),
            "attn_q": matrix(HEADS * D, E, 1.5), "attn_k": matrix(KV * D, E, 1.5),
            "attn_v": matrix(KV * D, E), "attn_output": matrix(E, HEADS * D, gain),
            "ffn_gate": matrix(FF, E), "ffn_up": matrix(FF, E), "ffn_down": matrix(E, FF, gain),
        }  # fmt: skip
        out |= {f"blk.{i}.{name}.weight": x for name, x in layer.items()}
    output = matrix(len(TOKENS), E)
    if recite:
        said = [ID["Ċ"], *RECITED.encode(), ID["<|im_end|>"]]
        for before, after in zip(said, said[1:], strict=False):
            output[after] = out["token_embd.weight"][before]
    return {**out, "output.weight": output}


def write_model(
    path, *, recite=False, suppress=(), template=TEMPLATE, n_ctx=512, bos=False, broken=False
):
    """A llama of two layers; `broken`: a weight of it is NaN."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(E)
    writer.add_block_count(2)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * (256 + len(MERGES)) + [3] * len(CONTROLS))
    writer.add_token_merges(list(MERGES.values()))
    writer.add_eos_token_id(ID["<|im_end|>"])
    writer.add_bos_token_id(ID["<s>"])
    writer.add_add_bos_token(bos)
    if suppress:
        writer.add_array("tokenizer.ggml.suppress_tokens", list(suppress))
    if template is not None:
        writer.add_chat_template(template)
    for name, x in _weights(np.random.default_rng(7), recite).items():
        x = np.ascontiguousarray(x, np.float32)
        if broken and name == "blk.1.attn_k.weight":
            x[:] = np.nan
        writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def ids_of(n, seed=0):
    """n token ids of the small vocabulary, control tokens left out."""
    return np.random.default_rng(seed).integers(0, 256, n).tolist()


def anew(model, messages, n, stop=()):
    """The answer to messages that are read into an empty cache."""
    template = select(model.metadata, None, "test")
    ids = encode_chat(model.tokenizer, template, messages)
    return "".join(model.generate(ids, max_tokens=n, stop=stop))


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}
