"""Sessions that an application reads, forks and generates from; what `load` takes."""

import numpy as np
import pytest

import pykv
from pykv.errors import ConfigError


class TestGoingOn:
    def test_a_session_goes_on_from_what_it_holds(self, load):
        model = load(temperature=0.0)
        whole = model.generate([5, 6, 7, 8], max_tokens=6)
        expected = "".join(whole)
        session = model.session()
        session.read([5, 6])
        assert "".join(session.generate([7, 8], max_tokens=6)) == expected
        assert session.tokens == [5, 6, 7, 8, *whole.tokens[:-1]]

    def test_forks_go_their_own_ways(self, load):
        model = load(temperature=0.0)
        start = model.session()
        start.read([5, 6, 7])
        for more in ([8], [9, 10]):
            fork = start.fork()
            expected = "".join(model.generate([5, 6, 7, *more], max_tokens=5))
            generation = fork.generate(more, max_tokens=5)
            assert "".join(generation) == expected
            assert generation.stats.cached_tokens == 3
        assert start.tokens == [5, 6, 7]

    def test_what_was_drawn_last_is_read_with_what_comes_next(self, load):
        model = load(temperature=0.0)
        session = model.session()
        first = session.generate([5, 6], max_tokens=4)
        list(first)
        said = [5, 6, *first.tokens]
        assert session.tokens == said[:-1]
        fork = session.fork()
        second = session.generate([7, 8], max_tokens=3)
        whole = model.generate([*said, 7, 8], max_tokens=3)
        assert "".join(second) == "".join(whole)
        assert second.stats.prompt_tokens == len(said) + 2
        np.testing.assert_array_equal(fork.read([7]), model.logits([*said, 7])[-1])
        assert fork.tokens == [*said, 7]
        fork.truncate(3)
        fork.read([9])
        assert fork.tokens == [*said[:3], 9]

    def test_a_text_starts_with_the_models_start_token_once(self, load):
        model = load(temperature=0.0)
        whole = model.tokenizer.encode("ab", add_special=True)
        session = model.session()
        list(session.generate("ab", max_tokens=0))
        list(session.generate("ab", max_tokens=0))
        assert session.tokens == [*whole, *model.tokenizer.encode("ab", add_special=False)]


def test_settings_of_another_kind(files):
    with pytest.raises(ConfigError, match=r"cache must be a CacheConfig, not \{'type_k': "):
        pykv.load(files(), cache={"type_k": "q8_0"})
    with pytest.raises(ConfigError, match="load must be a LoadConfig, not CacheConfig"):
        pykv.load(files(), load=pykv.CacheConfig())
