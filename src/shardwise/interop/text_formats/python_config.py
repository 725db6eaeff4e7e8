"""Recipes in Python: a function that sets attributes of one value and returns it. Read by its syntax alone; nothing is run.

Values are literals, names of things (`torch.bfloat16`), calls of these with such values, and sums and products of numbers and
lists. What else there is (conditions, loops, other calls) is named as it stands there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from shardwise.values.errors import InputError

MAX_CHARACTERS = 1_000_000
MAX_ELEMENTS = 100_000  # of a list's elements or a text's characters that a product makes, and of a number
MAX_SHOWN = 80  # characters of what is named


class NameExpr(str):
    """The name of a thing, as code has it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class CallExpr(NamedTuple):
    """A call that is not made: of what, and with what."""

    name: str
    values: tuple[Any, ...]
    keywords: Mapping[str, Any]

    def __repr__(self) -> str:
        words = [*map(repr, self.values), *(f"{name}={value!r}" for name, value in self.keywords.items())]
        return f"{self.name}({', '.join(words)})"


class PythonConfig(NamedTuple):
    """Values by the attributes that they are given to, in order; `unread` is what could not be read, as it stands there."""

    values: Mapping[str, Any]
    unread: tuple[str, ...]


def parse_python_config(text: str, what: str) -> PythonConfig:
    """The recipe of a file; the value that is returned has the name "". Raises `InputError` for a file with none or more."""
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"{what}: {len(text):,} characters; a recipe of at most {MAX_CHARACTERS:,} is required")
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(
            f"{what}: not valid Python: {getattr(error, 'msg', None) or 'too deep'}; a recipe's file is required"
        ) from None
    found = [one for one in module.body if isinstance(one, ast.FunctionDef) and _returned_name(one)]
    if len(found) != 1:
        names = ", ".join(one.name for one in found[:5])
        raise InputError(
            f"{what}: found {len(found)} recipes{f' ({names})' if names else ''}; a file with one is required"
        )
    return _read_function(found[0], _read_constants(module.body, {}))


def _returned_name(function: ast.FunctionDef) -> str | None:
    """The name that a function returns, of which it sets an attribute."""
    returned = [
        one.value.id for one in function.body if isinstance(one, ast.Return) and isinstance(one.value, ast.Name)
    ]
    roots = {
        _attribute_path(target)[0] for one in function.body if isinstance(one, ast.Assign) for target in one.targets
    }
    return returned[-1] if returned and returned[-1] in roots else None


def _read_constants(body: list[ast.stmt], names: dict[str, Any]) -> dict[str, Any]:
    for one in body:
        target = (
            one.targets[0] if isinstance(one, ast.Assign) else one.target if isinstance(one, ast.AnnAssign) else None
        )
        if isinstance(target, ast.Name) and one.value is not None:  # type: ignore[attr-defined]
            try:
                names[target.id] = _evaluate(one.value, names)  # type: ignore[attr-defined]
            except ValueError:
                continue
    return names


def _read_function(function: ast.FunctionDef, names: dict[str, Any]) -> PythonConfig:
    root, values, unread = _returned_name(function), {}, []
    own = function.args
    defaults = [
        *zip(reversed(own.args), reversed(own.defaults), strict=False),
        *zip(own.kwonlyargs, own.kw_defaults, strict=True),
    ]
    for argument, default in defaults:
        if default is not None:
            names[argument.arg] = _value_or_name(default, names)
    for one in function.body:
        if isinstance(one, (ast.Return, ast.Import, ast.ImportFrom, ast.Pass)) or _is_string(one):
            continue
        try:
            for name, path, value in _read_assignment(one, names):
                if name == root:
                    values[path] = value
                elif not path:
                    names[name] = value
        except (ValueError, RecursionError):
            unread.append(_describe_statement(one))
    return PythonConfig(values, tuple(unread))


def _value_or_name(node: ast.expr, names: Mapping[str, Any]) -> Any:
    try:
        return _evaluate(node, names)
    except ValueError:
        return NameExpr(ast.unparse(node))


def _is_string(one: ast.stmt) -> bool:
    return isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)


def _describe_statement(one: ast.stmt) -> str:
    text = re.sub(r"\s+", " ", ast.unparse(one).splitlines()[0])
    return f"line {one.lineno}: {text[:MAX_SHOWN]}"


def _read_assignment(one: ast.stmt, names: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """What a statement sets: the name, the attributes behind it, the value. Raises `ValueError` for other statements."""
    if isinstance(one, ast.Assign) and len(one.targets) == 1:
        target, value = one.targets[0], one.value
    elif isinstance(one, ast.AnnAssign) and one.value is not None:
        target, value = one.target, one.value
    else:
        raise ValueError("no assignment")
    root, path = _attribute_path(target)
    if not root:
        raise ValueError("no name")
    yield root, path, _evaluate(value, names)


def _attribute_path(node: ast.expr) -> tuple[str, str]:
    """The name that attributes begin with, and the attributes; no name where it is something else."""
    path: list[str] = []
    while isinstance(node, ast.Attribute):
        path.append(node.attr)
        node = node.value
    return (node.id, ".".join(reversed(path))) if isinstance(node, ast.Name) else ("", "")


def _evaluate(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of an expression. Raises `ValueError` for what is no value."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return names.get(node.id, NameExpr(node.id))
        case ast.Attribute() if _attribute_path(node)[0]:
            return NameExpr(ast.unparse(node))
        case ast.List() | ast.Tuple():
            values = [_evaluate(one, names) for one in node.elts]
            return values if isinstance(node, ast.List) else tuple(values)
        case ast.Dict() if None not in node.keys:
            return {
                _evaluate(key, names): _evaluate(one, names)
                for key, one in zip(node.keys, node.values, strict=True)
                if key
            }
        case ast.UnaryOp(op=ast.USub()):
            return _require_number(-_require_number(_evaluate(node.operand, names)))
        case ast.BinOp():
            return _apply_operator(node.op, _evaluate(node.left, names), _evaluate(node.right, names))
        case ast.Call():
            named = {one.arg: _evaluate(one.value, names) for one in node.keywords if one.arg}
            if len(named) == len(node.keywords):
                return CallExpr(
                    _called_name(node.func, names), tuple(_evaluate(one, names) for one in node.args), named
                )
    raise ValueError("no literal")


def _called_name(node: ast.expr, names: Mapping[str, Any]) -> str:
    """What is called: a name, or a method of a call, as code has it."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call):
        return f"{_evaluate(node.value, names)!r}.{node.attr}"
    if not _attribute_path(node)[0]:
        raise ValueError("no name is called")
    return ast.unparse(node)


def _require_number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("no number")
    return value


def _apply_operator(operator: ast.operator, left: Any, right: Any) -> Any:
    """Sums and products of numbers, and of lists."""
    if (
        isinstance(left, list)
        and isinstance(operator, ast.Add)
        and isinstance(right, list)
        and len(left) + len(right) <= MAX_ELEMENTS
    ):
        return left + right
    if (
        isinstance(left, list)
        and isinstance(operator, ast.Mult)
        and type(right) is int
        and len(left) * max(right, 0) <= MAX_ELEMENTS
    ):
        return left * right
    one, other = _require_number(left), _require_number(right)
    if isinstance(operator, ast.Add):
        return one + other
    if isinstance(operator, ast.Sub):
        return one - other
    if isinstance(operator, ast.Mult) and abs(one) < 2**53 and abs(other) < 2**53:
        return one * other
    raise ValueError("no sum or product")
