import time

import pytest

from pykv.errors import TemplateError
from pykv.tokenizer import ChatTemplate
from pykv.tokenizer.sandbox import MAX_SECONDS

USER = [{"role": "user", "content": "hello"}]


def rendered(source: str, messages=USER) -> str:
    template = ChatTemplate(source, bos="", eos="", where="file")
    return "".join([s.text for s in template.render(messages)])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{{ {'a': '<é&\\''} | tojson }}", '{"a": "<é&\'"}'),
        ("{{ {'b': [1, 2], 'a': none} | tojson(sort_keys=true) }}", '{"a": null, "b": [1, 2]}'),
        ("{{ {'a': [1]} | tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
        ("{{ [1, 'é'] | tojson(ensure_ascii=true, separators=(',', ':')) }}", '[1,"\\u00e9"]'),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc\n", "a\nb\nc"),
        ("a\r\nb", "a\nb"),
        ("{% for a, b in [(1, 2)] %}{{ a + b }}{% endfor %}", "3"),
        ("{{ '%s-%s' % (1, 2) }}{{ '**%s** 12345' % 'x' }}", "1-2**x** 12345"),
        ("{{ 'a' ~ 1 ~ none }}", "a1None"),
        ("{{ 2 ** 10 * 3 }}", "3072"),
        ("{{ '{} {:>4}'.format('a', 1) }}", "a    1"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "1"),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(1) }}", "<1>"),
        ("{{ messages | map(attribute='content') | join(',') }}", "hello"),
        ("{{ messages[0].content[1:3] }}{{ undefined_name }}", "el"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_what_templates_may_do(source, expected):
    assert rendered(source) == expected


DOUBLING = "{% set n = namespace(s='x') %}{% for i in range(60) %}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' | center(10 ** 9) }}",
        "{{ 'x'.ljust(10 ** 9) }}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ [1] * 10 ** 10 }}",
        "{{ 'x' | indent(10 ** 9) }}",
        "{{ [1] | batch(10 ** 9, 'x') | list | length }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 10 ** 9) }}",
        "{{ ('a' * 10000).replace('a', 'b' * 10000) }}",
        "{{ strftime_now('%99999999d') }}",
        "{{ 9 ** (9 ** 9) }}",
        DOUBLING + "{% set n.s = n.s ~ n.s %}{% endfor %}",
        DOUBLING + "{% set n.s = n.s + n.s %}{% endfor %}",
        DOUBLING + "{% set n.s = [n.s, n.s] | join %}{% endfor %}",
        DOUBLING + "{% set b %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = b %}{% endfor %}",
        DOUBLING + "{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
        DOUBLING + "{% set n.s = {1: n.s, 2: n.s} %}{% endfor %}{{ n.s | tojson }}",
        "{% set n = namespace(s=2) %}{% for i in range(60) %}{% set n.s = n.s * n.s %}{% endfor %}",
        "{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ range(10 ** 12) | list }}",
    ],
)
def test_what_would_use_up_memory(source):
    start = time.monotonic()
    with pytest.raises(TemplateError, match="^file: the chat template"):
        rendered(source)
    assert time.monotonic() - start < 3 * MAX_SECONDS


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_what_would_never_end(source, monkeypatch):
    monkeypatch.setattr("pykv.tokenizer.sandbox.MAX_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(TemplateError, match="it runs for too long"):
        rendered(source)
    assert time.monotonic() - start < 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ ().__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update(a=1) }}", "unsafe"),
        ("{{ raise_exception.__globals__.os }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ lipsum() }}", "undefined"),
        ("{{ messages[9].content.x }}", "no element 9"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' + 1 }}", "str"),
        ("{{ raise_exception('no\nway') }}", "refuses the conversation: no way$"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for m in messages %}", "has an error in line 1"),
        ("\n{{ 'a }}", "has an error in line 2"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "cannot be compiled"),
        ("x" * (1 << 20) + "x", "it is too long"),
    ],
)
def test_failures_are_one_sentence(source, message):
    with pytest.raises(TemplateError, match=message) as caught:
        rendered(source)
    assert "\n" not in str(caught.value)


def test_large_conversations_are_within_the_budget():
    big = [{"role": "user", "content": "word " * 400_000}]
    chat = "{% for m in messages %}{{ '<' + m['content'] | trim + '>' }}{% endfor %}"
    assert len(rendered(chat, big)) == 2_000_001
