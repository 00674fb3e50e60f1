"""Loading, one call for all sequences, logits, and what a closed or impossible model says."""

import logging
import subprocess
import sys

import numpy as np
import psutil
import pytest

import pykv
from pykv.config import CacheConfig, LoadConfig, SamplingConfig
from pykv.engine import memory
from pykv.errors import (
    CacheFullError,
    ConfigError,
    GGUFError,
    OutOfMemoryError,
    PykvError,
)

EXACT = CacheConfig(type_k="f32", type_v="f32")


def in_parts(model, ids, n):
    """Logits of every token, read n at a time through `step`."""
    sequence, out = model.store.new_sequence(), []
    for first in range(0, len(ids), n):
        part = np.array(ids[first : first + n], np.int32)
        out.append(model.step([(sequence, part)], np.arange(len(part), dtype=np.int32)))
    model.store.free(sequence)
    return np.concatenate(out)


class TestLogits:
    def test_shape_and_type(self, load, small):
        model = load()
        logits = model.logits([1, 2, 3])
        assert (logits.shape, logits.dtype) == ((3, len(small.TOKENS)), np.float32)
        assert model.n_vocab == len(small.TOKENS)
        assert model.store.nbytes == 0

    @pytest.mark.parametrize("threads", [1, 2])
    def test_equal_the_reference_backend(self, load, small, threads):
        ids = small.ids_of(150)
        ours = load(cache=EXACT, threads=threads).logits(ids)
        theirs = load(cache=EXACT, device="reference").logits(ids)
        # the bar of the project for float32; these logits are of the size of those models'
        np.testing.assert_allclose(ours, theirs, atol=2e-3)
        assert np.std(theirs) > 0.5

    @pytest.mark.parametrize("n", [1, 7, 64])
    def test_steps_equal_one_batch(self, load, small, n):
        model, ids = load(cache=EXACT), small.ids_of(150)
        np.testing.assert_allclose(in_parts(model, ids, n), model.logits(ids), atol=2e-3)

    def test_longer_than_the_context(self, load):
        model = load(ctx_size=20)
        with pytest.raises(CacheFullError, match="the text has 21 tokens, and 20 fit the context"):
            model.logits(range(21))
        assert model.logits(range(20)).shape[0] == 20

    def test_a_thrown_batch_leaves_nothing(self, load):
        with pytest.raises(PykvError, match="not a finite number"):
            (model := load(broken=True)).logits([1, 2, 3])
        assert model.store.nbytes == 0


CACHES = [
    CacheConfig(),
    EXACT,
    # pages of another type than the tail's, so that tokens are encoded on the way
    CacheConfig(type_k="f16", type_v="bf16", tail_type="f32"),
    CacheConfig(type_k="f16", type_v="bf16", tail_type="f32", residual=40, sinks=0),
]


