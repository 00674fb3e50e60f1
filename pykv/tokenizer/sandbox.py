"""A Jinja environment for templates from files that nobody vouches for.

No attribute, file or mutation is within their reach (Jinja's immutable sandbox), and they have a
budget: steps (turns of loops and calls), seconds, and characters made by any operation.
Source: llama.cpp common/jinja (the environment); transformers, chat_template_utils.py (tojson).
"""

import json
import re
import time
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000
MAX_SECONDS = 3.0
MAX_CHARS = 1 << 24  # beyond what the conversation itself accounts for
CHARS_PER_INPUT = 64  # operations that may pass over each character of the conversation
MAX_BITS = 4096  # of an integer
MAX_SOURCE = 1 << 20  # characters of a template
# whose result can be as long as the product of their arguments
GROWING = frozenset(
    ("batch", "center", "expandtabs", "format", "indent", "join", "ljust", "replace", "rjust")
) | {"slice", "wordwrap", "zfill"}
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(?:\d{4}|\*)")
_WIDE_BRACES = re.compile(r"\{[^}]*(?:\d{4}|\{)")
TICK, GLUE, MADE = "pykv_tick", "pykv_glue", "pykv_made"


class BudgetError(SecurityError):
    """A template ran for too long, or made too much."""


class Budget:
    """What one rendering may use up; overstepping it raises BudgetError."""

    def __init__(self, n_input: int) -> None:
        self.max_chars = MAX_CHARS + CHARS_PER_INPUT * n_input
        self._steps, self._chars = MAX_STEPS, self.max_chars
        self._deadline = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        """One turn of a loop, or one call."""
        self._steps -= 1
        if self._steps < 0 or time.monotonic() > self._deadline:
            raise BudgetError("it runs for too long")

    def made(self, value: object) -> None:
        """A value that an operation has made, with all that is in it.

        As every list is charged with its contents when it is made, none can hold so much (lists
        that share their parts, say) that printing or comparing it would never end.
        """
        self._chars -= _size(value, self._chars)
        if self._chars < 0:
            raise BudgetError("it makes too much text")

    def may_make(self, *factors: object) -> None:
        """An operation whose result may be as long as the product of the sizes."""
        product = 1
        for value in factors:
            large = abs(value) if isinstance(value, int) else _size(value, self.max_chars)
            product *= 1 + large
            if product > self.max_chars:
                raise BudgetError("it makes too much text")


def _size(value: object, limit: int) -> int:
    """Characters of texts and 8 per item, through all levels; stops above limit."""
    if isinstance(value, str):
        return len(value)
    total, stack = 0, [value]
    while stack and total <= limit:
        item = stack.pop()
        total += 8 + (len(item) if isinstance(item, str) else 0)
        if isinstance(item, Namespace):
            item = getattr(item, "_Namespace__attrs")  # noqa: B009
        if isinstance(item, list | tuple):
            stack += item
        elif isinstance(item, dict):
            stack += item.keys()
            stack += item.values()
    return total


class GenerationTag(Extension):
    """`{% generation %}` marks what the model said, for training; here it does nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body in place of the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Metered(NodeTransformer):
    """Puts a step into every loop, and sends `~` and literals through functions that count."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call(TICK, node.lineno), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _call(GLUE, node.lineno, nodes.List(node.nodes, lineno=node.lineno))

    def visit_List(self, node: nodes.List) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _call(MADE, node.lineno, node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _call(MADE, node.lineno, node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _call(MADE, node.lineno, node) if node.ctx == "load" else node


def _call(name: str, line: int, *args: nodes.Expr) -> nodes.Call:
    function = nodes.Name(name, "load", lineno=line)
    return nodes.Call(function, list(args), [], None, None, lineno=line)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template; `budget` is set while it renders."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
            finalize=self._emit,
            optimized=False,
        )
        self.budget = Budget(0)
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            # to be called is all that these two are for: `call` counts
            TICK: _nothing,
            MADE: _same,
            GLUE: _glue,
        }
        self.filters = {k: self._metered(k, f) for k, f in self.filters.items()}
        self.filters["tojson"] = _tojson

    def load(self, source: str) -> jinja2.Template:
        """Compiles a template.  Raises jinja2.TemplateSyntaxError."""
        if len(source) > MAX_SOURCE:
            raise jinja2.TemplateSyntaxError("it is too long", 1)
        tree = self.parse(source)
        _Metered().visit(tree)
        tree.set_environment(self)
        code = self.compile(tree)
        return self.template_class.from_code(self, code, self.make_globals(None))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """A call, counted; text methods that can grow their text are checked before."""
        self.budget.step()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str) and getattr(obj, "__name__", "") in GROWING:
            self.budget.may_make(owner, *args, *kwargs.values())
        result = super().call(context, obj, *args, **kwargs)
        self.budget.made(result)
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operator, with its result's size checked before and counted after."""
        self.budget.step()
        numbers = isinstance(left, int) and isinstance(right, int)
        if numbers and operator in "**":
            bits = left.bit_length() * right if operator == "**" else left.bit_length()
            if bits + right.bit_length() > MAX_BITS:
                raise BudgetError("it makes too large a number")
        elif operator == "*":
            self.budget.may_make(left, right)
        elif operator == "%" and isinstance(left, str) and _WIDE_PERCENT.search(left):
            raise SecurityError("it formats too wide a text")
        result = super().call_binop(context, operator, left, right)
        self.budget.made(result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format, refused for widths that are large or computed."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_BRACES.search(value.__self__):
            raise SecurityError("it formats too wide a text")
        return wrapped

    def _emit(self, value: object) -> object:
        self.budget.made(value)
        return value

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            self.budget.step()
            if name == "format" and _WIDE_PERCENT.search(str(args[0])):
                raise SecurityError("it formats too wide a text")
            if name in GROWING:
                given = [*args, *kwargs.values()]
                self.budget.may_make(*[x for x in given if isinstance(x, str | int | list)])
            result = function(*args, **kwargs)
            self.budget.made(result)
            return result

        return metered


def _nothing() -> str:
    return ""


def _same(value: object) -> object:
    return value


def _glue(values: list[object]) -> str:
    return "".join([str(v) for v in values])


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateRuntimeError(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > 100 or re.search(r"\d", form):
        raise SecurityError("it formats too wide a date")
    return datetime.now().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes <, >, & and ' for web pages."""
    if indent is not None and not 0 <= indent <= 16:
        raise SecurityError("it indents too far")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
