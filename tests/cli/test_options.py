import inspect
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykv.cli import options
from pykv.config import CacheConfig, LoadConfig, SamplingConfig


def test_every_field_has_a_flag_and_no_flag_is_declared_twice():
    names = []
    for group, (_, flags) in options.GROUPS.items():
        assert list(flags) == [f.name for f in fields(group)]
        for flag in flags.values():
            names += [n for name in flag.names for n in name.split("/") if n]
    assert len(names) == len(set(names))


# llama.cpp's names (common/arg.cpp), their values, and where they must arrive
CASES = [
    (["-c", "128"], "load", "ctx_size", 128),
    (["--ctx-size", "128"], "load", "ctx_size", 128),
    (["-b", "64"], "load", "batch", 64),
    (["--batch-size=64"], "load", "batch", 64),
    (["-ub", "32"], "load", "ubatch", 32),
    (["--ubatch_size", "32"], "load", "ubatch", 32),
    (["-t", "3"], "load", "threads", 3),
    (["-t3"], "load", "threads", 3),
    (["--device", "reference"], "load", "device", "reference"),
    (["-ngl", "99"], "load", "gpu_layers", "99"),
    (["--n-gpu-layers", "all"], "load", "gpu_layers", "all"),
    (["--gpu-layers", "0"], "load", "gpu_layers", "0"),
    (["--deterministic"], "load", "deterministic", True),
    (["--no-check-memory"], "load", "check_memory", False),
    (["--no_check_memory"], "load", "check_memory", False),
    (["--chat-template", "chatml"], "load", "chat_template", "chatml"),
    (["-ctk", "q8_0"], "cache", "type_k", "q8_0"),
    (["--cache-type-k", "q8_0"], "cache", "type_k", "q8_0"),
    (["--cache_type_v=q4_0"], "cache", "type_v", "q4_0"),
    (["-ctv", "q4_0"], "cache", "type_v", "q4_0"),
    (["--kv-sinks", "0"], "cache", "sinks", 0),
    (["--kv-residual", "0"], "cache", "residual", 0),
    (["--kv-tail-type", "f32"], "cache", "tail_type", "f32"),
    (["--kv-transform-k", "random"], "cache", "transform_k", "random"),
    (["--kv_transform_v=none"], "cache", "transform_v", "none"),
    (["--cache-type-override", "0=k:q8_0;3-4=v:f16"], "cache", "override", "0=k:q8_0;3-4=v:f16"),
    (["--kv-position", "read"], "cache", "position", "read"),
    (["--kv-guard", "off"], "cache", "guard", "off"),
    (["--kv-policy", "h2o:recent=0.4"], "cache", "policy", "h2o:recent=0.4"),
    (["--kv-budget", "20%"], "cache", "budget", "20%"),
    (["--temp", "0"], "sampling", "temperature", 0.0),
    (["--temperature", "1.5"], "sampling", "temperature", 1.5),
    (["--top-k", "-1"], "sampling", "top_k", -1),
    (["--top_p", "1"], "sampling", "top_p", 1.0),
    (["--min-p", "0.1"], "sampling", "min_p", 0.1),
    (["--typical", "0.9"], "sampling", "typical_p", 0.9),
    (["--repeat-last-n", "-1"], "sampling", "repeat_last_n", -1),
    (["--repeat-penalty", "1.1"], "sampling", "repeat_penalty", 1.1),
    (["--presence-penalty", "-0.5"], "sampling", "presence_penalty", -0.5),
    (["--frequency-penalty", "0.5"], "sampling", "frequency_penalty", 0.5),
    (["-s", "7"], "sampling", "seed", 7),
    (["--seed", "-1"], "sampling", "seed", -1),
    (["--ignore-eos"], "sampling", "ignore_eos", True),
]


@pytest.mark.parametrize(("args", "group", "field", "value"), CASES)
def test_flags_reach_the_engine(pykv, args, group, field, value):
    plain = {"load": LoadConfig(), "cache": CacheConfig(), "sampling": SamplingConfig()}
    for stem in ("generate", "chat"):
        result = pykv(stem, "-p", "x", "-q", *args)
        assert (result.code, result.err) == (0, "")
        got = result.calls[-1]
        assert getattr(got[group], field) == value
        assert type(getattr(got[group], field)) is type(value)
        for name, config in plain.items():
            for f in fields(config):
                if (name, f.name) != (group, field):
                    assert getattr(got[name], f.name) == getattr(config, f.name)


def test_every_field_of_the_configs_is_among_the_cases():
    configs = {"load": LoadConfig, "cache": CacheConfig, "sampling": SamplingConfig}
    want = {(name, f.name) for name, c in configs.items() for f in fields(c)}
    assert {(group, field) for _, group, field, _ in CASES} == want


def test_the_last_of_two_wins_as_in_llama_cpp(pykv):
    assert pykv("generate", "-p", "x", "-c", "1", "-c", "2").calls[-1]["load"].ctx_size == 2


def test_several_reverse_prompts(pykv):
    assert (
        pykv("generate", "-p", "a b c", "-r", "zz", "--reverse-prompt", "b").out == "you said 'a \n"
    )


def test_spread_signature_keeps_the_commands_own_parameters():
    def command(output: options.Output, model: options.ModelArgument = None) -> None:
        pass

    names = list(inspect.signature(options.expand(command)).parameters)
    assert names == ["ctx", "json", "verbose", "quiet", "model"]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (rb"a\nb\tc\rd", b"a\nb\tc\rd"),
        (rb"\\n \' \"", b"\\n ' \""),
        (rb"\xe2\x82\xac", "€".encode()),
        (rb"\q \x4 \xzz C:\dir", rb"\q \x4 \xzz C:\dir"),
        (b"\\", b"\\"),
    ],
)
def test_unescape_as_llama_cpp(written, meant):
    assert options.unescape(written) == meant


@given(st.binary())
def test_unescape_takes_back_doubled_backslashes(data):
    assert options.unescape(data.replace(b"\\", b"\\\\")) == data


def test_escapes_apply_to_arguments_only(pykv, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(rb"a\nb")
    assert repr("a\nb") in pykv("generate", "-p", r"a\nb").out
    assert repr(r"a\nb") in pykv("generate", "-p", r"a\nb", "--no-escape").out
    assert repr(r"a\nb") in pykv("generate", "-f", file).out
    assert repr(r"a\nb") in pykv("generate", stdin=rb"a\nb").out


def test_one_newline_at_the_end_of_a_file_is_dropped(pykv, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"a\n\n")
    assert repr("a\n") in pykv("generate", "-f", file).out
    assert repr("a\n") in pykv("generate", "-f", "-", stdin=b"a\n\n").out
