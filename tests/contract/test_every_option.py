"""Every command that loads a model takes every setting there is, and hands it on."""

import ast
import inspect
from dataclasses import fields
from pathlib import Path

import pytest

from pykv.cli import app, options
from pykv.config import CacheConfig, LoadConfig, SamplingConfig


def groups_of(stem):
    command = app._module(stem).command
    return {p.annotation for p in inspect.signature(command, eval_str=True).parameters.values()}


def load_calls(stem):
    """The calls of Screen.loaded, through which a command opens its model."""
    tree = ast.parse(Path(inspect.getfile(app._module(stem))).read_text(encoding="utf-8"))
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "loaded"]


LOADING = [stem for stem in app.stems() if load_calls(stem)]


def test_the_commands_that_load_are_found():
    assert {"chat", "generate", "perplexity"} <= set(LOADING)


@pytest.mark.parametrize("stem", LOADING)
def test_a_command_that_loads_takes_the_whole_groups_and_hands_them_on(stem):
    assert {CacheConfig, LoadConfig, options.ModelOption} <= groups_of(stem)
    for call in load_calls(stem):
        assert {"cache", "load", "offline"} <= {k.arg for k in call.keywords}


@pytest.mark.parametrize("stem", ["chat", "generate"])
def test_a_command_that_draws_tokens_takes_the_sampling_group(stem):
    assert SamplingConfig in groups_of(stem)
    for call in load_calls(stem):
        assert "sampling" in {k.arg for k in call.keywords}


@pytest.mark.parametrize("stem", app.stems())
def test_every_field_of_a_group_is_a_flag_of_the_command(stem):
    group = app.group()
    ctx = group.make_context("pykv", [stem])
    spelled = {p.name: {*p.opts, *p.secondary_opts} for p in group.get_command(ctx, stem).params}
    for config in groups_of(stem) & options.GROUPS.keys():
        flags = options.GROUPS[config][1]
        for field in fields(config):
            names = {n for name in flags[field.name].names for n in name.split("/") if n}
            assert spelled[field.name] == names


def test_every_config_is_a_group():
    assert {CacheConfig, LoadConfig, SamplingConfig} <= options.GROUPS.keys()
    for config in (CacheConfig, LoadConfig, SamplingConfig):
        assert list(options.GROUPS[config][1]) == [f.name for f in fields(config)]
