"""Stands in for pykv.engine.model: answers by rule, so that the CLI can be tested alone."""

import time
from dataclasses import dataclass
from pathlib import Path

from pykv.config import CacheConfig, LoadConfig, SamplingConfig
from pykv.engine.stats import Stats
from pykv.errors import CacheFullError, GGUFError

calls = []  # keyword arguments of every load


class Generation:
    def __init__(self, text, max_tokens=None, stop=(), commit=lambda text: None):
        self._words = [w + " " for w in f"you said {text!r}".split(" ")]
        self._limit, self._stop, self._commit = max_tokens, stop, commit
        self._cancelled, self._slow, self._deaf = False, "slow" in text, "deaf" in text
        self._finish = "context" if "brim" in text else "stop"
        self.text, self.tokens = "", []

    def __iter__(self):
        words = self._words * 1000 if self._slow or self._deaf else self._words
        for i, word in enumerate(words):
            if self._cancelled and not self._deaf:
                self._finish = "cancelled"
                break
            if self._limit is not None and i >= self._limit:
                self._finish = "length"
                break
            if any(s in word for s in self._stop):
                break
            if self._slow or self._deaf:
                time.sleep(0.01)
            self.text += word
            self.tokens.append(i)
            yield word
        self._commit(self.text)

    def cancel(self):
        self._cancelled = True

    close = cancel

    @property
    def stats(self):
        return Stats(
            prompt_tokens=3,
            cached_tokens=1,
            prompt_seconds=0.5,
            generated_tokens=len(self.tokens),
            generated_seconds=0.25,
            seed=42,
            threads=2,
            plan=("fake kernels",),
            finish=self._finish,
        )


class Chat:
    def __init__(self, system):
        self.messages, self.stats, self._last = [], None, None
        self.set_system(system)

    def send(self, text, *, max_tokens=None, stop=()):
        if "overflow" in text:
            raise CacheFullError("the context of 64 tokens is full: 99 more do not fit")
        generation = Generation(f"{self._system or ''}{text}", max_tokens, stop, self._commit(text))
        self._last = generation
        return generation

    def _commit(self, text):
        def commit(answer):
            self.messages += [
                {"role": "user", "content": text},
                {"role": "assistant", "content": answer},
            ]
            self.stats = self._last.stats

        return commit

    def undo(self):
        undone = bool(self.messages)
        del self.messages[-2:]
        return undone

    def retry(self, *, max_tokens=None, stop=()):
        text = self.messages[-2]["content"]
        del self.messages[-2:]
        return self.send(f"{text} again", max_tokens=max_tokens, stop=stop)

    def clear(self):
        self.messages.clear()

    def set_system(self, text):
        self._system = text


@dataclass
class Perplexity:
    value: float = 12.34567
    error: float = 0.765432
    n_chunks: int = 2
    n_tokens: int = 510
    chunk_values: tuple = (12.0, 12.7)


class Model:
    architecture, n_ctx, n_vocab, plan = "fake", 64, 100, ["fake kernels"]

    def __init__(self, path):
        self.path, self.closed = Path(path), False

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.closed = True

    def generate(self, prompt, *, max_tokens=None, stop=(), **rest):
        return Generation(prompt, max_tokens, stop)

    def chat(self, system=None, *, template=None):
        return Chat(system)

    def perplexity(self, text, *, ctx_size=512, chunks=None, progress=None):
        calls.append({"text": text, "ctx_size": ctx_size, "chunks": chunks})
        progress(1, 2, 12.0, 0.1)
        progress(2, 2, 12.34567, 0.1)
        return Perplexity()


def load(
    model=None,
    *,
    cache=CacheConfig(),  # noqa: B008
    load=LoadConfig(),  # noqa: B008
    sampling=SamplingConfig(),  # noqa: B008
    offline=False,
    progress=None,
):
    calls.append(
        {"model": model, "cache": cache, "load": load, "sampling": sampling, "offline": offline}
    )
    if model == "broken.gguf":
        raise GGUFError("broken.gguf: truncated,\nexpected more \x1b[31mbytes")
    if model == "big.gguf":
        raise MemoryError
    if model == "disk.gguf":
        raise OSError(28, "No space left on device", "/cache/kernels")
    if model == "interrupted.gguf":
        raise KeyboardInterrupt
    progress("compiling kernels [1/2]", 1, 2)
    progress("compiling kernels [1/2]", 2, 2)
    return Model(model or "default.gguf")


class Tokenizer:
    n_vocab = 256

    def encode(self, text, *, add_special=True, parse_special=False):
        special = [1] if add_special else []
        return special + ([2] if parse_special else []) + list(text)

    def piece(self, token, *, special=False):
        return bytes([token])


def load_tokenizer(path):
    return Tokenizer()
