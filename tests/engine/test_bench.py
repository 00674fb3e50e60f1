import math
from datetime import UTC, datetime
from itertools import count
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from small_model import ID

from pykv.config import CacheConfig
from pykv.engine import bench
from pykv.engine.bench import Case, Figures
from pykv.errors import ConfigError

NONE = np.empty(0, np.int32)


def figures(case, *ns, cache=1000, step=None):
    return Figures(case, datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), ns, cache, step)


def sizes_of_decoding(model, before, n):
    """store.nbytes after each of n tokens that are really read, after `before` others."""
    sequence, sizes = model.store.new_sequence(), []
    ids = np.zeros(before + n, np.int32)
    if before:
        model.step([(sequence, ids[:before])], NONE)
    for i in range(before, before + n):
        model.step([(sequence, ids[i : i + 1])], NONE)
        sizes.append(model.store.nbytes)
    model.store.free(sequence)
    return sizes


class TestCases:
    def test_each_depth_has_its_prompts_then_its_generations(self):
        names = [c.name for c in bench.cases([512, 8], [128], [0, 4096])]
        assert names == [
            "pp512", "pp8", "tg128", "pp512 @ d4096", "pp8 @ d4096", "tg128 @ d4096",
        ]  # fmt: skip

    def test_tokens(self):
        assert (Case(512, 0, 64).n_timed, Case(512, 0, 64).n_tokens) == (512, 576)
        assert (Case(0, 8, 0).n_timed, Case(0, 8, 0).n_tokens) == (8, 8)

    def test_nothing_is_left(self):
        assert bench.cases([0], [3], [1]) == [Case(0, 3, 1)]
        with pytest.raises(ConfigError, match="nothing is to be measured"):
            bench.cases([0], [0], [1, 2])


