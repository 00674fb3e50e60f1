"""Which formats, transforms and residuals each layer gets, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from page_oracle import RESIDUALS, codec, coded

from pykv.backends.base import CacheFormats, LayerShape
from pykv.cache.layout import bands_of, cache_types, check, layouts_of
from pykv.config import CacheConfig
from pykv.errors import ConfigError

SHAPE = LayerShape(4, 2, 64, 64)
PLAIN = CacheFormats("f16", "f16", "f16", "f16")


def layout(config, shape=SHAPE):
    (one,) = layouts_of(config, [shape])
    return one


def types(config, n_layers):
    return [
        f"{layer.formats.page_k} {layer.formats.page_v}"
        for layer in layouts_of(config, [SHAPE] * n_layers)
    ]


def transforms_of(config, shape=SHAPE):
    formats = layout(config, shape).formats
    return formats.transform_k, formats.transform_v


def test_the_cache_types_are_the_floats_and_the_formats_with_codes():
    names = set(cache_types())
    assert {"f32", "f16", "bf16", "q8_0", "q4_0", "iq4_nl", "int8", "fp8_e4m3", "kivi2"} <= names
    assert not {"q6_k", "q4_k", "mxfp4", "base", "coded"} & names


@pytest.mark.parametrize(
    ("config", "formats"),
    [
        (CacheConfig(), PLAIN),
        (CacheConfig("f32", "bf16"), CacheFormats("f32", "bf16", "f32", "bf16")),
        (
            CacheConfig("f32", "bf16", tail_type="f16"),
            CacheFormats("f32", "bf16", "f16", "f16"),
        ),
        (
            CacheConfig("q8_0", "q4_0", tail_type="f32"),
            CacheFormats("q8_0", "q4_0", "f32", "f32", "none", "hadamard"),
        ),
    ],
)
def test_a_tail_is_f16_or_the_pages_own_wider_type(config, formats):
    assert layout(config).formats == formats


# residuals


@pytest.mark.parametrize("name", cache_types())
def test_a_residual_goes_by_the_bits(name):
    assert layout(CacheConfig(name)).residual == RESIDUALS.get(name, 0)
    assert layout(CacheConfig(type_v=name)).residual == RESIDUALS.get(name, 0)
    if coded(codec(name)):
        by_bits = {8: 0, 5: 64, 4: 64, 3: 128, 2: 128}
        assert RESIDUALS.get(name, 0) == by_bits[codec(name).bits]


@pytest.mark.parametrize(
    ("config", "residual"),
    [
        (CacheConfig("q8_0", "q4_0"), 64),
        (CacheConfig("kivi2", "q4_0"), 128),
        (CacheConfig("kivi2", "q4_0", residual=0), 0),
        (CacheConfig("f16", "f16", residual=77), 77),
    ],
)
def test_the_larger_residual_of_a_layers_two_counts(config, residual):
    assert layout(config).residual == residual


def test_layers_have_residuals_of_their_own():
    config = CacheConfig("q8_0", "q8_0", override="1=v:kivi2;2=k:q5_1")
    assert [layer.residual for layer in layouts_of(config, [SHAPE] * 3)] == [0, 128, 64]


# overrides


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("0-1=k:q8_0,v:f32", ["q8_0 f32", "q8_0 f32", "f16 f16", "f16 f16"]),
        ("3=v:q4_0", ["f16 f16", "f16 f16", "f16 f16", "f16 q4_0"]),
        ("3-3=k:q4_0", ["f16 f16", "f16 f16", "f16 f16", "q4_0 f16"]),
        ("0=k:nuq3:outliers=1%,v:nuq2", ["nuq3:outliers=1% nuq2", *["f16 f16"] * 3]),
        (" 0=k:int8 ; 2=v:int8 ", ["int8 f16", "f16 f16", "f16 int8", "f16 f16"]),
        ("0 - 1 = k:int8 , v:int8;", [*["int8 int8"] * 2, *["f16 f16"] * 2]),
        ("", ["f16 f16"] * 4),
        (" ; ", ["f16 f16"] * 4),
        # the last word counts, side by side
        ("0-2=k:q8_0,v:q8_0;1=k:f16", ["q8_0 q8_0", "f16 q8_0", "q8_0 q8_0", "f16 f16"]),
    ],
)
def test_overrides(override, expected):
    assert types(CacheConfig(override=override), 4) == expected


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("0", "'0'"),
        ("0=", "'0='"),
        ("0=q8_0", "'0=q8_0'"),
        ("0=k:", "'0=k:'"),
        ("0=k:q8_0v:q8_0", "'0=k:q8_0v:q8_0'"),
        ("0=k:q8_0,", "'0=k:q8_0,'"),
        ("0=,v:q8_0", "'0=,v:q8_0'"),
        ("0=v:q8_0,k:q8_0", "'0=v:q8_0,k:q8_0'"),
        ("-1=k:q8_0", "'-1=k:q8_0'"),
        ("a=k:q8_0", "'a=k:q8_0'"),
        ("0=k:q8_0,1=k:q8_0", "'0=k:q8_0,1=k:q8_0'"),
    ],
)
def test_an_override_that_makes_no_sense_names_its_part(override, part):
    with pytest.raises(ConfigError, match=r"is not understood: write it as") as caught:
        check(CacheConfig(override=override))
    assert f"cache type override {part} is" in str(caught.value)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("0=k:q8_0;2-1=v:f16", r"override '2-1=v:f16': 2 comes after 1"),
        ("1=k:q9_9", r"override '1=k:q9_9': unknown cache type 'q9_9': it is one of bf16, "),
        ("0=k:f16;1=v:q6_k", r"override '1=v:q6_k': unknown cache type 'q6_k'"),
    ],
)
def test_other_bad_overrides(override, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check(CacheConfig(override=override))


@pytest.mark.parametrize("override", ["3=k:q8_0", "0-3=k:q8_0", "0=v:f16;7-9=k:q8_0"])
def test_an_override_of_layers_that_are_not_there(override):
    check(CacheConfig(override=override))  # nothing is known of the model yet
    with pytest.raises(ConfigError, match=r"'[037].*=k:q8_0': the model has layers 0 to 2"):
        layouts_of(CacheConfig(override=override), [SHAPE] * 3)


# one layout object for layers that are equal in everything, and for no others


def test_layers_share_a_layout_where_types_and_widths_are_equal():
    shapes = [SHAPE, LayerShape(8, 1, 64, 64, 20), LayerShape(4, 2, 64, 32), SHAPE, SHAPE]
    a, b, c, d, e = layouts_of(CacheConfig("q8_0", "q8_0", override="4=v:f16"), shapes)
    assert a is b is d
    assert c not in (a, e)
    assert e not in (a, c)
    assert c.formats == a.formats


# transforms


@pytest.mark.parametrize("name", cache_types())
@pytest.mark.parametrize(("d", "ggml4"), [(64, "hadamard"), (96, "hadamard"), (80, "random")])
def test_what_auto_means(name, d, ggml4):
    transform = "none"
    if name in ("q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"):
        transform = ggml4
    elif name in ("tq3", "tq4"):
        transform = "random"
    assert transforms_of(CacheConfig(name), LayerShape(1, 1, d, 64)) == (transform, "none")
    assert transforms_of(CacheConfig("f16", name), LayerShape(1, 1, 64, d)) == ("none", transform)


@pytest.mark.parametrize("chosen", ["none", "hadamard", "random"])
def test_a_transform_that_is_chosen_is_taken(chosen):
    config = CacheConfig("q4_0", "kivi2", transform_k=chosen, transform_v=chosen)
    assert transforms_of(config) == (chosen, chosen)


@pytest.mark.parametrize("d", [40, 72, 80, 100, 112, 1])
def test_hadamard_needs_a_width_that_32_divides(d):
    for side, shape in (("k", LayerShape(1, 1, d, 64)), ("v", LayerShape(1, 1, 64, d))):
        config = CacheConfig("q4_0", "q4_0", **{f"transform_{side}": "hadamard"})
        with pytest.raises(
            ConfigError,
            match=f"--kv-transform-{side} hadamard needs a head width .* is {d}; random",
        ):
            layouts_of(config, [shape])


@pytest.mark.parametrize("name", ["tq3", "tq4"])
@pytest.mark.parametrize("chosen", ["none", "hadamard"])
def test_a_format_with_a_rotation_of_its_own_takes_no_other(name, chosen):
    sentence = f"cache type {name} has a random rotation of its own: leave --kv-transform-"
    with pytest.raises(ConfigError, match=f"{sentence}k at auto, not {chosen}"):
        layout(CacheConfig(name, transform_k=chosen))
    with pytest.raises(ConfigError, match=f"{sentence}v at auto, not {chosen}"):
        layout(CacheConfig("f16", name, transform_v=chosen))
    config = CacheConfig(name, name, transform_k="random")
    assert transforms_of(config) == ("random", "random")


# settings that are wrong whatever the model


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (CacheConfig(type_k="q4_9"), "unknown cache type 'q4_9'.*bf16, f16, f32"),
        (CacheConfig(type_v="q6_k"), "unknown cache type 'q6_k'.*f16"),
        (CacheConfig(tail_type="q8_0"), "tail type 'q8_0'.*f16, bf16, f32"),
        (CacheConfig(type_k="q8_0:outliers=1%"), "cache type q8_0 takes no options, and 'outliers"),
        (CacheConfig(type_v="nuq4:most=1%"), "nuq4: 'most=1%' is no option of it"),
        (CacheConfig(transform_k="lowrank:0"), "--kv-transform-k 'lowrank:0' is unknown"),
        (CacheConfig(transform_k="fft"), "--kv-transform-k 'fft' is unknown: it is none, hada"),
        (CacheConfig(transform_v=""), "--kv-transform-v '' is unknown"),
    ],
)
def test_unfit_settings_are_refused(config, sentence):
    for refuse in (check, layout):
        with pytest.raises(ConfigError, match=sentence):
            refuse(config)


@pytest.mark.parametrize(
    "config", [CacheConfig("nuq2"), CacheConfig("f16", "nuq3"), CacheConfig(override="0=v:nuq4")]
)
def test_nuq_wants_the_first_four_tokens_exact(config):
    check(config)
    check(replace(config, sinks=20))
    for sinks in (0, 3):
        with pytest.raises(ConfigError, match=f"needs the first 4 .*--kv-sinks {sinks} is too few"):
            check(replace(config, sinks=sinks))


# sizes, in numbers


@pytest.mark.parametrize(
    ("name", "d", "side", "n_bytes"),
    [
        ("f16", 64, 0, 64 * 64 * 2),
        ("f16", 40, 1, 64 * 64 * 2),  # filled up to 64 channels
        ("q8_0", 64, 0, 64 * 64 + 2 * 64 * 2),
        ("q4_0", 64, 1, 64 * 64 // 2 + 2 * 64 * 2),
        ("q4_1", 64, 0, 64 * 64 // 2 + 2 * 64 * 4),
        ("q5_0", 64, 0, 64 * 64 * 5 // 8 + 2 * 64 * 2),
        ("fp8_e4m3", 64, 0, 64 * 64),
        ("int8", 64, 1, 64 * 64 + 64 * 2),
        ("kivi2", 64, 0, 64 * 64 // 4 + 2 * 64 * 4),
        ("kivi2", 128, 1, 64 * 128 // 4 + 4 * 64 * 4),
        ("q4_0", 40, 0, 64 * 40 // 2 + 2 * 64 * 2),
        ("q4_0", 40, 1, 64 * 64 // 2 + 2 * 64 * 2),
        ("int8", 33, 0, 64 * 33 + 64 * 2),
        ("kivi3", 33, 0, 1088),  # 33 and 17 units of 16 bytes of codes, 2 x 33 x 4: 1,064
    ],
)
def test_bytes_of_a_page(name, d, side, n_bytes):
    config = CacheConfig(name, name, tail_type="f32", transform_k="none", transform_v="none")
    width = d if side == 0 else -(-d // 32) * 32
    for sinks, slots in ((1, 16), (16, 16), (17, 32), (64, 64)):
        (band,) = bands_of(replace(config, sinks=sinks), [LayerShape(1, 1, d, d)])
        assert band.sizes["page", side] == n_bytes
        assert band.sizes["tail", side] == width * 64 * 4
        assert band.sizes["sinks", side] == width * slots * 4
    (band,) = bands_of(replace(config, sinks=0), [LayerShape(1, 1, d, d)])
    assert set(band.sizes) == {("page", 0), ("page", 1), ("tail", 0), ("tail", 1)}


def test_a_low_rank_makes_encoded_pages_alone_narrower():
    config = CacheConfig("q8_0", "q8_0", transform_k="lowrank:40", transform_v="lowrank:20")
    (band,) = bands_of(config, [SHAPE])
    sizes = {"k": 64 * 40 + 2 * 64 * 2, "v": 64 * 32 + 64 * 2}  # values are filled up to 32
    assert (band.sizes["page", 0], band.sizes["page", 1]) == (sizes["k"], sizes["v"])
    assert band.sizes["tail", 0] == band.sizes["tail", 1] == 64 * 64 * 2
    with pytest.raises(ConfigError, match=r"--kv-transform-k lowrank:65: .* have 64 channels"):
        layout(CacheConfig("q8_0", transform_k="lowrank:65"))


# bands


def test_bands_are_the_layers_of_equal_layouts():
    shapes = [SHAPE, LayerShape(8, 1, 64, 64, 20), LayerShape(4, 2, 64, 32), SHAPE, SHAPE]
    bands = bands_of(CacheConfig("q8_0", "q8_0", override="4=v:kivi2"), shapes)
    assert [band.layers for band in bands] == [[0, 1, 3], [2], [4]]
    assert [band.residual for band in bands] == [0, 0, 128]
    assert bands[0].sizes["page", 1] == 2 * bands[1].sizes["page", 1]


# when RoPE turns the keys


@pytest.mark.parametrize(
    ("config", "position"),
    [
        (CacheConfig(), "write"),
        (CacheConfig("q4_0", "kivi2"), "write"),
        (CacheConfig(position="read"), "read"),
        (CacheConfig("bf16", "q4_0", position="read"), "read"),
        (CacheConfig("kivi3", "q4_0", position="read"), "read"),
        (CacheConfig("nuq3", "q4_0"), "read"),
        (CacheConfig("f16", "nuq3"), "write"),
        (CacheConfig("nuq4:outliers=1%", "nuq4", position="read"), "read"),
        (CacheConfig("f16", "q4_0", position="read", transform_v="hadamard"), "read"),
    ],
)
def test_positions(config, position):
    assert layout(config).formats.position == position


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (CacheConfig("q4_0", position="read"), "--kv-position read takes keys .*, not q4_0"),
        (CacheConfig("tq4", position="read"), "--kv-position read takes keys .*, not tq4"),
        (
            CacheConfig("f16", position="read", transform_k="random"),
            "--kv-transform-k random cannot be applied to keys that RoPE turns when they are read",
        ),
        (
            CacheConfig("nuq4", transform_k="hadamard"),
            "--kv-transform-k hadamard cannot be applied to keys that RoPE turns",
        ),
        (CacheConfig(position="late"), "--kv-position 'late' is unknown: it is write or read"),
    ],
)
def test_keys_that_cannot_be_turned_at_read(config, sentence):
    with pytest.raises(ConfigError, match=sentence):
        layout(config)


def test_a_store_takes_layers_of_several_widths():
    """Their layouts are equal, and yet of pages of other sizes."""
    from pykv.cache.store import Store

    shapes = [LayerShape(2, 1, 64, 32), LayerShape(2, 1, 32, 32), LayerShape(2, 1, 64, 32)]
    store = Store(shapes, CacheConfig(sinks=0), 100)
    sequence = store.new_sequence()
    store.begin([(sequence, np.zeros(3, np.int32))], np.zeros(1, np.int32))
    store.commit()
    tables = 2 * 3 * 1 * 16 * 8
    assert store.nbytes == 64 * 2 * (64 + 32 + 32 + 32 + 64 + 32) + tables
