"""Configs in Python: a function that sets attributes of one value and returns it. Read by its syntax alone; nothing is run.

Values are literals, names (`torch.bfloat16`), calls of names with such values, and sums and products of numbers and lists.
Other statements (conditions, loops, other calls) are reported by their text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from shardwise.interop.text_formats.config_trees import require_length
from shardwise.values import InputError, argument_label, describe_unknown

MAX_ELEMENTS = 100_000  # of a list that a sum or product makes
MAX_SHOWN = 80  # characters of a statement in a report


class NameExpr(str):
    """A dotted name, written as in code."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class CallExpr(NamedTuple):
    """A call that is not made: the name of the function and its arguments."""

    name: str
    values: tuple[Any, ...]
    keywords: Mapping[str, Any]

    def __repr__(self) -> str:
        arguments = [*map(repr, self.values), *(f"{name}={value!r}" for name, value in self.keywords.items())]
        return f"{self.name}({', '.join(arguments)})"


MAX_RECIPES_LISTED = 8  # in a message
MAX_RECIPE_CALLS = 20  # recipes that begin with one another: far above any file


class PythonConfig(NamedTuple):
    """Values by the attribute path that they are assigned to, in order; `unread` are statements that could not be read."""

    values: Mapping[str, Any]
    unread: tuple[str, ...]


def parse_python_config(text: str, source: str, recipe: str | None = None) -> PythonConfig:
    """Return the config of a file's function; the returned value itself has the path "".

    Raises `InputError` unless there is exactly one, or one of the name that `recipe` gives.
    """
    require_length(text, source, "a recipe")
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(
            f"{source}: not valid Python: {getattr(error, 'msg', None) or 'too deep'}; a recipe's file is required"
        ) from None
    functions = {
        function.name: function
        for function in module.body if isinstance(function, ast.FunctionDef) and _returned_name(function)
    }  # fmt: skip
    public = {name: function for name, function in functions.items() if not name.startswith("_")} or functions
    if recipe is not None and recipe not in functions:
        raise InputError(f"{source}: {argument_label('recipe')}: {describe_unknown(recipe, public)}")
    if recipe is None and len(public) != 1:
        names = ", ".join(list(public)[:MAX_RECIPES_LISTED])
        listed = f" ({names}{', ...' * (len(public) > MAX_RECIPES_LISTED)})" if names else ""
        fix = "name one with --recipe" if names else "a function that returns a config that it sets is required"
        raise InputError(f"{source}: found {len(public)} recipes{listed}; {fix}")
    chosen = functions[recipe] if recipe is not None else next(iter(public.values()))
    return _read_recipe(chosen, functions, _read_constants(module.body, {}), MAX_RECIPE_CALLS)


def _read_recipe(
    function: ast.FunctionDef, functions: Mapping[str, ast.FunctionDef], constants: Mapping[str, Any], calls_left: int
) -> PythonConfig:
    """Return the config of a function; one that begins with the config of another function of the file has its values too."""
    config = _read_function(function, dict(constants))
    base = config.values.get("")
    if not isinstance(base, CallExpr) or base.name not in functions or not calls_left:
        return config
    inherited = _read_recipe(functions[base.name], functions, {**constants, **base.keywords}, calls_left - 1)
    changed = {path: value for path, value in config.values.items() if path}
    return PythonConfig({**inherited.values, **changed}, (*inherited.unread, *config.unread))


def _returned_name(function: ast.FunctionDef) -> str | None:
    """Return the name that a function returns, if the function also assigns to it."""
    returns = [statement.value for statement in function.body if isinstance(statement, ast.Return)]
    returned = [node.id for node in returns if isinstance(node, ast.Name)]
    assignments = [statement for statement in function.body if isinstance(statement, ast.Assign)]
    roots = {_attribute_path(target)[0] for assignment in assignments for target in assignment.targets}
    return returned[-1] if returned and returned[-1] in roots else None


def _read_constants(body: list[ast.stmt], names: dict[str, Any]) -> dict[str, Any]:
    for statement in body:
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
            continue
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        if isinstance(target, ast.Name):
            try:
                names[target.id] = _evaluate(statement.value, names)
            except ValueError:
                continue
    return names


