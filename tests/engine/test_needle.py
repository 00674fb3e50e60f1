import json
import re
from itertools import pairwise

import numpy as np
import pytest

from pykv.config import CacheConfig
from pykv.engine import needle
from pykv.engine.needle import AFTER, BEFORE, Grid, Score, Task
from pykv.engine.session import Session
from pykv.errors import CacheFullError, ConfigError

FACT = re.compile(r"The secret number of (\w+) is (\d{7})\.")
KIVI2 = CacheConfig(type_k="kivi2", type_v="kivi2", residual=0, guard="off")


@pytest.fixture
def model(load):
    """A small model with room for some text."""
    return load(n_ctx=2048)


def text_of(model, ids):
    return b"".join(model.tokenizer.piece(i) for i in ids).decode()


class TestTasks:
    def test_the_fact_is_asked_for_at_the_end(self, model):
        for task in needle.tasks(model, [600, 1000], [0, 50, 100], 2):
            document, question = text_of(model, task.document), text_of(model, task.question)
            [(name, number)] = FACT.findall(document)
            assert question.count(name) == 2
            assert question.endswith(f"The secret number of {name} is")
            assert text_of(model, task.answer) == f" {number}" == f" {task.number}"
            whole = [*task.document, *task.question, *task.answer]
            # joined up it is one text, and as long as its sentences let it be
            assert whole == model.tokenizer.encode(document + question + " " + number)
            assert task.length - 150 < len(whole) <= task.length

    def test_the_fact_is_at_the_sentence_end_nearest_to_its_depth(self, model):
        for task in needle.tasks(model, [1500], [0, 10, 33, 50, 90, 100]):
            document = text_of(model, task.document)
            fact = FACT.search(document)
            around = document[: fact.start()] + document[fact.end() + 1 :]
            # the small model has a token for a byte, less some merges
            sizes = [
                len(model.tokenizer.encode(s + " ", add_special=False))
                for s in re.split(r"(?<=\.) ", around.rstrip())
            ]
            ends = np.cumsum([0, *sizes])
            before = len(model.tokenizer.encode(document[: fact.start()], add_special=False))
            target = task.depth / 100 * ends[-1]
            assert abs(before - target) <= np.abs(ends - target).min() + len(sizes)
            if task.depth in (0, 100):
                assert (fact.start() == 0) == (task.depth == 0)
                assert (fact.end() == len(document)) == (task.depth == 100)

    def test_the_text_around_it_is_the_same_at_every_depth(self, model):
        made = needle.tasks(model, [800], [0, 40, 100])
        around = [FACT.sub("", text_of(model, t.document)).split() for t in made]
        n = min(map(len, around)) - 20  # names have different lengths, so the end may differ
        assert n > 80
        assert around[0][:n] == around[1][:n] == around[2][:n]

    def test_a_seed_says_everything(self, model):
        same = [needle.tasks(model, [500], [0, 50], 2, seed=seed) for seed in (3, 3, 4)]
        assert same[0] == same[1] != same[2]
        assert len({t.number for t in same[0]}) == 4
        # a cell is the same in whatever grid it stands
        assert needle.tasks(model, [400, 500], [50], 1, seed=3)[1] == same[0][2]

    def test_a_text_of_ones_own(self, model):
        text = "One thing is known. Is it?\nNobody said!  " * 60
        [task] = needle.tasks(model, [700], [50], text=text)
        document = text_of(model, task.document)
        fact = FACT.search(document)
        assert document[: fact.start()] + document[fact.end() + 1 :] in text
        assert document[: fact.start()].rstrip()[-1] in ".?!"

    @pytest.mark.parametrize("text", ["word " * 500, "x" * 3000, "本当。" * 400, "a\n\nb " * 600])
    def test_a_text_without_sentences_is_cut_all_the_same(self, model, text):
        for task in needle.tasks(model, [300, 700], [0, 60, 100], text=text):
            whole = [*task.document, *task.question, *task.answer]
            assert len(whole) <= task.length
            assert FACT.search(text_of(model, task.document))[2] == task.number

    @pytest.mark.parametrize(
        ("lengths", "text", "said"),
        [
            ([512, 4096], None, "a length of 4,096 tokens does not fit the context, 2,048"),
            ([100], None, r"100 tokens is too short: the needle and its question take 1\d\d, .*"),
            ([1024], "Too short. " * 20, r"the text has \d+ tokens, and a length of 1,024 needs"),
            ([1024], "", "the text has 0 tokens"),
        ],
    )
    def test_what_cannot_be_asked(self, model, lengths, text, said):
        with pytest.raises(ConfigError, match=said):
            needle.tasks(model, lengths, [50], text=text)

    def test_the_least_length_that_is_named_suffices(self, model):
        with pytest.raises(ConfigError) as raised:
            needle.tasks(model, [100], [50])
        least = int(re.search(r"give (\d+) or more", str(raised.value))[1])
        [task] = needle.tasks(model, [least + 5], [50])  # a name may have six letters
        assert FACT.search(text_of(model, task.document))


