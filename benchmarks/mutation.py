"""Single mutations of Python source: where they are, and the source with one of them made.

An operator or a comparison is turned, a constant changed, an argument, a member or a condition left out. What a caller cannot
notice is left alone: annotations and types, docstrings and messages, decorators, assertions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
IGNORED_FIELDS = ("annotation", "returns", "decorator_list", "bases", "type_params")
IGNORED_NODES = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Global)
TYPES = (
    "Literal", "Callable", "Mapping", "Sequence", "Iterable", "Iterator", "NDArray", "dict", "list", "set", "tuple", "type",
    "int", "float", "str", "bytes", "bool", "object",
)  # fmt: skip
# Functions of any number of arguments, of which one may be left out; others would only be called wrongly.
OF_ANY_NUMBER = ("min", "max", "minimum", "maximum", "zip", "total")


@dataclass(frozen=True, slots=True)
class Mutation:
    """A change of a source: its bytes from `begin` to `end`, which are `before`, become `after`. `line` is where it begins."""

    line: int
    begin: int
    end: int
    before: str
    after: str

    def applied(self, source: str) -> str:
        """The source with this change."""
        whole = source.encode()
        return (whole[: self.begin] + self.after.encode() + whole[self.end :]).decode()

    def mutated_line(self, source: str) -> str:
        """The line of the change, with it and without its indent."""
        whole = source.encode()
        begin, end = whole.rfind(b"\n", 0, self.begin) + 1, whole.find(b"\n", self.end)
        line_rest = whole[self.end : end if end >= 0 else None]
        return (whole[begin : self.begin] + self.after.encode() + line_rest).decode().splitlines()[0].strip()


def mutations(source: str) -> list[Mutation]:
    """All single mutations of a source, in order of their places.

    >>> [(one.before, one.after) for one in mutations("least = a if a < b else b")]
    [('a < b', '(a <= b)'), ('a if a < b else b', '(b if a < b else a)')]
    """
    whole, starts = source.encode(), _line_starts(source)
    sorted_mutations = []
    for node, changed in _changes(ast.parse(source)):
        begin, end = _span(node, starts)
        sorted_mutations.append(Mutation(node.lineno, begin, end, whole[begin:end].decode(), _text(changed)))
    return sorted(sorted_mutations, key=lambda mutation: (mutation.end, mutation.begin, mutation.after))


def compiles(source: str) -> bool:
    """Whether a mutated source is Python still."""
    try:
        compile(source, "mutated", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def _changes(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Each expression that can be changed, and what it becomes."""
    for node in _walk(tree):
        if isinstance(node, ast.If | ast.While) and not _is_type_checking(node.test):
            yield node.test, ast.Constant(False)
        elif isinstance(node, ast.comprehension):
            yield from ((condition, ast.Constant(True)) for condition in node.ifs)
        elif isinstance(node, ast.expr):
            yield from ((node, changed) for changed in _others(node))


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that a caller cannot notice."""
    if isinstance(node, IGNORED_NODES) or (isinstance(node, ast.Subscript) and _is_type(node.value)):
        return
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and _is_union(node):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in IGNORED_FIELDS:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child)


def _others(node: ast.expr) -> Iterator[ast.expr]:
    """What one expression may become."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield _with(node, ops=[COMPARISONS[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield _with(node, op=OPERATORS[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        yield from (
            _with(node, values=_without(node.values, i)) for i in range(len(node.values)) if len(node.values) > 2
        )
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield _with(node, body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.Constant):
        yield from _constants(node)
    elif isinstance(node, ast.Set | ast.Tuple | ast.List) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
        yield from (_with(node, elts=_without(node.elts, i)) for i in range(len(node.elts)) if len(node.elts) > 1)
    elif isinstance(node, ast.Dict):
        for i in range(len(node.keys)):
            yield _with(node, keys=_without(node.keys, i), values=_without(node.values, i))
    elif isinstance(node, ast.Call):
        several = len(node.args) > 1 and isinstance(node.func, ast.Name) and node.func.id in OF_ANY_NUMBER
        yield from (_with(node, args=_without(node.args, i)) for i in range(len(node.args)) if several)
        yield from (_with(node, keywords=_without(node.keywords, i)) for i in range(len(node.keywords)))


def _constants(node: ast.Constant) -> Iterator[ast.expr]:
    """Another number, or the other truth value; texts stay."""
    value = node.value
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int):
        yield ast.Constant(value + 1)
    elif isinstance(value, float):
        yield ast.Constant(value * 2.0 if value else 1.0)


def _with(node: ast.expr, **fields: object) -> ast.expr:
    copied = deepcopy(node)
    for name, value in fields.items():
        setattr(copied, name, value)
    return copied


def _without(members: list[Any], index: int) -> list[Any]:
    return [member for i, member in enumerate(members) if i != index]


def _is_type(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in TYPES


def _is_union(node: ast.expr) -> bool:
    """X | Y | None of classes: names that begin with a capital, and nothing else."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _is_union(node.left) and _is_union(node.right)
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    constant = isinstance(node, ast.Constant) and node.value is None
    return constant or name in TYPES or (name[:1].isupper() and not name.isupper())


def _is_type_checking(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "TYPE_CHECKING"


def _text(node: ast.expr) -> str:
    """The source of an expression; of operators in parentheses, since another operator may bind otherwise."""
    text = ast.unparse(ast.fix_missing_locations(node))
    return f"({text})" if isinstance(node, ast.BinOp | ast.BoolOp | ast.Compare | ast.IfExp | ast.UnaryOp) else text


def _line_starts(source: str) -> list[int]:
    """Where each line begins, in bytes: columns of nodes are in bytes too."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def _span(node: ast.expr, starts: list[int]) -> tuple[int, int]:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