class TestSubject:
    def test_it_counts_what_the_gguf_package_counts(self, files):
        path = files()
        tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
        found = bench.subject(path)
        total = sum(int(t.n_bytes) for t in tensors.values())
        assert found.weight_bytes == total
        assert found.n_params == sum(int(t.n_elements) for t in tensors.values())
        assert (found.architecture, found.n_ctx) == ("llama", 512)
        # of the embeddings a step looks up one row of 64 float32
        assert found.step_bytes == total - int(tensors["token_embd.weight"].n_bytes) + 64 * 4

    def test_embeddings_that_are_the_output_matrix_too_are_read_whole(self, tmp_path):
        writer = gguf.GGUFWriter(tmp_path / "tied.gguf", "llama")
        writer.add_tensor("token_embd.weight", np.zeros((10, 32), np.float32))
        writer.add_tensor("output_norm.weight", np.zeros(32, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        found = bench.subject(tmp_path / "tied.gguf")
        assert found.step_bytes == found.weight_bytes == 11 * 32 * 4
        assert found.n_ctx is None


class TestCheck:
    def check(self, cases, ctx_size=0, trained=100, types=("f16",)):
        caches = [CacheConfig(type_k=t) for t in types]
        return bench.check(cases, caches, SimpleNamespace(n_ctx=trained), ctx_size)

    def test_the_context_is_as_long_as_needed_or_as_given(self):
        assert self.check([Case(0, 8, 30), Case(32, 0, 30)]) == 62
        assert self.check([Case(0, 100, 0)]) == 100
        assert self.check([Case(0, 8, 0)], ctx_size=64) == 64
        assert self.check([Case(0, 200, 0)], ctx_size=200) == 200
        assert self.check([Case(0, 200, 0)], trained=None) == 200

    def test_a_case_beyond_the_context(self):
        with pytest.raises(ConfigError) as caught:
            self.check([Case(8, 0, 0), Case(8, 0, 93)])
        assert str(caught.value) == (
            "pp8 @ d93 needs 101 tokens, and the model was trained for 100: "
            "name a larger context with -c, or measure less"
        )
        with pytest.raises(ConfigError, match="tg9 needs 9 tokens, and the context has 8: raise"):
            self.check([Case(0, 9, 0)], ctx_size=8)

    def test_an_unknown_type_in_any_cache(self):
        with pytest.raises(ConfigError, match="unknown cache type 'q9': it is one of "):
            self.check([Case(0, 1, 0)], types=("f16", "q9"))


class TestBandwidth:
    @pytest.fixture
    def clock(self, monkeypatch):
        """Passes of 4, 2, 8, 16 and 32 seconds over a MiB; the list holds what each read."""
        ticks = iter([0, 4, 10, 12, 20, 28, 30, 46, 50, 82])
        monkeypatch.setattr(bench, "READ_BYTES", 1 << 20)
        monkeypatch.setattr(bench.time, "perf_counter", lambda: next(ticks))
        read = []
        whole = np.max

        def watched(part):
            read.append((part.ctypes.data, part.nbytes))
            return whole(part)

        monkeypatch.setattr(bench.np, "max", watched)
        return read

    @pytest.mark.parametrize("threads", [1, 2, 3])
    def test_all_bytes_once_a_pass_over_the_fastest_pass(self, clock, threads):
        assert bench.read_bandwidth(threads) == (1 << 20) / 2
        assert len(clock) == 5 * threads
        parts = sorted(clock[:threads])
        assert sum(n for _, n in parts) == 1 << 20
        assert all(at + n == after for (at, n), (after, _) in zip(parts, parts[1:], strict=False))

    def test_little_memory(self, clock, monkeypatch):
        monkeypatch.setattr(bench, "free_bytes", lambda: 1 << 18)
        assert bench.read_bandwidth(1) == (1 << 16) / 2


class TestFigures:
    def test_rates_and_the_roofline(self):
        found = figures(Case(0, 100, 0), 10**9, 2 * 10**9, step=3_000_000)
        assert found.samples_ts == [100, 50]
        # 3 MB at 1 GB/s are 3 ms, of 15 ms a token
        assert found.roofline(1e9) == pytest.approx(0.2, rel=1e-12)
        assert figures(Case(100, 0, 0), 10**9).roofline(1e9) is None

    def test_a_record(self, load, files):
        cache = CacheConfig(type_k="f32", sinks=7)
        model, file = load(cache=cache), bench.subject(files())
        found = figures(Case(0, 100, 30), 10**9, 2 * 10**9, step=3_000_000)
        record = bench.record(model, file, found, 1e9)
        assert record["avg_ts"] == 75
        assert record["stddev_ts"] == pytest.approx(25 * math.sqrt(2))
        assert (record["avg_ns"], record["stddev_ns"]) == (1_500_000_000, 707_106_781)
        assert (record["type_k"], record["type_v"], record["kv_sinks"]) == ("f32", "f16", 7)
        assert (record["n_prompt"], record["n_gen"], record["n_depth"]) == (0, 100, 30)
        assert (record["n_threads"], record["backends"]) == (1, "cpu")
        assert record["test_time"] == "2026-01-02T03:04:05Z"
        assert (record["cache_bytes"], record["step_bytes"]) == (1000, 3_000_000)
        assert record["model_size"] == file.weight_bytes
        assert record["samples_ns"] == [10**9, 2 * 10**9]

    def test_one_sample_deviates_by_nothing(self, load, files):
        record = bench.record(load(), bench.subject(files()), figures(Case(8, 0, 0), 10**9), 1e9)
        assert (record["stddev_ts"], record["stddev_ns"], record["avg_ts"]) == (0, 0, 8)


class TestMeasure:
    def test_what_the_model_reads(self, load, fed):
        model = load(bos=True, ubatch=16)
        seen = fed(model)
        wanted = bench.cases([20], [6], [0, 9])
        found = list(bench.measure(model, wanted, 3, 0))
        assert [f.case for f in found] == wanted
        assert [len(f.samples_ns) for f in found] == [3] * 4
        # warm-ups are a whole prompt and one token; the depth is read once
        lengths = [20] * 4 + [1] + [6] * 3 + [9] + [20] * 4 + [1] + [6] * 3
        texts, rest = [], seen[:]
        for n in lengths:
            texts.append(rest[:n])
            rest = rest[n:]
        assert rest == []
        bos = ID["<s>"]
        assert texts[0][0] == texts[4][0] == texts[8][0] == bos
        assert texts[0] == texts[1] == texts[3]  # repetitions are alike
        assert texts[5] == texts[0][:6]
        assert bos not in texts[9] + texts[13]
        assert len(set(texts[9])) > 1
        assert model.store.nbytes == 0

    def test_without_a_bos_no_token_is_replaced(self, load, fed):
        model = load()
        seen = fed(model)
        list(bench.measure(model, [Case(5, 0, 0)], 1, 0))
        assert seen[:5] == np.random.default_rng(0).integers(0, model.n_vocab, 5).tolist()

    def test_samples_are_the_clocks(self, load, monkeypatch):
        ticks = count(0, 1000)
        monkeypatch.setattr(bench.time, "perf_counter_ns", lambda: next(ticks))
        found = list(bench.measure(load(), bench.cases([8], [4], [3]), 2, 0))
        assert [f.samples_ns for f in found] == [(1000, 1000)] * 2

    @pytest.mark.parametrize("depth", [0, 70])
    @pytest.mark.parametrize("types", [("f16", "f16"), ("f32", "f16")])
    def test_bytes_are_those_of_the_store(self, load, depth, types):
        model = load(cache=CacheConfig(type_k=types[0], type_v=types[1]))
        prompt, decode = bench.measure(model, bench.cases([100], [80], [depth]), 1, 10_000)
        sizes = sizes_of_decoding(model, depth, 100)
        assert prompt.cache_bytes == sizes[-1]
        assert prompt.step_bytes is None
        assert decode.cache_bytes == sizes[79]
        assert decode.step_bytes == 10_000 + round(np.mean(sizes[:80]))

    @pytest.mark.parametrize(
        "settings",
        [
            {"type_k": "q8_0", "type_v": "q8_0"},
            {"type_k": "kivi2", "type_v": "f16"},
            {"type_k": "q8_0", "override": "1=k:kivi2,v:q4_0"},
        ],
    )
    def test_bytes_of_a_coded_cache(self, load, settings):
        cache = CacheConfig(residual=32, **settings)
        model = load(cache=cache, device="reference")
        prompt, decode = bench.measure(model, bench.cases([100], [70], [40]), 1, 0)
        sizes = sizes_of_decoding(model, 40, 100)
        assert min(np.diff(sizes)) < 0  # a page was encoded on the way
        assert prompt.cache_bytes == sizes[-1]
        assert decode.cache_bytes == sizes[69]
        assert decode.step_bytes == round(np.mean(sizes[:70]))

    @pytest.mark.parametrize("policy", ["sinks", "h2o", "h2o:prompt=full", "snapkv", "fastgen"])
    @pytest.mark.parametrize("depth", [0, 200])
    def test_under_a_policy_what_came_before_is_a_prompt(self, load, policy, depth):
        budget = None if policy == "fastgen" else "64"
        model = load(cache=CacheConfig(policy=policy, budget=budget), ubatch=48)
        cases = [Case(150, 0, depth), Case(0, 100, depth)]
        found = list(bench.measure(model, cases, 2, 1000))
        assert model.store.nbytes == 0
        for case, of in zip(cases, found, strict=True):
            session, sizes = model.session(), []
            ids = bench._tokens(model, 0, depth).tolist() or [0]
            ids += bench._tokens(model, depth, case.n_tokens).tolist()
            if depth:
                session.read(ids[:depth])
                session.end_prompt()
            else:
                ids.pop(0)
                model.store.end_prompt(session._number)
            if case.n_prompt:
                session.begin_prompt()
                session.read(ids[depth:])
                session.end_prompt()
            for token in ids[depth:] if case.n_gen else []:
                session.read([token])
                sizes.append(model.store.nbytes)
            assert of.cache_bytes == model.store.nbytes
            assert len(of.samples_ns) == 2
            assert case.n_prompt or of.step_bytes == 1000 + round(np.mean(sizes))
            session.free()

    def test_an_interrupt_leaves_no_page_behind(self, load, monkeypatch):
        model = load()
        steps, step = count(), model.step

        def interrupted(*args):
            if next(steps) == 5:
                raise KeyboardInterrupt
            return step(*args)

        monkeypatch.setattr(model, "step", interrupted)
        found = bench.measure(model, bench.cases([8], [8], [4]), 2, 0)
        assert next(found).case == Case(8, 0, 4)
        with pytest.raises(KeyboardInterrupt):
            next(found)
        assert model.store.nbytes == 0

    def test_it_may_be_dropped_after_the_model_is_closed(self, load):
        model = load()
        store = model.store
        found = bench.measure(model, bench.cases([8], [8], [4]), 1, 0)
        next(found)
        model.close()
        found.close()
        assert store.nbytes == 0
