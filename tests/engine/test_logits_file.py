"""llama.cpp's file of logits: bytes as its specification has them, and what goes wrong on disks."""

import math
import os
import struct
import sys

import numpy as np
import pytest

from pykv.engine import logits_file
from pykv.engine.logits_file import MAGIC, Extent, LogitsReader, LogitsWriter, decode, encode
from pykv.errors import ConfigError

TOKENS = np.array([[3, 1, 4, 1, 2], [0, 2, 4, 3, 1]], np.int32)  # two chunks of 5: 2 rows each
V = 5


def logits_of(n, vocabulary=V, spread=6.0, seed=0):
    return (spread * np.random.default_rng(seed).standard_normal((n, vocabulary))).astype("f4")


def by_hand(tokens, vocabulary, rows):
    """A file's bytes; rows are (scale, least, codes)."""
    n_chunks, n_ctx = tokens.shape
    data = b"_logits_" + struct.pack("<Iii", n_ctx, vocabulary, n_chunks)
    data += struct.pack(f"<{tokens.size}i", *tokens.ravel().tolist())
    for scale, least, codes in rows:
        codes = [*codes, *([0] * (len(codes) % 2))]
        data += struct.pack("<ff", scale, least) + struct.pack(f"<{len(codes)}H", *codes)
    return data


ROWS = [
    (0.5, -7.0, [0, 14, 2, 65535, 1]),
    (2.0**-12, -16.25, [65535, 0, 1, 2, 3]),
    (0.0, -1.5, [0, 0, 0, 0, 0]),
    (1.0, -3.0, [5, 4, 3, 2, 1]),
]


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "base.kld"
    path.write_bytes(by_hand(TOKENS, V, ROWS))
    return path


