import json

from pykv.engine.stats import Stats


def test_rates_count_only_what_was_computed():
    stats = Stats(prompt_tokens=110, cached_tokens=10, prompt_seconds=2.0)
    assert (stats.read_tokens, stats.prompt_tps) == (100, 50.0)
    assert Stats(generated_tokens=30, generated_seconds=1.5).generated_tps == 20.0


def test_nothing_done_is_no_division_by_zero():
    assert (Stats().prompt_tps, Stats().generated_tps) == (0.0, 0.0)


def test_to_dict_survives_json():
    stats = Stats(
        prompt_tokens=4, prompt_seconds=0.5, seed=7, plan=("q4_1: numba",), finish="length"
    )
    values = stats.to_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["prompt_tokens_per_second"] == 8.0
    assert (values["seed"], values["plan"], values["finish"]) == (7, ["q4_1: numba"], "length")
