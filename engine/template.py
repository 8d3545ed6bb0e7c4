"""Compile a model's chat template and render it, within bounds.

In: the Jinja text of a model file, and the variables of one rendering. Out: text, or an
InvalidRequest whose sentence may be shown to a client. Knows nothing of roles, tokens or HTTP.

The text comes from a stranger and a thread can't be killed, so a rendering is metered: whatever
repeats, calls, copies or compares is charged for its size, and the sum and the time are limited.
Jinja's sandbox keeps a template away from Python's internals but not from `"x" * 10**9`; hence
the rewritten syntax tree, and filters and methods that are listed here instead of forbidden.
"""

from __future__ import annotations

import functools
import json
import operator
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import FILTERS, do_dictsort, do_indent, do_int
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.tests import TESTS
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from headrace.engine.errors import InvalidRequest

MAX_SECONDS = 2.0
MAX_TEMPLATE_CHARS = 128 * 1024
MAX_VALUE = 8 * 1024 * 1024
"""Characters of one string, items of one list; a prompt of a million tokens has half of it."""
MAX_WORK = 128 * 1024 * 1024
"""Characters and items made or looked at in one rendering."""
MAX_INT_BITS = 4096

_FILTERS = cast("dict[str, Callable[..., Any]]", FILTERS)
_TESTS = cast("dict[str, Callable[..., Any]]", TESTS)
# What templates in the wild use, and a little more.
_FREE_FILTERS = ("abs", "count", "d", "default", "first", "float", "items", "last", "length")
_TEXT_FILTERS = ("capitalize", "e", "escape", "lower", "reverse", "safe", "title", "trim", "upper")
_ITERATING_FILTERS = (
    "groupby", "list", "map", "max", "min", "reject", "rejectattr", "select", "selectattr",
    "sort", "unique",
)  # fmt: skip
_COMPARING_TESTS = (
    "!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le",
    "lessthan", "lt", "ne",
)  # fmt: skip
_SPLITTING = frozenset(["split", "rsplit", "splitlines", "partition", "rpartition"])
_METHODS: tuple[tuple[type | tuple[type, ...], frozenset[str]], ...] = (
    (str, _SPLITTING | frozenset([
        "capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit",
        "islower", "isspace", "isupper", "join", "lower", "lstrip", "removeprefix", "removesuffix",
        "replace", "rfind", "rstrip", "startswith", "strip", "title", "upper",
    ])),
    (dict, frozenset(["get", "items", "keys", "values"])),
    # A template may change lists: what it gets are copies made for this rendering.
    (list, frozenset(["append", "count", "index", "pop"])),
    ((int, float, tuple), frozenset()),
)  # fmt: skip
# Names with a blank can't be written in a template.
_CONCAT, _TICK, _WEIGHED = "concat ", "tick ", "weighed "
_NON_ASCII = re.compile(r"[^\x00-\x7f\ufdd0-\ufdef]")
_NONCHARACTERS = re.compile("[\ufdd0-\ufdef]")
_WIDTH_IN_FORMAT = re.compile(r"\{[^{}]*:")
_SPLITS_AT_THINK_END = re.compile(r"""split\(\s*['"]</think>""")


def template_supports_tools(text: str) -> bool:
    """Return whether the template text does anything with tools."""
    return "tools" in text or "tool_call" in text


def template_supports_thinking(text: str) -> bool:
    """Return whether the template text knows the thinking tags.

    Either it writes both, or it cuts earlier thinking off at the closing one; but cutting into
    `reasoning_content` alone is what templates without thinking do too.
    """
    if "</think>" not in text:
        return False
    cuts = _SPLITS_AT_THINK_END.search(text) is not None
    return "<think>" in text or (cuts and "reasoning_content" not in text)


class TemplateRefused(InvalidRequest):
    """The template itself called raise_exception; the message is its sentence and no more."""


class JsonObject(dict[str, Any]):
    """A mapping that turns into JSON where a template prints it or adds it to text.

    Some templates walk through a tool call's arguments, others expect them as JSON text.
    """

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)


