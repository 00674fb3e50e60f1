"""Plain ports of llama.cpp's two merge loops, to compare the libraries with: slow and short."""

import heapq

import regex


def spm(text: bytes, ids: dict[bytes, int], scores: list[float]) -> list[int]:
    """llm_tokenizer_spm_session::tokenize, for text whose spaces are already U+2581."""
    sizes = {0xC: 2, 0xD: 2, 0xE: 3, 0xF: 4}
    symbols: list[bytes] = []
    at = 0
    while at < len(text):
        n = sizes.get(text[at] >> 4, 1)
        symbols.append(text[at : at + n])
        at += n
    left = [i - 1 for i in range(len(symbols))]
    right = [*range(1, len(symbols)), -1][: len(symbols)]
    queue: list[tuple[float, int, int, int]] = []

    def add(a: int, b: int) -> None:
        if a >= 0 and b >= 0:
            token = ids.get(symbols[a] + symbols[b])
            if token is not None:
                heapq.heappush(queue, (-scores[token], a, b, len(symbols[a] + symbols[b])))

    for i in range(1, len(symbols)):
        add(i - 1, i)
    while queue:
        _, a, b, size = heapq.heappop(queue)
        if not symbols[a] or not symbols[b] or len(symbols[a] + symbols[b]) != size:
            continue
        symbols[a] += symbols[b]
        symbols[b] = b""
        right[a] = right[b]
        if right[b] >= 0:
            left[right[b]] = a
        add(left[a], a)
        add(a, right[a])
    out: list[int] = []
    for symbol in symbols:
        if symbol in ids:
            out.append(ids[symbol])
        else:
            out += [ids[b"<0x%02X>" % byte] for byte in symbol]
    return out


def pieces(text: str, patterns: tuple[str, ...]) -> list[str]:
    """unicode_regex_split: every pattern cuts what the one before left, gaps stay."""
    parts = [text]
    for pattern in patterns:
        out = []
        for part in parts:
            at = 0
            for match in regex.finditer(pattern, part):
                out += [part[at : match.start()], match[0]]
                at = match.end()
            out.append(part[at:])
        parts = [p for p in out if p]
    return parts


def bpe(word: str, ids: dict[str, int], ranks: dict[tuple[str, str], int]) -> list[int]:
    """llm_tokenizer_bpe_session::tokenize for one word in the byte alphabet: best pair first."""
    symbols = list(word)
    while len(symbols) > 1:
        pairs = [
            (ranks.get(p, len(ranks)), i)
            for i, p in enumerate(zip(symbols, symbols[1:], strict=False))
        ]
        rank, i = min(pairs)
        if rank == len(ranks):
            break
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    return [ids[s] for s in symbols]