class TestDeterministic:
    @pytest.mark.parametrize("cache", CACHES, ids=str)
    def test_the_batch_split_changes_no_bit(self, load, small, cache):
        model, ids = load(cache=cache, deterministic=True), small.ids_of(230)
        whole = model.logits(ids)
        for n in (1, 7, 8, 100):
            np.testing.assert_array_equal(in_parts(model, ids, n), whole)

    def test_nor_do_threads_and_ubatch(self, load, small):
        ids = small.ids_of(230)
        whole = load(deterministic=True).logits(ids)
        for settings in ({"threads": 2}, {"ubatch": 33}, {"batch": 1}):
            other = load(deterministic=True, **settings).logits(ids)
            np.testing.assert_array_equal(other, whole)

    @pytest.mark.parametrize("cache", CACHES, ids=str)
    def test_several_sequences_at_once_equal_each_alone(self, load, small, cache):
        model = load(cache=cache, deterministic=True)
        texts = [small.ids_of(n, seed=n) for n in (150, 3, 68)]
        alone = [model.logits(ids) for ids in texts]
        sequences = [model.store.new_sequence() for _ in texts]
        together = [[], [], []]
        cuts = [(0, 0), (130, 1), (140, 2), *((140 + i, 2 + i) for i in range(1, 2)), (150, 3)]
        at = [0, 0, 0]
        for long, short in cuts[1:]:
            goals = (long, short, min(long // 2, 68))
            batch, rows = [], []
            for k, goal in enumerate(goals):
                if goal > at[k]:
                    batch.append((sequences[k], np.array(texts[k][at[k] : goal], np.int32)))
                    rows.append((k, goal - at[k]))
                    at[k] = goal
            n = sum(count for _, count in rows)
            logits = model.step(batch, np.arange(n, dtype=np.int32))
            for k, count in rows:
                together[k].append(logits[:count])
                logits = logits[count:]
        for k, ids in enumerate(texts):
            got = np.concatenate(together[k])
            np.testing.assert_array_equal(got, alone[k][: len(got)])
            assert len(got) > len(ids) // 2
        for sequence in sequences:
            model.store.free(sequence)
        assert model.store.nbytes == 0

    @pytest.mark.models
    def test_on_a_real_model(self, smollm2_path):
        load = LoadConfig(ctx_size=256, deterministic=True)
        with pykv.load(smollm2_path, load=load) as model:
            text = "The cache holds keys and values, which each new token looks at. " * 6
            ids = model.tokenizer.encode(text)[:70]
            whole = model.logits(ids)
            np.testing.assert_array_equal(in_parts(model, ids, 7), whole)
            np.testing.assert_array_equal(in_parts(model, ids[:20], 1), whole[:20])


class TestSeveralSequences:
    def test_generate_together_what_each_generates_alone(self, load):
        model = load(deterministic=True)
        prompts = ["first", "the second one", "a third, longer than the others are"]
        alone = [g.tokens for g in (model.generate(p, max_tokens=12) for p in prompts) if list(g)]
        sequences = [model.store.new_sequence() for _ in prompts]
        logits = [
            model.step([(s, np.array(ids, np.int32))], np.array([len(ids) - 1], np.int32))[0]
            for s, ids in zip(sequences, map(model.tokenizer.encode, prompts), strict=True)
        ]
        made = [[], [], []]
        for _ in range(12):
            chosen = [int(row.argmax()) for row in logits]
            for tokens, token in zip(made, chosen, strict=True):
                tokens.append(token)
            batch = [(s, np.array([t], np.int32)) for s, t in zip(sequences, chosen, strict=True)]
            logits = model.step(batch, np.arange(3, dtype=np.int32))
        assert [m[: len(a)] for m, a in zip(made, alone, strict=True)] == alone
        assert max(map(len, alone)) > 3

    def test_a_full_one_leaves_the_others_as_they_were(self, load):
        model = load(ctx_size=10)
        a, b = model.store.new_sequence(), model.store.new_sequence()
        model.step([(a, np.arange(9, dtype=np.int32))], np.array([8], np.int32))
        two = np.arange(2, dtype=np.int32)
        with pytest.raises(CacheFullError, match="9 tokens are cached, 2 more"):
            model.step([(b, two), (a, two)], np.array([3], np.int32))
        assert (model.store.length(a), model.store.length(b)) == (9, 0)


class TestSeeds:
    def test_the_same_seed_gives_the_same_text_on_any_threads(self, load):
        texts = set()
        for threads in (1, 2, 2):
            generation = load(temperature=1.5, seed=5, threads=threads).generate("x", max_tokens=40)
            texts.add("".join(generation))
            assert generation.stats.seed == 5
        assert len(texts) == 1
        assert "".join(load(temperature=1.5, seed=6).generate("x", max_tokens=40)) not in texts

    def test_repeated_on_one_model(self, load):
        model = load(temperature=1.5, seed=5)
        assert len({"".join(model.generate("x", max_tokens=40)) for _ in range(3)}) == 1

    def test_a_drawn_seed_is_reported_and_gives_the_text_again(self, load):
        model = load(temperature=1.5)
        first, second = (model.generate("x", max_tokens=40) for _ in range(2))
        texts = ["".join(first), "".join(second)]
        assert first.stats.seed != second.stats.seed
        again = SamplingConfig(temperature=1.5, seed=first.stats.seed)
        assert "".join(model.generate("x", max_tokens=40, sampling=again)) == texts[0]

    @pytest.mark.models
    def test_on_a_real_model(self, smollm2_path):
        texts = set()
        for threads in (1, 2):
            load = LoadConfig(ctx_size=256, threads=threads)
            with pykv.load(smollm2_path, load=load, sampling=SamplingConfig(seed=3)) as model:
                texts.add("".join(model.generate("Once upon a time", max_tokens=24)))
        assert len(texts) == 1


class TestPrompts:
    @pytest.mark.parametrize("bad", [[-1], [1, 263], [2**40], np.array([263])])
    def test_ids_out_of_range(self, load, bad):
        model = load()
        for call in (model.generate, model.logits):
            with pytest.raises(ConfigError, match=r"there is no token .*: ids run from 0 to 262"):
                call(bad)

    @pytest.mark.parametrize("empty", ["", b"", []])
    def test_an_empty_prompt(self, load, empty):
        with pytest.raises(ConfigError, match="the prompt has no tokens; give some text"):
            load().generate(empty)

    def test_an_empty_text_after_bos_is_a_prompt(self, load, small):
        model = load(bos=True)
        generation = model.generate("", max_tokens=1)
        list(generation)
        assert generation.stats.prompt_tokens == 1
        best = int(model.logits([small.ID["<s>"]])[0].argmax())
        assert generation.tokens in ([best], [])

    def test_text_bytes_and_ids_are_one(self, load, small):
        model = load(recite=True)
        texts = [
            "".join(model.generate(p)) for p in ("x\n", b"x\n", [120, 10], np.array([120, 10]))
        ]
        assert texts == [small.RECITED] * 4

    def test_control_tokens_in_a_prompt_are_text_unless_asked_for(self, load, small):
        model = load()
        plain, parsed = (
            model.generate("<|im_end|>", max_tokens=0, parse_special=p) for p in (False, True)
        )
        assert list(plain) + list(parsed) == []
        assert plain.stats.prompt_tokens == len("<|im_end|>")
        assert parsed.stats.prompt_tokens == 1


class TestLoading:
    def test_a_context_beyond_the_trained_one_warns(self, load, caplog):
        with caplog.at_level(logging.WARNING, "pykv"):
            assert load(ctx_size=512).n_ctx == 512
            assert not caplog.records
            assert load(ctx_size=513).n_ctx == 513
        assert "was trained for 512 tokens of context" in caplog.text

    def test_the_model_s_own_context(self, load):
        assert load().n_ctx == 512

    def test_too_little_memory(self, load, monkeypatch):
        monkeypatch.setattr(memory, "free_bytes", lambda: 10 << 20)
        with pytest.raises(
            OutOfMemoryError, match=r"does not fit the 10 MiB of memory .*no context"
        ):
            load()
        assert load(check_memory=False).n_ctx == 512

    def test_a_context_that_does_not_fit_and_one_that_does(self, load, monkeypatch):
        monkeypatch.setattr(memory, "free_bytes", lambda: 100 << 20)
        with pytest.raises(OutOfMemoryError) as error:
            load(ctx_size=10**6)
        advised = int(str(error.value).split("--ctx-size ")[1].split()[0])
        assert 512 <= advised < 10**6
        load(ctx_size=advised)
        with pytest.raises(OutOfMemoryError):
            load(ctx_size=advised + 256)

    @pytest.mark.parametrize(
        ("cache", "error"),
        [
            (CacheConfig(type_k="f17"), ConfigError),
            (CacheConfig(type_v="q4_k"), PykvError),
            (CacheConfig(tail_type="q8_0"), ConfigError),
            (CacheConfig(type_k="../f16"), PykvError),
            (CacheConfig(type_k=""), PykvError),
        ],
        ids=str,
    )
    def test_caches_that_are_none(self, load, cache, error):
        with pytest.raises(error) as raised:
            load(cache=cache)
        assert "\n" not in str(raised.value)

    @pytest.mark.parametrize(
        "settings",
        [{"threads": 1}, {"threads": 3}, {"threads": 64}, {"threads": 1024}],
        ids=str,
    )
    def test_any_count_of_threads_runs_or_is_refused_in_a_sentence(self, files, small, settings):
        # in a process of its own, which a crash would end
        code = (
            "import pykv\n"
            f"load = pykv.LoadConfig(**{settings!r})\n"
            "try:\n"
            f"    with pykv.load({str(files(recite=True))!r}, load=load) as model:\n"
            "        greedy = pykv.SamplingConfig(temperature=0)\n"
            "        print(ascii(''.join(model.generate('x' * 30 + chr(10), sampling=greedy))))\n"
            "except pykv.PykvError as error:\n"
            "    print(error)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.strip() == ascii(small.RECITED) or "threads" in done.stdout

    @pytest.mark.parametrize(
        "settings",
        [{"ubatch": 1}, {"batch": 1}, {"ubatch": 10**9, "batch": 10**9}, {"ctx_size": 30}],
        ids=str,
    )
    def test_odd_settings(self, load, small, settings):
        model = load(recite=True, **settings)
        assert "".join(model.generate("\n", max_tokens=26)) == small.RECITED[:26]

    @pytest.mark.parametrize(
        "data", [b"", b"GGUF", b"\x00" * 100, b"GGUF\x03\x00\x00\x00" + b"\xff" * 99]
    )
    def test_files_that_are_no_models(self, tmp_path, data):
        path = tmp_path / "bad.gguf"
        path.write_bytes(data)
        with pytest.raises(GGUFError, match=r"bad\.gguf"):
            pykv.load(path)

    def test_the_metadata_and_the_tokenizer(self, load, files, small):
        model = load()
        assert model.architecture == "llama"
        assert model.metadata["llama.block_count"] == 2
        tokenizer = pykv.load_tokenizer(files())
        assert tokenizer.encode("the an") == model.tokenizer.encode("the an")
        assert tokenizer.encode("the") == [small.ID["the"]]


class TestClosing:
    def test_a_closed_model_says_so(self, load):
        model = load()
        chat = model.chat()
        model.close()
        model.close()
        for call in (
            lambda: model.generate("x"), lambda: model.logits([1]), lambda: model.chat(),
            lambda: model.perplexity("x" * 100, ctx_size=8), lambda: next(chat.send("x")),
            lambda: model.plan, lambda: model.store,
        ):  # fmt: skip
            with pytest.raises(ConfigError, match="the model is closed; load it again"):
                call()

    def test_with_closes(self, load):
        with load() as model:
            assert not model.closed
        assert model.closed

    def test_a_failed_load_closes_the_file(self, files, monkeypatch):
        process = psutil.Process()
        path = files()
        with pytest.raises(ConfigError):
            pykv.load(path, load=LoadConfig(device="nonsense"))
        maps = {m.path for m in process.memory_maps()}
        assert str(path) not in maps

    def test_fifty_loads_do_not_grow_the_process(self, files):
        # one leaked cache alone would be 50 times 0.3 MiB, one set of kernels 50 times 0.4 MiB
        assert grown(files(n_ctx=4096), 50, "x" * 600) < 8 << 20

    @pytest.mark.models
    def test_nor_do_ten_of_a_real_model(self, smollm2_path):
        # what stays mapped or cached of one would be 94 MiB of weights, or 4.5 MiB of cache
        assert grown(smollm2_path, 10, "The quick brown fox. ") < 32 << 20


GROWTH = """\
import gc, sys
import psutil
import pykv
process, n = psutil.Process(), int(sys.argv[2])
for i in range(n + 3):
    load = pykv.LoadConfig(ctx_size=1024, threads=1)
    with pykv.load(sys.argv[1], load=load) as model:
        list(model.generate(sys.argv[3], max_tokens=2))
    del model
    gc.collect()
    if i == 2:
        before = process.memory_info().rss
print(process.memory_info().rss - before)
"""


def grown(path, n, text):
    """Bytes that n loads and closes add to what three leave, in a process of their own."""
    command = [sys.executable, "-c", GROWTH, str(path), str(n), text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
