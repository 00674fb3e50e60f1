from itertools import islice
from random import Random

from pykv.engine.filler import sentences


def test_sentences_are_the_same_for_the_same_seed_and_differ_otherwise():
    made = [list(islice(sentences(Random(seed)), 200)) for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]
    for sentence in made[0]:
        assert sentence[0].isupper()
        assert sentence.endswith(".")
        assert not set("{}") & set(sentence)


def test_a_long_text_hardly_repeats_itself_and_holds_no_digit():
    made = list(islice(sentences(Random(0)), 300))
    assert len(set(made)) > 200
    assert not any(c.isdigit() for c in "".join(made))
    # no sentence stands beside itself, whatever the number of forms
    assert all(a != b for a, b in zip(made, made[1:], strict=False))
