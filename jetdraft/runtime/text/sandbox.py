"""Where chat templates run: they can change nothing, and their work is bounded."""

# Strangers write templates. Each step is counted, and refused before it starts if it
# may make too much. C code gets at most `MAX_SIZE` characters.

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType
from typing import Any, NoReturn

from jinja2 import nodes, pass_context
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SIZE = 2**21  # Characters and items of a value, and of the whole prompt.
MAX_TOTAL_SIZE = 2**26  # Characters and items of all values together.
MAX_BITS = 2**14  # Bits of an integer.
MAX_SECONDS = 5.0  # Time of the thread for one prompt.
_STEP, _WEIGH, _JOIN = "(step)", "(weigh)", "(join)"  # No template can name them.
_WIDE = re.compile(r"\*|\d{5}|:[^}]*\{")  # What may make a format's field very wide.


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up for chat templates, with bounds."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, loopcontrols],
            finalize=self._count_value,
        )
        self._used = threading.local()
        self.filters["tojson"] = _to_json
        own = {_WEIGH: lambda value: value}
        own[_JOIN] = lambda values: "".join(map(str, values))
        known = {**self.filters, **own}
        self.filters = {n: self._bounded_filter(n, known[n]) for n in known}
        self.filters[_STEP] = pass_context(lambda context, size: self._count_step(size))
        del self.globals["lipsum"]  # makes texts of any length
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "dict": _Dict(),
        }

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """Bound what this thread renders in the block; raises `TemplateError` there."""
        self._used.size, self._used.until = 0, time.thread_time() + MAX_SECONDS
        try:
            yield
        finally:
            self._used.__dict__.clear()

    def _count_step(self, size: int) -> str:
        until = getattr(self._used, "until", None)
        if until is None:
            return ""  # the compiler folds constants
        self._used.size += size
        if self._used.size > MAX_TOTAL_SIZE:
            raise TemplateError(f"it makes more than {MAX_TOTAL_SIZE} characters")
        if time.thread_time() > until:
            raise TemplateError(f"it takes more than {MAX_SECONDS:g} s")
        return ""

    def _count_value(self, value: Any) -> Any:
        self._count_step(len(value) if isinstance(value, _SIZED) else 1)
        if count_items(value) > MAX_SIZE:
            raise TemplateError(f"a value has more than {MAX_SIZE} characters")
        return value

    def _parse(
        self, source: str, name: str | None, filename: str | None
    ) -> nodes.Template:
        """Parse a template, with filters around what no hook of the sandbox counts."""
        tree = super()._parse(source, name, filename)
        return _StepCounter().visit(tree)  # type: ignore[no-any-return]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator; raises `TemplateError` if it may make too much."""
        if operator == "*" and isinstance(left, _SIZED) | isinstance(right, _SIZED):
            _check_product(left, right)
        is_power = operator == "**" and isinstance(left, int) and isinstance(right, int)
        if is_power and left.bit_length() * right > MAX_BITS:
            raise TemplateError(f"a number has more than {MAX_BITS} bits")
        if operator == "%" and isinstance(left, str):
            _check_format(left)
            _check_product(left, right)
        return self._count_value(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **more: Any) -> Any:
        """Call a method, macro or function; raises `TemplateError` as `call_binop`."""
        if isinstance(obj, BuiltinMethodType):
            _check_product(obj.__self__, *args, *more.values())
        return self._count_value(super().call(context, obj, *args, **more))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandbox's `format`; raises `TemplateError` for very wide fields."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Any:
        """Wrap a filter, so that its arguments and value are checked like a call's."""
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def bounded(*args: Any, **more: Any) -> Any:
            if name == "format":
                _check_format(str(args[first]))
            if name not in ("default", "d"):
                _check_product(*args[first:], *more.values())
            return self._count_value(function(*args, **more))

        return bounded


class GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %}, around the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 wants it)

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the tags; returns the node of the text inside them."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _StepCounter(NodeTransformer):
    """Counts what the sandbox has no hook for: loops, `~`, slices, and literals."""

    def visit(self, node: nodes.Node, *args: Any, **more: Any) -> Any:
        """Return the node, wrapped in a counting filter where no hook counts it."""
        node = self.generic_visit(node)
        match node:
            case nodes.For():  # each round, with the template's own text in it
                size = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
                step = _apply_filter(nodes.Const(1 + size), _STEP, node.lineno)
                node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
            case nodes.Concat():
                values = nodes.List(node.nodes, lineno=node.lineno)
                return _apply_filter(values, _JOIN, node.lineno)
            case nodes.Getitem(arg=nodes.Slice()) | nodes.List() | nodes.Dict():
                return _apply_filter(node, _WEIGH, node.lineno)
            case nodes.Tuple(ctx="load"):
                return _apply_filter(node, _WEIGH, node.lineno)
        return node


class _Dict:
    """`dict` for templates, without the methods that could change another dict."""

    def __call__(self, *args: Any, **more: Any) -> dict[Any, Any]:
        return dict(*args, **more)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


_SIZED = (str, bytes, list, tuple, dict, set, frozenset)


def count_items(value: Any) -> int:
    """Count characters and items of a value with all it holds, up to `MAX_SIZE`."""
    total, rest = 0, [value]
    while rest and total <= MAX_SIZE:
        item = rest.pop()
        total += len(item) if isinstance(item, _SIZED) else 1
        if isinstance(item, Namespace):
            item = item._Namespace__attrs
        if isinstance(item, dict):
            rest += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            rest += item
        elif isinstance(item, int) and item.bit_length() > MAX_BITS:
            total = MAX_SIZE + 1
    return total


def _apply_filter(node: nodes.Node, name: str, line: int) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=line)


def _check_product(*factors: Any) -> None:
    """Refuse what may become as large as the product of the two largest factors."""
    # An integer may be a width or a count.
    sizes = [abs(f) if isinstance(f, int) else count_items(f) for f in factors]
    *_, second, largest = sorted([1, 1, *sizes])
    if len(factors) > 1 and second * largest > MAX_TOTAL_SIZE:
        raise TemplateError(f"a value may get more than {MAX_TOTAL_SIZE} characters")


def _check_format(form: str) -> None:
    if _WIDE.search(form):
        raise TemplateError("a format has a field of any width")


def _raise(message: Any) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it; raises `TemplateError` once it is too large."""
    form = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators}
    encoder = json.JSONEncoder(**form, sort_keys=sort_keys)  # type: ignore[arg-type]
    chunks, size = list[str](), 0
    for chunk in encoder.iterencode(value):
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_SIZE:
            raise TemplateError(f"JSON has more than {MAX_SIZE} characters")
    return "".join(chunks)
