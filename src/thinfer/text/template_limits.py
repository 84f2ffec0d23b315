"""A Jinja environment for templates that nobody has read: each rendering has a bound on its steps, time and text.

The sandbox keeps a template from the system, but not from looping for hours or from filling the memory. Here the tree
of a template is rewritten before it is compiled: every turn of a loop and every call is a step, and everything that
can grow (concatenation, slices, literals of lists and objects) becomes a call too. Calls, filters and operators are
weighed: what could multiply its operands before it runs, all others after. A value weighs its characters and items,
and those of all that it holds as often as it holds them, so that nested references count as the text they would print.
"""

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import islice
from types import GeneratorType
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SOURCE = 1 << 20
"""Characters of a template; those of models have some thousands."""
_STEPS = 300_000
_SECONDS = 5.0
_VALUE = 1 << 24
_TOTAL = 1 << 28
_ITEM = 8
"""What any value weighs besides its text: an object takes room even when it is empty."""
_NAMESPACE = 1000
_CONTAINERS = (list, tuple, dict, set, frozenset, Namespace)
# What grows by a number that it is given, and what grows by a number or a text as often as it has lines or items.
_PADDED = frozenset(["batch", "center", "ljust", "rjust", "round", "slice", "to_bytes", "zfill"])
_MULTIPLIED = frozenset(["expandtabs", "indent", "tojson", "translate", "wordwrap"])
_FORMATTED = frozenset(["format", "format_map"])
_NUMBER = re.compile(r"\d+")
# A width that comes from an argument: "%*d", "{:{}}".
_FOREIGN_WIDTH = re.compile(r"%[-#0 +.\d]*\*|:[^}]*\{")
_MOST_BITS = 10_000
_REFUSED = _VALUE + 1


class TooMuch(TemplateError):
    """A template that wants more than a rendering may take."""


class _Budget:
    """What one rendering has taken."""

    def __init__(self) -> None:
        self._steps = 0
        self._made = 0
        # Of this thread's processor, so that a busy machine stops no honest template.
        self._deadline = time.thread_time() + _SECONDS

    def step(self) -> None:
        self._steps += 1
        if self._steps > _STEPS:
            raise TooMuch(f"more than {_STEPS} steps: it may loop for ever")
        if time.thread_time() > self._deadline:
            raise TooMuch(f"more than {_SECONDS:g} seconds: it may loop for ever")

    def expect(self, size: int) -> None:
        """Refuse a value before it is made."""
        if size > _VALUE:
            raise TooMuch(f"a value of more than {_VALUE} characters or items")

    def made(self, value: Any) -> Any:
        """Count a value that was made."""
        size = weight(value)
        self.expect(size)
        self._made += size
        if self._made > _TOTAL:
            raise TooMuch(f"more than {_TOTAL} characters or items in all")
        return value