def asked(prompt, answer):
    """A task whose text is a few letters that the reciting model knows; a token is a byte."""
    ids, n = list((prompt + answer).encode()), len(prompt)
    return Task(64, 50, ids[: n - 3], ids[n - 3 : n], ids[n:], answer)


class TestScores:
    def test_what_the_whole_text_read_at_once_predicts(self, model):
        made = needle.tasks(model, [300, 420], [0, 100])
        found = list(needle.scores(model, made, model.config))
        assert [(s.length, s.depth) for s in found] == [(t.length, t.depth) for t in made]
        for task, score in zip(made, found, strict=True):
            whole = [*task.document, *task.question, *task.answer]
            logits = model.logits(whole)[-len(task.answer) - 1 : -1].astype(float)
            logits -= np.log(np.exp(logits).sum(1, keepdims=True))
            want = logits[np.arange(len(task.answer)), list(task.answer)].mean()
            # batches are split elsewhere, and float32 sums with them
            assert score.log_prob == pytest.approx(want, abs=1e-4)
            assert not score.exact
            # two layers of two heads of 16 channels, keys and values, 2 bytes; the last is not read
            assert score.f16_bytes == (len(whole) - 1) * 2 * 2 * 16 * 2 * 2
            assert score.cache_bytes > score.f16_bytes

    def test_an_answer_is_exact_where_greedy_decoding_gives_it(self, load):
        model, prompt = load(recite=True), "bcd\nabcdef"
        assert "".join(model.generate(list(prompt.encode()), max_tokens=4)) == "ghij"
        tries = [asked(prompt, answer) for answer in ("ghij", "ghix", "xhij", "g")]
        found = list(needle.scores(model, tries, model.config))
        assert [s.exact for s in found] == [True, False, False, True]
        assert found[0].log_prob > found[1].log_prob

    def test_another_cache_is_the_one_of_a_model_that_was_loaded_with_it(self, model, load):
        made = needle.tasks(model, [400], [0, 50])
        [_, settled] = needle.settled(model, [model.config, KIVI2])
        beside = list(needle.scores(model, made, settled))
        other = load(n_ctx=2048, cache=KIVI2)
        alone = list(needle.scores(other, made, other.config))
        exact = list(needle.scores(model, made, model.config))
        for a, b, c in zip(beside, alone, exact, strict=True):
            assert (a.log_prob, a.cache_bytes) == (b.log_prob, b.cache_bytes)
            assert a.log_prob != c.log_prob
            assert a.cache_bytes < c.cache_bytes

    @pytest.mark.parametrize("cache", [CacheConfig(), KIVI2])
    def test_afterwards_and_in_between_the_model_is_as_before(self, model, cache):
        store, config = model.store, model.config
        made = needle.tasks(model, [300], [0, 50, 100])
        running = needle.scores(model, made, cache)
        next(running)
        running.close()
        assert (model.store, model.config, store.nbytes) == (store, config, 0)
        with pytest.raises(CacheFullError):
            list(needle.scores(model, [Task(9, 0, [65] * 3000, [65], [65], "")], cache))
        assert (model.store, model.config, store.nbytes) == (store, config, 0)

    @pytest.mark.parametrize("compress", [AFTER, BEFORE])
    def test_the_end_prompts_before_or_after_the_question(self, model, monkeypatch, compress):
        ends = []
        monkeypatch.setattr(Session, "end_prompt", lambda session: ends.append(len(session)))
        [task] = needle.tasks(model, [300], [50])
        list(needle.scores(model, [task], model.config, compress))
        after = len(task.question) if compress == AFTER else 0
        assert ends == [len(task.document) + after]

    def test_a_cache_that_does_not_run_is_told_before_anything_does(self, model):
        with pytest.raises(ConfigError, match="run `pykv calibrate"):
            needle.settled(model, [model.config, KIVI2, CacheConfig(type_k="nuq3")])


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"lengths": []}, "a grid needs one length and one depth at least"),
        ({"depths": []}, "a grid needs one length and one depth at least"),
        ({"lengths": [512, 10]}, "a length must be 64 tokens or more, not 10"),
        ({"depths": [50, 100.5]}, "a depth must be 0 to 100 percent of the text, not 100.5"),
        ({"depths": [float("nan")]}, "a depth must be 0 to 100 percent of the text, not nan"),
        ({"needles": 0}, "there must be 1 needle or more in each cell, not 0"),
        ({"compress": "later"}, "'later' is unknown: it is after-question or before-question"),
        ({"caches": [CacheConfig(type_v="q4")]}, "unknown cache type 'q4'"),
    ],
)
def test_what_is_wrong_whatever_the_model(how, said):
    right = {"lengths": [512], "depths": [50], "needles": 1, "compress": AFTER, "caches": []}
    needle.check(**right)
    with pytest.raises(ConfigError, match=said):
        needle.check(**(right | how))