class JinjaTemplate:
    """A compiled template; threads may render it at the same time.

    A text that does not compile is reported by `fault` and by every rendering, not here: the
    model can still answer raw prompts.
    """

    def __init__(self, text: str, max_seconds: float = MAX_SECONDS) -> None:
        self.fault = ""
        self._sandbox = _Sandbox(max_seconds)
        self._sandbox.meter.start()
        try:
            if len(text) > MAX_TEMPLATE_CHARS:
                raise ValueError(f"{len(text)} characters, expected at most {MAX_TEMPLATE_CHARS}")
            self._template = self._sandbox.from_string(text)
        except Exception as error:  # the text is foreign code: all that it raises is its fault
            self.fault = _reason(error)

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the text that the template makes of variables.

        Lists in variables may be changed by the template.

        Raises:
            TemplateRefused: the template called raise_exception.
            InvalidRequest: the template is broken, failed on these variables, or hit a limit.
        """
        if self.fault:
            raise InvalidRequest(self.fault)
        self._sandbox.meter.start()
        try:
            return self._template.render(variables)
        except InvalidRequest:
            raise
        except Exception as error:  # as above
            raise InvalidRequest(_reason(error)) from error


def _reason(error: Exception) -> str:
    said = str(error) or type(error).__name__
    if isinstance(error, jinja2.TemplateSyntaxError):  # its str() quotes the template
        said = f"line {error.lineno}: {error.message}"
    if isinstance(error, RecursionError):
        said = "it nests too deeply"
    return "chat template: " + _sentence(said)


def _sentence(said: str) -> str:
    return _NONCHARACTERS.sub("", said)[:500].encode("utf-8", "replace").decode()


class _Meter(threading.local):
    """Charges the rendering of this thread; each method raises InvalidRequest at a limit."""

    def __init__(self, max_seconds: float) -> None:
        self._max_seconds = max_seconds
        self.start()

    def start(self) -> None:
        self._deadline = time.monotonic() + self._max_seconds
        self._work = 0

    def charge(self, size: int) -> bool:
        """Charge for size characters or items about to be made; return True."""
        self._work += size
        if size > MAX_VALUE or self._work > MAX_WORK:
            raise InvalidRequest("chat template: it makes too much text")
        if time.monotonic() > self._deadline:
            raise InvalidRequest(f"chat template: it runs for more than {self._max_seconds:g} s")
        return True

    def weigh(self, value: Any) -> Any:
        """Charge for all that value holds, as often as it is referred to, and return value.

        Twenty lists that hold their predecessor twice are small, but not to str() or ==.
        """
        self.charge(len(value) if isinstance(value, str) else 1)
        if isinstance(value, Mapping):
            for key, item in value.items():
                self.weigh(key)
                self.weigh(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                self.weigh(item)
        return value

    def items(self, values: Iterable[Any]) -> Iterator[Any]:
        """Iterate over values, charging for each."""
        return map(self.weigh, values or ())

    def text(self, value: Any) -> str:
        """Return what Jinja prints for value."""
        if isinstance(value, (list, tuple, dict)):
            self.weigh(value)
        text = str(value)
        self.charge(len(text))
        return text


class _Metering(NodeTransformer):
    """Puts charges where a template can repeat, double or compare without calling a filter."""

    def _tick_at_head(self, node: Any) -> Any:
        self.generic_visit(node)
        n_chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        tick = _filter(nodes.Const(n_chars + 1, lineno=node.lineno), _TICK)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.And(tick, node.test, lineno=node.lineno)
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_Block = visit_Template = _tick_at_head

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, _WEIGHED) if node.ctx == "load" else node  # it may get hashed

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filter(node.expr, _WEIGHED)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, _WEIGHED) if isinstance(node.arg, nodes.Slice) else node


def _filter(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _GenerationBlock(Extension):
    """Accept `{% generation %}`, which marks the assistant's part for training, and drop it."""

    tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """A namespace whose repr() does not print its attributes, which nothing has charged for."""

    __repr__ = object.__repr__


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> str:
    # Taking the context also keeps Jinja from evaluating constant expressions while compiling.
    sandbox = context.environment
    assert isinstance(sandbox, _Sandbox)
    return sandbox.meter.text(value)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it since Hugging Face's, without what can't be bounded."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, max_seconds: float) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_finalize,
            extensions=[LoopControlExtension, _GenerationBlock],
        )
        self.meter = _Meter(max_seconds)
        self.globals = {
            "dict": dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "range": safe_range,
            "strftime_now": _strftime_now,
        }
        self.filters = self._bounded_filters()
        self.tests = self._bounded_tests()

    def _bounded_filters(self) -> dict[str, Any]:
        meter = self.meter
        return {
            **{name: _FILTERS[name] for name in _FREE_FILTERS},
            **{name: _charging_result(meter, _FILTERS[name]) for name in _TEXT_FILTERS},
            **{name: _charging_items(meter, _FILTERS[name]) for name in _ITERATING_FILTERS},
            "dictsort": self._dictsort,
            "indent": self._indent,
            "int": _int,
            "join": self._join,
            "replace": self._replace,
            "string": meter.text,
            "tojson": self._tojson,
            _CONCAT: lambda parts: "".join([meter.text(part) for part in parts]),
            _TICK: meter.charge,
            _WEIGHED: meter.weigh,
        }

    def _bounded_tests(self) -> dict[str, Any]:
        def comparing(test: Callable[..., Any]) -> Callable[..., Any]:
            return lambda left, right: test(self.meter.weigh(left), right)

        tests = {**_TESTS}
        tests |= {name: comparing(_TESTS[name]) for name in _COMPARING_TESTS}
        # Jinja's own compute value % 2, which formats if value is text.
        del tests["divisibleby"]
        tests["even"] = lambda value: isinstance(value, int) and value % 2 == 0
        tests["odd"] = lambda value: isinstance(value, int) and value % 2 == 1
        return tests

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Metering().visit(tree)
        tree.set_environment(self)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, names in _METHODS:
            if isinstance(obj, kind):
                return attr in names
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        format_safely = super().wrap_str_format(value)
        if format_safely is None:
            return None

        def bounded(*args: str | int, **kwargs: str | int) -> str:
            template: str = value.__self__
            if _WIDTH_IN_FORMAT.search(template):
                raise TypeError("str.format with a format specification is not supported")
            lengths = [len(self.meter.text(arg)) for arg in (*args, *kwargs.values())]
            self.meter.charge(len(template) + template.count("{") * max(lengths, default=0))
            return format_safely(*args, **kwargs)

        return bounded

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        for name in ("_block_vars", "_loop_vars"):  # for functions that take a context: none here
            kwargs.pop(name, None)
        for value in (*args, *kwargs.values()):
            self.meter.weigh(value)
        text, method = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(text, str):
            if method == "replace":
                return self._replace(text, *args, **kwargs)
            if method == "join":
                return self._join(args[0], text)
            # A list of words takes several times the room of its text.
            self.meter.charge(len(text) * (8 if method in _SPLITTING else 1))
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            left = self.meter.text(left) if isinstance(left, JsonObject) else left
            right = self.meter.text(right) if isinstance(right, JsonObject) else right
            self.meter.charge(_length(left) + _length(right))
        elif operator == "%":
            if isinstance(left, str):
                raise TypeError("% on text is not supported")
        elif isinstance(left, int) and isinstance(right, int):
            bits, more = left.bit_length(), right.bit_length()
            if (bits + more if operator == "*" else bits * max(right, 0)) > MAX_INT_BITS:
                raise OverflowError("the result of a multiplication is too large")
        elif operator == "*":
            self.meter.charge(_repetitions(left) * _length(right))
            self.meter.charge(_repetitions(right) * _length(left))
        return super().call_binop(context, operator, left, right)

    def _replace(self, s: object, old: object, new: object, count: int | None = None) -> str:
        text, gone, come = str(s), str(old), str(new)
        self.meter.charge(len(text) + text.count(gone) * max(0, len(come) - len(gone)))
        return text.replace(gone, come, -1 if count is None else count)

    def _join(self, values: Iterable[Any], d: str = "") -> str:
        parts = [self.meter.text(part) for part in self.meter.items(values)]
        self.meter.charge(len(d) * len(parts))
        return d.join(parts)

    def _dictsort(self, value: Mapping[str, Any], *how: Any, **options: Any) -> Any:
        return do_dictsort(self.meter.weigh(value), *how, **options)

    def _indent(
        self, s: str, width: int | str = 4, first: bool = False, blank: bool = False
    ) -> str:
        self.meter.charge(width if isinstance(width, int) else 0)
        margin = width if isinstance(width, str) else " " * width
        self.meter.charge(len(s) + len(margin) * (len(s.splitlines()) + 1))
        return do_indent(s, margin, first, blank)

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Return value as JSON; unlike Jinja's own filter, without escapes for HTML."""
        if (indent or 0) > 16 or len("".join(separators or ())) > 16:
            raise ValueError("tojson: indent or separators are too long")
        encoder = json.JSONEncoder(
            ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
        )
        self.meter.weigh(value)
        parts = []
        # With an indent the length depends on the depth, which is not charged for yet.
        for part in [encoder.encode(value)] if indent is None else encoder.iterencode(value):
            self.meter.charge(len(part))
            parts.append(part)
        text = "".join(parts)
        if ensure_ascii:  # but for noncharacters: the caller may have put them in as marks
            text = _NON_ASCII.sub(lambda char: json.dumps(char[0])[1:-1], text)
        return text


def _charging_result(meter: _Meter, run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)  # copies the mark by which Jinja passes its context first
    def charging(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        meter.charge(_length(result))
        return result

    return charging


def _charging_items(meter: _Meter, run: Callable[..., Any]) -> Callable[..., Any]:
    n_passed = 1 if hasattr(run, "jinja_pass_arg") else 0

    @functools.wraps(run)
    def charging(*args: Any, **kwargs: Any) -> Any:
        passed, values, rest = args[:n_passed], args[n_passed], args[n_passed + 1 :]
        return run(*passed, meter.items(values), *rest, **kwargs)

    return charging


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple)) else 1


def _repetitions(value: Any) -> int:
    return max(0, operator.index(value)) if isinstance(value, int) else 0


def _int(value: Any, default: int = 0, base: int = 10) -> int:
    if isinstance(value, str) and len(value) > 100:
        raise OverflowError("int: the number is too long")
    return do_int(value, default, base)


def _raise_exception(message: Any) -> None:
    raise TemplateRefused(_sentence(str(message)))


def _strftime_now(format: str) -> str:
    if len(format) > 100:
        raise ValueError("strftime_now: the format is too long")
    return datetime.now().strftime(format)