def weight(value: object) -> int:
    """Characters and items of a value and of all it holds; counting stops above the largest that is allowed.

    Example:
        >>> weight("ab"), weight(["ab", "cd"])
        (10, 28)
    """
    if isinstance(value, str | bytes):
        return _ITEM + len(value)
    if not isinstance(value, _CONTAINERS):
        return _ITEM
    total, left = 0, [value]
    while left and total <= _VALUE:
        item: Any = left.pop()
        total += _ITEM
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, list | tuple | set | frozenset):
            left += item
        elif isinstance(item, dict):
            left += item.keys()
            left += item.values()
        elif isinstance(item, Namespace):
            # Reading one is slow, and nobody prints them: few of them are many.
            total += _NAMESPACE
            left += item._Namespace__attrs.values()
    return total


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with limits; render its templates inside `limits`.

    Example:
        >>> environment = LimitedEnvironment()
        >>> template = environment.from_string(environment.limited(environment.parse("{{ 'a' * n }}")))
        >>> with environment.limits():
        ...     template.render(n=3)
        'aaa'
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        # Constant folding and constant output would run a template's own operations while it is compiled.
        super().__init__(optimized=False, finalize=_printed, **options)
        del self.globals["lipsum"]
        self.filters = {name: self._weighed(name, function) for name, function in self.filters.items()}
        tests: Any = self.tests
        self.tests = {name: self._weighed(name, function) for name, function in tests.items()}
        self._rendering = threading.local()

    @contextmanager
    def limits(self) -> Iterator[None]:
        """A fresh budget for what this thread renders inside."""
        self._rendering.budget = _Budget()
        try:
            yield
        finally:
            del self._rendering.budget

    def limited(self, tree: nodes.Template) -> nodes.Template:
        """The tree with its steps and growth made into calls; it is changed in place."""
        changed: nodes.Template = _Rewriter().visit(tree)
        changed.set_environment(self)
        return changed

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Register a filter; it is weighed as the built-in ones are."""
        self.filters[name] = self._weighed(name, function)

    # ---- what templates run

    def concat(self, parts: Iterable[str]) -> str:
        """Join what a template or a block printed."""
        kept = []
        size = 0
        for part in parts:
            size += len(part)
            self.budget.expect(size)
            kept.append(part)
        return str(self.budget.made("".join(kept)))

    def call(__self, __context: Context, __obj: Any, *args: Any, **keywords: Any) -> Any:  # noqa: N805
        """Call what a template calls."""
        budget = __self.budget
        budget.step()
        if __obj == __self.step:
            return None
        # In a loop jinja adds keywords of its own, which do not reach what is called.
        named = [value for key, value in keywords.items() if key not in ("_loop_vars", "_block_vars")]
        budget.expect(sum(map(weight, args)) + sum(map(weight, named)))
        method = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes | int):
            args = tuple(_listed(value) for value in args)
            name, first, others = getattr(method, "__name__", ""), owner, [*args, *named]
            if name == "join" and others:
                first, others = others[0], [owner]
            budget.expect(_expected(name, first, others))
        return budget.made(super().call(__context, __obj, *args, **keywords))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Add, multiply, raise to a power, or format."""
        budget = self.budget
        if operator == "%" and isinstance(left, str):
            budget.expect(_expected("format", left, list(right) if isinstance(right, tuple) else [right]))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            budget.expect(_REFUSED if left.bit_length() * abs(right) > _MOST_BITS else 0)
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            budget.expect(_REFUSED if left.bit_length() + right.bit_length() > _MOST_BITS else 0)
        elif operator == "*" and (isinstance(left, int) or isinstance(right, int)):
            times, value = (left, right) if isinstance(left, int) else (right, left)
            budget.expect(max(times, 0) * weight(value))
        elif operator == "+":
            budget.expect(weight(left) + weight(right))
        return budget.made(super().call_binop(context, operator, left, right))

    def step(self) -> None:
        """One turn of a loop; the call that leads here is what counts."""

    def literal(self, value: Any) -> Any:
        """A list, tuple or object that a template writes out; the call that leads here weighs it."""
        return value

    def joined(self, *parts: Any) -> str:
        """The operator ``~``."""
        self.budget.expect(weight(parts))
        return "".join(map(str, parts))

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """``value[start:stop:step]``."""
        return value[start:stop:step]

    @property
    def budget(self) -> _Budget:
        """What is left for the rendering of this thread."""
        budget: _Budget = self._rendering.budget
        return budget

    def _weighed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **keywords: Any) -> Any:
            budget = self.budget
            budget.step()
            # Jinja hands some filters their context first.
            skip = int(hasattr(function, "jinja_pass_arg"))
            args = (*args[:skip], *(_listed(value) for value in args[skip:]))
            if len(args) > skip:
                budget.expect(_expected(name, args[skip], [*args[skip + 1 :], *keywords.values()]))
            return budget.made(function(*args, **keywords))

        return run


@pass_context
def _printed(context: Context, value: Any) -> Any:
    """What a template prints; its text is counted by `concat`."""
    environment: Any = context.environment
    if not isinstance(value, str):
        environment.budget.expect(weight(value))
    return value


def _listed(value: Any) -> Any:
    """A generator as the list it would give, to be weighed."""
    return list(islice(value, _VALUE)) if isinstance(value, GeneratorType) else value


def _expected(name: str, first: Any, others: list[Any]) -> int:
    """Most that a filter, a test, or a method of ``first`` could give, as far as its kind tells."""
    own, given = weight(first), weight(others)
    if own + given > _VALUE:
        return own + given
    numbers = max((abs(value) for value in others if isinstance(value, int)), default=0)
    if name == "replace" and len(others) >= 2:
        text, old, new = (value if isinstance(value, bytes) else str(value) for value in (first, *others[:2]))
        return own + (text.count(old) if old else len(text) + 1) * len(new)  # type: ignore[arg-type]
    if name == "join":
        return own + (len(first) if hasattr(first, "__len__") else 1) * given
    if name == "sum":
        return own * own if any(isinstance(value, list | tuple) for value in others) else own
    if name in _FORMATTED and isinstance(first, str):
        widths = max((int(digits[:20]) for digits in _NUMBER.findall(first)), default=0)
        fields = first.count("%") + first.count("{")
        return _REFUSED if _FOREIGN_WIDTH.search(first) else own + fields * max(given, widths)
    if name in _FORMATTED or name in _MULTIPLIED:
        return own * max(given // _ITEM, numbers)
    return own + given + (numbers if name in _PADDED else 0)


class _Rewriter(NodeTransformer):
    """Makes calls of loops' turns and of what can grow; the methods' names are the base class's."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("step", [], node), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("joined", node.nodes, node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = [part or nodes.Const(None) for part in (node.arg.start, node.arg.stop, node.arg.step)]
        return _call("sliced", [node.node, *bounds], node)

    def _literal(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return _call("literal", [node], node) if node.items and getattr(node, "ctx", "load") == "load" else node

    visit_List = visit_Dict = _literal  # noqa: N815

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return self._literal(node)


def _call(name: str, args: list[nodes.Expr], at: nodes.Node) -> nodes.Call:
    # A name of the environment cannot be hidden by a variable of the template.
    return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None, lineno=at.lineno)
