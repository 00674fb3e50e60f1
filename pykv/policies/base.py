"""What every eviction policy offers: decisions about cells, from positions and attention.

A cell is the place of one token of one KV head. A policy sees some heads' cells and what queries
paid them, and says which go. It holds no state: scores live in the store, one number per cell.
Equal scores are told apart by position, so that the order of cells never shows in a result.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from pykv import registry
from pykv.errors import ConfigError, PolicyError, UnsupportedError

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
Bool = npt.NDArray[np.bool_]

FULL = "full"  # the name of no policy: every token is kept
LEAST_TOKENS = 64  # of a budget in percent
ENDLESS = 1 << 30  # tokens of a text under a policy that distances do not grow with
PLAIN, SPECIAL, PUNCTUATION = 0, 1, 2  # token classes; special: BOS, EOS, control

_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)%")
_TOKENS = re.compile(r"[0-9]{1,9}")
_LAST = np.uint32(2**32 - 1)
_SIGN = np.int32(-(2**31))


@dataclass
class Cells:
    """A view of some heads' cells, sinks not among them; leading axes [...] are layers, or nothing.

    positions: i32 [..., G, C], the token's position in the text, -1: an empty cell. Cells are in
        no particular order.
    scores: f32 [n_scores, ..., G, C], what the policy has noted, 0 for a new token. Those of an
        empty cell mean nothing, and are set to 0 when a token enters it.
    now: position of the newest token, which has its cell already.
    n_kept: cells in use per head, sinks and the newest token included.
    group: query heads per KV head.
    sinks: tokens at the start of the text that are kept beside these cells.
    """

    positions: I32
    scores: F32
    now: int
    n_kept: int
    group: int = 1
    sinks: int = 0


@dataclass
class Window:
    """What the last queries of a prompt paid to one layer's cells.

    sums: f32 [H, C], attention summed over the queries; 0 at empty cells. A row and the sinks'
        share add up to n_queries.
    n_queries: queries that were summed.
    classes: u8 [G, C], the class of each cell's token.
    """

    sums: F32
    n_queries: int
    classes: U8


@dataclass(frozen=True)
class Policy:
    """One eviction policy.  A subclass gives its settings as fields, and the data below.

    Raises ConfigError: a setting out of range.
    """

    name: ClassVar[str]  # the registry's key: the name of the policy's file
    moment: ClassVar[Literal["token", "prompt"]] = "token"  # acts after each, or at a prompt's end
    # the attention that it is told of: none, every query's, or that of the last n_queries
    needs: ClassVar[Literal["", "sums", "window"]] = ""
    n_scores: ClassVar[int] = 0  # numbers that are kept with each cell
    endless: ClassVar[bool] = False  # no distance grows without bound: text may pass the context
    per_head: ClassVar[bool] = False  # heads may keep different tokens
    takes_budget: ClassVar[bool] = True
    keeps_sinks: ClassVar[bool] = True
    places_sinks: ClassVar[bool] = False  # a query meets the sinks at their place in the cache

    def __str__(self) -> str:
        """As `parse` reads it: the name, and the settings that differ from their defaults."""
        own = [(f.name, getattr(self, f.name), f.default) for f in fields(self)]
        changed = ",".join(f"{name}={value}" for name, value, default in own if value != default)
        return f"{self.name}:{changed}" if changed else self.name

    @property
    def whole_prompts(self) -> bool:
        """Whether a prompt is read whole, and reduced to the budget when it ends."""
        return self.moment == "prompt"

    @property
    def n_queries(self) -> int:
        """Queries at a prompt's end whose attention `select` is given."""
        return 0

    def check(self, budget: int, sinks: int) -> None:
        """Raises ConfigError: the budget has no room for the sinks and the recent part."""
        recent = self.recent_tokens(budget, sinks)
        sinks = sinks if self.keeps_sinks else 0
        if recent < 1 or budget < sinks + recent:
            raise ConfigError(
                f"kv budget {budget} is too small for {self.name}, which always keeps {sinks} "
                f"sinks and {max(recent, 1)} recent tokens; give it more, or set fewer sinks"
            )

    def recent_tokens(self, budget: int, sinks: int) -> int:
        """How many of the newest tokens are never dropped."""
        raise NotImplementedError

    def count_to_drop(self, over: int, budget: int) -> int:
        """How many cells a head drops when it is `over` cells, at least 1, above the budget."""
        return over

    def observe(self, cells: Cells, probs: F32) -> None:
        """Notes a token's attention: updates `cells.scores` in place, and nothing else.

        probs f32 [..., G, C]: what the newest query paid each cell, summed over the query heads of
        the KV head; 0 at empty cells.
        """

    def drop(self, cells: Cells, count: int) -> I64:
        """The cells to drop, i64 [..., G, count], in no order, different and in use.

        What remains, n_kept - count, is taken as the budget.
        Raises PolicyError: fewer than `count` cells may be dropped.
        """
        raise NotImplementedError

    def select(self, cells: Cells, window: Window, budget: int) -> Bool:
        """Which cells of one layer stay after a prompt, [G, C]; with the sinks at most `budget`."""
        raise NotImplementedError

    def kinds(self, cells: Cells, window: Window) -> list[str]:
        """What `select` decides a head to be, a word for each KV head; nothing: all are alike."""
        return []

    def _require(self, ok: bool, what: str) -> None:
        if not ok:
            raise ConfigError(f"kv policy {self.name}: {what}; {_settings(type(self))}")

    def _room(self, cells: Cells, count: int, recent: int) -> None:
        """Raises PolicyError unless `count` cells of every head are older than `recent` tokens."""
        free = cells.n_kept - cells.sinks - recent
        if not 1 <= count <= free:
            raise PolicyError(
                f"{self.name} cannot drop {count} of {cells.n_kept} tokens a head: {cells.sinks} "
                f"are sinks and the newest {recent} stay"
            )


