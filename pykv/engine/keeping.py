"""Where an engine and a policy meet: what is checked at load, and what a prompt's end sets off."""

from __future__ import annotations

import logging
import string
from typing import TYPE_CHECKING

import numpy as np

from pykv.backends.base import Backend
from pykv.cache.store import Store
from pykv.config import CacheConfig
from pykv.errors import ConfigError
from pykv.policies.base import FULL, PLAIN, PUNCTUATION, SPECIAL, U8
from pykv.tokenizer import Tokenizer

log = logging.getLogger("pykv")

if TYPE_CHECKING:
    from pykv.engine.model import Model


def prepare(dev: Backend, store: Store, tokenizer: Tokenizer) -> None:
    """Make a backend and a store ready for the store's policy, if it has one.

    Raises ConfigError: policies cannot run on that backend.
    """
    if store.policy is None:
        return
    if not dev.keeps:
        raise ConfigError(
            f"--kv-policy {store.config.policy} cannot run on the {dev.name} backend yet: give "
            "--device cpu, or leave the policy out"
        )
    dev.prepare_moves(store.shapes, store.formats)
    if store.policy.needs == "window":
        store.classes = classes(tokenizer)


def refuse(config: CacheConfig, what: str) -> None:
    """Raise ConfigError: a policy was set for what looks at every token."""
    if config.policy != FULL:
        raise ConfigError(
            f"{what} looks at every token: leave out --kv-policy {config.policy}, whose effect "
            "pykv perplexity and pykv needle show"
        )


def plan(store: Store) -> list[str]:
    """The policy in a line, if there is one."""
    if store.policy is None:
        return []
    budget = f", budget {store.config.budget} a KV head" if store.config.budget else ""
    return [f"kv policy: {store.policy}{budget}"]


def classes(tokenizer: Tokenizer) -> U8:
    """Each token's class, u8 [vocabulary]: special, punctuation (ASCII, blanks aside) or plain."""
    kinds = np.full(tokenizer.n_vocab, PLAIN, np.uint8)
    marks = frozenset(string.punctuation)
    for token in range(tokenizer.n_vocab):
        if tokenizer.is_control(token) or token in tokenizer.eog:
            kinds[token] = SPECIAL
            continue
        text = tokenizer.piece(token).strip()
        if text and marks.issuperset(text.decode("latin-1")):
            kinds[token] = PUNCTUATION
    return kinds


def end_prompt(model: Model, sequence: int, store: Store | None = None) -> None:
    """Let a policy that acts at the end of a prompt act; `store` is another than the model's."""
    store = model.store if store is None else store
    ending = store.end_prompt(sequence)
    if ending is None:
        return
    try:
        sums = {
            layer: model.dev.window_sums(ending.step, layer, queries)
            for layer, queries in ending.queries.items()
        }
        model.dev.move(ending.step, store.select(sequence, ending, sums))
    except BaseException:
        store.abort()
        raise
    store.commit()
    if ending.kinds:
        heads = ", ".join(f"{n} {kind}" for kind, n in ending.kinds.most_common())
        log.info("kv policy %s: heads that keep %s", store.config.policy, heads)
