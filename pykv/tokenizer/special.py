"""Splitting a text at the special tokens that are spelled in it.

Tokens are tried longest first, and each splits every stretch that is still raw at its leftmost
occurrences: so the longest token wins, not the earliest.
Source: llama.cpp src/llama-vocab.cpp, tokenizer_st_partition.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

BLANKS = b" \t\n\v\f\r"
Range = tuple[int, int]
LEAF = 4  # tokens of a node that are tried one by one


class Special(NamedTuple):
    """One token that is matched as a text: guarded ones only where the caller parses specials."""

    text: bytes
    id: int
    guarded: bool
    eats_left: bool = False  # swallows blanks before it
    eats_right: bool = False  # swallows blanks after it


@dataclass(frozen=True)
class _Node:
    prefix: bytes
    here: tuple[Special, ...]
    children: tuple["_Node", ...]


def _build(specials: list[Special], depth: int) -> _Node:
    """A prefix tree over specials, sorted by text and equal in their first `depth` bytes."""
    prefix = specials[0].text[:depth]
    if len(specials) <= LEAF:
        return _Node(prefix, tuple(specials), ())
    here = tuple(s for s in specials if len(s.text) == depth)
    rest = [s for s in specials if len(s.text) > depth]
    groups = groupby(rest, key=lambda s: s.text[depth])
    return _Node(prefix, here, tuple(_build(list(g), depth + 1) for _, g in groups))


class Partition:
    """Finds special tokens; a prefix tree keeps thousands of tokens cheap on long texts."""

    def __init__(self, specials: Sequence[Special]) -> None:
        ordered = sorted(specials, key=lambda s: s.text)
        guarded = [s for s in ordered if s.guarded]
        plain = [s for s in ordered if not s.guarded]
        self._guarded = _build(guarded, 0) if guarded else None
        self._plain = _build(plain, 0) if plain else None

    def present(self, data: bytes, *, guarded: bool) -> list[Special]:
        """Tokens whose text occurs in data, longest first; the guarded ones only if asked for."""
        found: list[Special] = []
        stack = [n for n in (self._plain, self._guarded if guarded else None) if n is not None]
        while stack:
            node = stack.pop()
            if node.prefix in data:
                found += [s for s in node.here if s.text in data]
                stack += node.children
        return sorted(found, key=lambda s: (-len(s.text), s.id))

    def split(self, data: bytes, *, guarded: bool, user: Sequence[Range] = ()) -> list[Range | int]:
        """Data -> raw stretches (start, end) and token ids, in order.

        `user` are byte ranges, ascending and disjoint, that no guarded token may touch.
        """
        parts: list[Range | int] = [(0, len(data))] if data else []
        starts = [a for a, _ in user]
        for special in self.present(data, guarded=guarded):
            out: list[Range | int] = []
            for part in parts:
                if isinstance(part, int):
                    out.append(part)
                else:
                    _split_one(data, part, special, user, starts, out)
            parts = out
        return parts


def _split_one(
    data: bytes,
    part: Range,
    special: Special,
    user: Sequence[Range],
    starts: Sequence[int],
    out: list[Range | int],
) -> None:
    pos, end = part
    text, search = special.text, pos
    while (match := data.find(text, search, end)) >= 0:
        after = match + len(text)
        if special.guarded and _touches(match, after, user, starts):
            search = match + 1
            continue
        left = match
        while special.eats_left and left > pos and data[left - 1] in BLANKS:
            left -= 1
        if left > pos:
            out.append((pos, left))
        out.append(special.id)
        pos = after
        while special.eats_right and pos < end and data[pos] in BLANKS:
            pos += 1
        search = pos
    if pos < end:
        out.append((pos, end))


def _touches(start: int, end: int, user: Sequence[Range], starts: Sequence[int]) -> bool:
    i = bisect_right(starts, end - 1) - 1
    return i >= 0 and user[i][1] > start