def _read_function(function: ast.FunctionDef, names: dict[str, Any]) -> PythonConfig:
    root, values, unread = _returned_name(function), {}, []
    arguments = function.args
    defaults = [
        *zip(reversed(arguments.args), reversed(arguments.defaults), strict=False),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    for argument, default in defaults:
        if default is not None:
            names[argument.arg] = _value_or_name(default, names)
    for statement in function.body:
        if isinstance(statement, (ast.Return, ast.Import, ast.ImportFrom, ast.Pass)) or _is_string(statement):
            continue
        try:
            for name, path, value in _read_assignment(statement, names):
                if name == root:
                    values[path] = value
                elif not path:
                    names[name] = value
        except (ValueError, RecursionError):
            unread.append(_describe_statement(statement))
    return PythonConfig(values, tuple(unread))


def _value_or_name(node: ast.expr, names: Mapping[str, Any]) -> Any:
    try:
        return _evaluate(node, names)
    except ValueError:
        return NameExpr(ast.unparse(node))


def _is_string(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _describe_statement(statement: ast.stmt) -> str:
    text = re.sub(r"\s+", " ", ast.unparse(statement).splitlines()[0])
    return f"line {statement.lineno}: {text[:MAX_SHOWN]}"


def _read_assignment(statement: ast.stmt, names: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield (name, attribute path, value) of an assignment. Raises `ValueError` for any other statement."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target, value = statement.targets[0], statement.value
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        target, value = statement.target, statement.value
    else:
        raise ValueError("no assignment")
    root, path = _attribute_path(target)
    if not root:
        raise ValueError("no name")
    yield root, path, _evaluate(value, names)


def _attribute_path(node: ast.expr) -> tuple[str, str]:
    """Return the name that attributes begin with, and their path; empty texts for any other expression."""
    path: list[str] = []
    while isinstance(node, ast.Attribute):
        path.append(node.attr)
        node = node.value
    return (node.id, ".".join(reversed(path))) if isinstance(node, ast.Name) else ("", "")


def _evaluate(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression. Raises `ValueError` if it has none without running code."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return names.get(node.id, NameExpr(node.id))
        case ast.Attribute() if _attribute_path(node)[0]:
            return NameExpr(ast.unparse(node))
        case ast.List() | ast.Tuple():
            values = [_evaluate(child, names) for child in node.elts]
            return values if isinstance(node, ast.List) else tuple(values)
        case ast.Dict() if None not in node.keys:
            pairs = zip(node.keys, node.values, strict=True)
            return {_evaluate(key, names): _evaluate(child, names) for key, child in pairs if key}
        case ast.UnaryOp(op=ast.USub()):
            return _require_number(-_require_number(_evaluate(node.operand, names)))
        case ast.BinOp():
            return _apply_operator(node.op, _evaluate(node.left, names), _evaluate(node.right, names))
        case ast.Call():
            named = {keyword.arg: _evaluate(keyword.value, names) for keyword in node.keywords if keyword.arg}
            if len(named) == len(node.keywords):
                name = _called_name(node.func, names)
                return CallExpr(name, tuple(_evaluate(argument, names) for argument in node.args), named)
    raise ValueError("no literal")


def _called_name(node: ast.expr, names: Mapping[str, Any]) -> str:
    """Return the name of the called function, or the text of a method of a call."""
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
    """Add, subtract or multiply numbers; add lists, or repeat one. Raises `ValueError` for other operands."""
    if isinstance(left, list):
        if isinstance(operator, ast.Add) and isinstance(right, list) and len(left) + len(right) <= MAX_ELEMENTS:
            return left + right
        if isinstance(operator, ast.Mult) and type(right) is int and len(left) * max(right, 0) <= MAX_ELEMENTS:
            return left * right
    first, second = _require_number(left), _require_number(right)
    if isinstance(operator, ast.Add):
        return first + second
    if isinstance(operator, ast.Sub):
        return first - second
    if isinstance(operator, ast.Mult) and abs(first) < 2**53 and abs(second) < 2**53:
        return first * second
    raise ValueError("no sum or product")