def lowest(scores: F32, positions: I32, last: int, count: int, largest: bool = False) -> I64:
    """The cells with the smallest scores, or the largest; of equal ones the oldest.

    f32, i32 [..., G, C] -> i64 [..., G, count], in no order. Scores are 0 or more. `last` is the
    newest position that may be chosen: each head must have `count` cells up to it.
    """
    # the sign bit marks cells that may not go: newer ones, and empty ones, whose position is -1
    marks = last - positions
    marks |= positions
    marks &= _SIGN
    # floats of one sign sort as their bits do
    bits = scores.view(np.int32)
    marks |= bits ^ ~_SIGN if largest else bits
    keys, places = marks.view(np.uint32), positions.view(np.uint32)
    if count > 1:
        return _first(keys.astype(np.uint64) << np.uint64(32) | places, count)
    low = keys.min(-1, keepdims=True)
    equal = keys == low
    if np.count_nonzero(equal) > low.size:
        keys = np.where(equal, places, _LAST)
    return _first(keys, 1)


def oldest(positions: I32, count: int) -> I64:
    """The cells with the lowest positions, i32 [..., G, C] -> i64 [..., G, count], in no order."""
    return _first(positions.view(np.uint32), count)


def _first(keys: npt.NDArray[Any], count: int) -> I64:
    if count == 1:
        cells: I64 = keys.argmin(-1, keepdims=True)
        return cells
    return np.argpartition(keys, count - 1, axis=-1)[..., :count]


@dataclass(frozen=True)
class Budget:
    """How many tokens a head may keep: a number, or a share of those seen so far.

    text: as `parse` read it. tokens: 0 where a share is given. percent: of the tokens seen.
    """

    text: str
    tokens: int = 0
    percent: float = 0.0

    def __str__(self) -> str:
        """As it was written."""
        return self.text

    @classmethod
    def parse(cls, text: str) -> Budget:
        """`1024` or `20%`.  Raises ConfigError: neither, less than a token, 0 % or over 100 %."""
        share = _PERCENT.fullmatch(text)
        if share and 0 < float(share[1]) <= 100:
            return cls(text, percent=float(share[1]))
        if _TOKENS.fullmatch(text) and int(text) >= 1:
            return cls(text, tokens=int(text))
        raise ConfigError(
            f"kv budget must be a number of tokens such as 1024, or a share of those seen such as "
            f"20%, above 0 and up to 100%, not '{text}'"
        )

    def of(self, n_seen: int) -> int:
        """Tokens that may be kept when n_seen have been read; a share is at least 64."""
        return self.tokens or max(LEAST_TOKENS, int(n_seen * self.percent / 100))

    def reach(self, n: int) -> int:
        """Tokens of the longest text of which at most n are kept; a text of n fits always."""
        if self.of(0) > n:
            return n
        return ENDLESS if self.tokens else min(int(n * 100 / self.percent), ENDLESS)


def names() -> list[str]:
    """Every name that `parse` knows, sorted."""
    return sorted([*registry.names("policies"), FULL])


def parse(spec: str) -> Policy | None:
    """The policy of a name with settings, `h2o:recent=0.5,prompt=full`; None for `full`.

    Raises ConfigError: an unknown name or setting, or a value that does not fit it.
    """
    name, colon, rest = spec.partition(":")
    if spec == FULL:
        return None
    if name == FULL:
        raise ConfigError(f"kv policy {FULL} has no settings, so '{rest}' cannot be set")
    try:
        kind: type[Policy] = registry.find("policies", name, "kv policy", also=(FULL,)).POLICY
    except UnsupportedError as error:  # of a setting, and not of a file
        raise ConfigError(str(error)) from None
    return kind(**_values(kind, rest)) if colon else kind()


def _values(kind: type[Policy], text: str) -> dict[str, int | float | str]:
    """The settings of `recent=0.5,prompt=full` by name.  Raises ConfigError."""
    types = {field.name: str(field.type) for field in fields(kind)}
    values: dict[str, int | float | str] = {}
    for part in text.split(","):
        setting, equals, value = part.partition("=")
        if setting not in types or not equals or setting in values:
            what = "is set twice" if setting in values else "is no setting of it as name=value"
            raise ConfigError(f"kv policy {kind.name}: '{part}' {what}; {_settings(kind)}")
        try:
            values[setting] = {"int": int, "float": float, "str": str}[types[setting]](value)
        except ValueError:
            noun = "a whole number" if types[setting] == "int" else "a number"
            raise ConfigError(
                f"kv policy {kind.name}: {setting} must be {noun}, not '{value}'; {_settings(kind)}"
            ) from None
    return values


def _settings(kind: type[Policy]) -> str:
    """The settings and their defaults, for a sentence."""
    own = ", ".join(f"{field.name}={field.default}" for field in fields(kind))
    return f"its settings and their defaults are {own}" if own else "it has no settings"