class TestReading:
    def test_a_file_written_byte_by_byte(self, good):
        with LogitsReader(good) as reader:
            assert reader.extent == Extent(5, V, 2)
            assert reader.extent.n_scored == 2
            assert reader.tokens.tolist() == TOKENS.tolist()
            got = np.concatenate([reader.read(0, 0, 2), reader.read(1, 0, 1), reader.read(1, 1, 1)])
        expected = [[scale * c + least for c in codes] for scale, least, codes in ROWS]
        assert got.dtype == np.float32
        assert got.tolist() == np.array(expected, np.float32).tolist()

    def test_an_even_vocabulary_has_no_code_to_spare(self, tmp_path):
        path = tmp_path / "even.kld"
        rows = [(s, least, codes[:4]) for s, least, codes in ROWS]
        path.write_bytes(by_hand(TOKENS % 4, 4, rows))
        with LogitsReader(path) as reader:
            assert reader.read(1, 1, 1).tolist() == [[2.0, 1.0, 0.0, -1.0]]

    @pytest.mark.parametrize(("n_ctx", "n_scored"), [(512, 255), (513, 256), (4, 1), (5, 2)])
    def test_rows_of_a_chunk(self, n_ctx, n_scored):
        # positions n_ctx / 2 to n_ctx - 2, of which each predicts the next
        assert Extent(n_ctx, 2, 1).n_scored == n_scored == len(range(n_ctx // 2, n_ctx - 1))

    def test_the_size_for_gemma(self):
        # 16 chunks of 255 rows of 262,144 codes and two floats: the 2.1 GB that are known of it
        assert Extent(512, 262144, 16).nbytes == 20 + 4 * 8192 + 16 * 255 * (8 + 2 * 262144)


class TestRefusals:
    def refused(self, path, match):
        with pytest.raises(ConfigError, match=match) as caught:
            LogitsReader(path)
        assert str(path) in str(caught.value)

    @pytest.mark.parametrize("data", [b"", b"GGUF", b"_logits", b"_logitz_" + bytes(99)])
    def test_another_kind_of_file(self, tmp_path, data):
        path = tmp_path / "x"
        path.write_bytes(data)
        self.refused(path, "is no file of logits, which begins with _logits_")

    @pytest.mark.parametrize("n", [8, 19, 20, 59, 60, 61, -1])
    def test_a_file_that_breaks_off(self, good, n):
        good.write_bytes(good.read_bytes()[:n])
        self.refused(good, "truncated" if n > 19 or n < 0 else "its header breaks off after")

    def test_a_file_with_more_in_it(self, good):
        good.write_bytes(good.read_bytes() + b"x")
        self.refused(good, "is too long: its 2 chunks take 140 bytes, and it has 141")

    @pytest.mark.parametrize("numbers", [(3, V, 2), (5, 0, 2), (5, -1, 2), (5, V, 0), (5, V, -7)])
    def test_a_header_that_makes_no_sense(self, good, numbers):
        data = bytearray(good.read_bytes())
        data[8:20] = struct.pack("<Iii", *numbers)
        good.write_bytes(data)
        self.refused(good, "is damaged, its header tells of")

    def test_a_header_that_asks_for_the_whole_memory(self, good):
        data = bytearray(good.read_bytes())
        data[8:20] = struct.pack("<Iii", 2**32 - 1, 2**31 - 1, 2**31 - 1)
        good.write_bytes(data)
        self.refused(good, "truncated")

    @pytest.mark.parametrize("token", [-1, V])
    def test_tokens_outside_the_vocabulary(self, good, token):
        tokens = TOKENS.copy()
        tokens[1, 3] = token
        good.write_bytes(by_hand(tokens, V, ROWS))
        self.refused(good, "tokens outside its vocabulary")

    @pytest.mark.parametrize(
        "bad", [(math.nan, -1), (-0.5, -1), (math.inf, -1), (1, math.nan), (1, -math.inf)]
    )
    def test_rows_that_are_no_numbers(self, good, bad):
        good.write_bytes(by_hand(TOKENS, V, [*ROWS[:3], (*bad, [0] * V)]))
        with LogitsReader(good) as reader:
            reader.read(1, 0, 1)
            with pytest.raises(ConfigError, match="chunk 1 has probabilities that are no numbers"):
                reader.read(1, 1, 1)

    def test_a_file_that_shrinks_meanwhile(self, good):
        with LogitsReader(good) as reader:
            os.truncate(good, 130)
            with pytest.raises(ConfigError, match="it became shorter while it was read"):
                reader.read(1, 0, 2)

    def test_no_file(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            LogitsReader(tmp_path / "none")


def slow_row(x):
    """llama.cpp's numbers for a row, in float64: scale, least, codes."""
    top, bottom = max(x), max(min(x), max(x) - 16)
    log_total = math.log(math.fsum(math.exp(v - top) for v in x))
    scale = (top - bottom) / 65535
    codes = [round((v - bottom) / scale) if v > bottom else 0 for v in x]
    return scale, bottom - top - log_total, codes


class TestEncoding:
    @pytest.mark.parametrize(("vocabulary", "spread"), [(300, 1.0), (301, 4.0), (1000, 30.0)])
    def test_against_a_slow_computation(self, vocabulary, spread):
        logits = logits_of(20, vocabulary, spread)
        rows = encode(logits, Extent(4, vocabulary, 1))
        assert rows.dtype.itemsize == 2 * 2 * math.ceil(vocabulary / 2) + 8
        for row, x in zip(rows, logits.tolist(), strict=True):
            scale, least, codes = slow_row(x)
            # float32 of numbers of at most 40: the sums are off by a few parts in 2^24
            assert row["scale"] == pytest.approx(scale, rel=1e-6)
            assert row["least"] == pytest.approx(least, abs=1e-5)
            got = row["codes"].astype(int)
            # and 65,535 of them by at most 0.03: a code may round the other way
            assert np.abs(got[:vocabulary] - codes).max() <= 1
            assert (got[:vocabulary] != codes).mean() < 0.06
            assert (got.max(), got[vocabulary:].any()) == (65535, False)

    def test_what_comes_back(self):
        logits = logits_of(30, 500, 3.0)
        got = decode(encode(logits, Extent(4, 500, 1)), 500)
        wide = logits.astype(np.float64)
        log_p = wide - np.log(np.exp(wide).sum(1, keepdims=True))
        floor = wide.max(1, keepdims=True) - 16 - np.log(np.exp(wide).sum(1, keepdims=True))
        # half a step of 16 / 65535, and float32 for numbers of at most 32
        assert np.abs(got - np.maximum(log_p, floor)).max() < 0.5 * 16 / 65535 + 5e-6

    @pytest.mark.parametrize("x", [[2.5] * 6, [1e-45, 0, 0, 0, 0, 0], [0.0] * 6])
    def test_equal_logits(self, x):
        rows = encode(np.array([x], np.float32), Extent(4, 6, 1))
        assert decode(rows, 6)[0] == pytest.approx([-math.log(6)] * 6, rel=1e-6)

    def test_far_away_logits(self):
        x = np.array([[-3e38, 3e38, -np.inf, 3e38]], np.float32)
        got = decode(encode(x, Extent(4, 4, 1)), 4)[0]
        assert got == pytest.approx(np.array([-16, 0, -16, 0]) - math.log(2), abs=1e-5)


class TestWriting:
    def test_what_is_written_is_read_again(self, tmp_path):
        path, logits, told = tmp_path / "out.kld", logits_of(4), []
        with LogitsWriter(path, told.append) as writer:
            writer.begin(TOKENS, V)
            assert told == [140]
            assert not path.exists()
            for part in (logits[:3], logits[3:]):
                writer.add(part)
        assert os.listdir(tmp_path) == ["out.kld"]
        rows = [(r["scale"], r["least"], r["codes"][:V]) for r in encode(logits, Extent(5, V, 2))]
        assert path.read_bytes() == by_hand(TOKENS, V, rows)
        with LogitsReader(path) as reader:
            expected = decode(encode(logits, reader.extent), V)
            assert reader.read(1, 0, 2).tolist() == expected[2:].tolist()

    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
    @pytest.mark.parametrize("old", [None, MAGIC + b"before"])
    def test_an_interrupted_run_leaves_everything_as_it_was(self, tmp_path, error, old):
        path = tmp_path / "out.kld"
        if old is not None:
            path.write_bytes(old)

        def interrupted():
            with LogitsWriter(path) as writer:
                writer.begin(TOKENS, V)
                writer.add(logits_of(3))
                raise error

        with pytest.raises(error):
            interrupted()
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == (
            {} if old is None else {"out.kld": old}
        )

    def test_a_file_of_something_else_is_not_replaced(self, tmp_path):
        (tmp_path / "corpus.txt").write_text("some text")
        with (
            pytest.raises(ConfigError, match="corpus.txt is there already and holds no logits"),
            LogitsWriter(tmp_path / "corpus.txt"),
        ):
            pass
        assert (tmp_path / "corpus.txt").read_text() == "some text"
        assert os.listdir(tmp_path) == ["corpus.txt"]

    def test_an_unfinished_file_gets_no_name(self, tmp_path):
        with LogitsWriter(tmp_path / "out.kld") as writer:
            writer.begin(TOKENS, V)
            writer.add(logits_of(3))
        with LogitsWriter(tmp_path / "out.kld"):
            pass
        assert os.listdir(tmp_path) == []

    def test_rows_that_nobody_asked_for(self, tmp_path):
        with LogitsWriter(tmp_path / "out.kld") as writer:
            with pytest.raises(ConfigError, match="rows were added"):
                writer.add(logits_of(1))
            writer.begin(TOKENS, V)
            with pytest.raises(ConfigError, match="rows were added"):
                writer.add(logits_of(5))

    def test_a_disk_with_too_little_room(self, tmp_path, monkeypatch):
        free = logits_file.shutil.disk_usage(tmp_path)._replace(free=139)
        monkeypatch.setattr(logits_file.shutil, "disk_usage", lambda folder: free)
        told = []
        with (
            pytest.raises(ConfigError, match=r"would take 140 bytes, and its disk has 139 free"),
            LogitsWriter(tmp_path / "out.kld", told.append) as writer,
        ):
            writer.begin(TOKENS, V)
        assert (told, os.listdir(tmp_path)) == ([], [])
        monkeypatch.setattr(logits_file.shutil, "disk_usage", lambda _: free._replace(free=140))
        with LogitsWriter(tmp_path / "out.kld") as writer:
            writer.begin(TOKENS, V)
            writer.add(logits_of(4))
        assert os.listdir(tmp_path) == ["out.kld"]

    @pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit on a file's size")
    @pytest.mark.parametrize("n_chunks", [40, 400])
    def test_a_disk_that_becomes_full(self, tmp_path, n_chunks):
        import resource

        def write():
            with LogitsWriter(tmp_path / "out.kld") as writer:
                writer.begin(np.tile(TOKENS[:1], (n_chunks, 1)), V)
                for _ in range(n_chunks):
                    writer.add(logits_of(2))

        # 40 chunks fit the buffer, and are written as the file is closed
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        try:
            with pytest.raises(OSError, match="File too large") as caught:
                write()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert caught.value.filename == str(tmp_path / "out.kld")
        assert os.listdir(tmp_path) == []

    def test_names_that_no_file_can_have(self, tmp_path):
        with pytest.raises(ConfigError, match="there is no such folder"):
            LogitsWriter(tmp_path / "none" / "out.kld").__enter__()
        with pytest.raises(ConfigError, match="is a folder or a device, give the name of a file"):
            LogitsWriter(tmp_path).__enter__()
        assert os.listdir(tmp_path) == []

    @pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege on Windows")
    def test_a_links_target_is_replaced(self, tmp_path):
        target, link = tmp_path / "target", tmp_path / "link"
        target.write_bytes(MAGIC + b"before")
        link.symlink_to(target)
        with LogitsWriter(link) as writer:
            writer.begin(TOKENS, V)
            writer.add(logits_of(4))
        assert link.is_symlink()
        assert target.read_bytes()[:8] == b"_logits_"