class TestGrid:
    SCORES = (
        Score(512, 0, True, -0.5, 90, 100, 1.0),
        Score(512, 0, False, -1.5, 91, 101, 1.0),
        Score(512, 50, False, -4.0, 60, 99, 1.0),
    )

    def test_means_of_cells_and_of_all(self):
        grid = Grid("f16", CacheConfig(), self.SCORES)
        assert (grid.cell(512, 0).n, grid.cell(512, 0).exact, grid.cell(512, 0).log_prob) == (
            2, 0.5, -1.0,
        )  # fmt: skip
        assert grid.cell(1024, 0) is None
        assert (grid.total.n, grid.total.log_prob) == (3, -2.0)
        assert grid.largest is self.SCORES[1]

    def test_everything_is_plain_json(self):
        found = json.loads(json.dumps(Grid("f16", CacheConfig(), self.SCORES).to_dict()))
        assert (found["exact"], found["log_prob"]) == (pytest.approx(1 / 3), -2.0)
        assert (found["cache_bytes"], found["cache_f16_bytes"]) == (91, 101)
        assert found["cache"]["type_k"] == "f16"
        assert [s["depth"] for s in found["needles"]] == [0, 0, 50]
        none = Grid("f16", CacheConfig(), ()).to_dict()
        assert (none["exact"], none["cache_bytes"], none["needles"]) == (None, None, [])


def test_pieces_lose_nothing():
    text = (
        'He said "no."  And left!\n\nA list\n\n1. one?) two 本当。はい！ ' + "y " * 700 + "z" * 900
    )
    pieces = list(needle._pieces(text))
    assert "".join(pieces) == text
    assert pieces[:3] == ['He said "no."  ', "And left!\n\n", "A list\n\n"]
    assert all(0 < len(p) <= 620 for p in pieces)
    assert all(a[-1].isspace() or a[-1] in "。！z" for a, _ in pairwise(pieces))
