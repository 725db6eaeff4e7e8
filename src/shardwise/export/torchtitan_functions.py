"""Functions of torchtitan 0.3.0's config registries, read: what a run is before its flags.

A function makes a `Trainer.Config` of calls with keywords, or takes that of another function, and sets attributes of it. Only
such statements are understood, by `ast`; nothing is run. What has another form is an option by the text that it is, so that
it is reported as not understood.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, NamedTuple

from shardwise.errors import InputError
from shardwise.export.torchtitan_registry import MODELS, registered_options

CONFIG = "Trainer.Config"
ARGUMENTS = {"model_registry": "flavor"}  # what the first argument of a call is, where it is given by its place
MOST_CALLS = 200  # of functions of a file by one another: far above any registry


class Call(NamedTuple):
    """A call, not made: dotted name and arguments by name."""

    name: str
    named: Mapping[str, Any]


class Source(NamedTuple):
    """A file of config functions: its functions, and where the names that it imports come from."""

    functions: Mapping[str, ast.FunctionDef]
    imports: Mapping[str, str]
    package: str


def parsed(text: str, what: str, package: str = "") -> Source:
    """A file of Python. `package` is the model that relative imports are of. Raises `InputError` for what is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{what}: not valid Python: {error}") from None
    imports = {
        alias.asname or alias.name: (node.module or "") if not node.level else f"{MODELS}{package}"
        for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }  # fmt: skip
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    return Source(functions, imports, package)


def options_of(source: Source, name: str) -> dict[str, Any]:
    """The options that a function sets. Raises `InputError` where it is no function of a config."""
    if name not in source.functions:
        raise InputError(f"config: no function {name!r} among {', '.join(source.functions) or 'none'}")
    try:
        found = _Body(source, [MOST_CALLS]).run(source.functions[name], {})
    except RecursionError:
        raise InputError(f"config: {name} is nested too deeply") from None
    if found is None:
        raise InputError(f"config: {name} returns no {CONFIG} that can be read without running it")
    return found


class _Body:
    """The statements of one function, in order; `left`: how many more calls of functions of the file are followed."""

    def __init__(self, source: Source, left: list[int]) -> None:
        self.source, self.left = source, left
        self.names: dict[str, Any] = {}
        self.strange: dict[str, Any] = {}

    def run(self, function: ast.FunctionDef, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """The options of the config that is returned; None where none is."""
        self.left[0] -= 1
        if self.left[0] < 0:
            raise InputError(
                f"config: {function.name} takes more than {MOST_CALLS} calls of functions; fewer are required"
            )
        parameters = function.args.args
        defaults = [self.value(one) for one in function.args.defaults]
        self.names = dict(
            zip((one.arg for one in parameters[len(parameters) - len(defaults) :]), defaults, strict=True)
        )
        self.names |= given
        for statement in function.body:
            if isinstance(statement, ast.Return):
                found = self.value(statement.value) if statement.value is not None else None
                found = self.made(found)
                return {**found, **self.strange} if isinstance(found, dict) else None
            self.take(statement)
        return None

    def take(self, statement: ast.stmt) -> None:
        """An assignment to a name or to an attribute of a config; texts and assertions say nothing."""
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], self.value(statement.value)
            if isinstance(target, ast.Name):
                self.names[target.id] = self.made(value)
                return
            path = ast.unparse(target).split(".")
            config = self.names.get(path[0])
            if isinstance(target, ast.Attribute) and isinstance(config, dict):
                self.put(config, ".".join(path[1:]), value)
                return
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return
        if not isinstance(statement, (ast.Assert, ast.FunctionDef, ast.Import, ast.ImportFrom)):
            self.strange[ast.unparse(statement).splitlines()[0][:80]] = True

    def value(self, node: ast.expr) -> Any:
        """A literal, a name of the function's, a call that is not made, or the text of anything else."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self.value(one) for one in node.elts]
        if isinstance(node, ast.Name) and node.id in self.names:
            return self.names[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            return ast.literal_eval(node)
        return self.call(node) if isinstance(node, ast.Call) else ast.unparse(node)

    def call(self, node: ast.Call) -> Any:
        """The config that another function makes, or a call by its name."""
        name = ast.unparse(node.func)
        named = {word.arg: self.value(word.value) for word in node.keywords if word.arg}
        if name in self.source.functions:
            found = _Body(self.source, self.left).run(self.source.functions[name], named)
            return Call(name, named) if found is None else found
        module = self.source.imports.get(name, "")
        if name == "model_registry":
            named["name"] = module.removeprefix(MODELS).split(".")[0] or self.source.package
        elif module.endswith(".config_registry"):
            return dict(registered_options(module.removeprefix(MODELS).split(".")[0], name))
        if node.args:
            named = {ARGUMENTS.get(name, "arguments"): self.value(node.args[0]), **named}
        return Call(name, named)

    def made(self, call: Any) -> Any:
        """The options of a config that is made by one call, of whatever class; anything else as it is."""
        if not isinstance(call, Call) or "model_spec" not in call.named:
            return call
        found: dict[str, Any] = {}
        for name, value in call.named.items():
            self.put(found, name, value)
        return found

    def put(self, config: dict[str, Any], name: str, value: Any) -> None:
        """Set an option, or all of a section in place of those that it had."""
        if isinstance(value, Call) or name in ("activation_checkpoint", "optimizer"):
            for old in [old for old in config if old.startswith(f"{name}.") or old == name]:
                del config[old]
        if name == "model_spec":
            config.update(_model(config, value))
        elif name in ("activation_checkpoint", "loss", "optimizer"):
            config.update(_chosen(name, value))
        elif isinstance(value, Call):
            config.update({f"{name}.{key}": one for key, one in value.named.items()})
        else:
            config[name] = value


def _model(config: dict[str, Any], value: Any) -> Mapping[str, Any]:
    """What a model registry is asked for; converters by name, with their options under these."""
    if not isinstance(value, Call):
        return {"model_spec": str(value)}
    for old in [old for old in config if old.startswith("model.") or "Converter." in old]:
        del config[old]
    found = {f"model.{name}": one for name, one in value.named.items()}
    converters = value.named.get("converters")
    if not isinstance(converters, list):
        return found
    found["model.converters"] = [
        one.name.partition(".")[0] if isinstance(one, Call) else str(one) for one in converters
    ]
    for one in converters:
        if isinstance(one, Call):
            found |= {f"{one.name.partition('.')[0]}.{key}": each for key, each in one.named.items()}
    return found


def _chosen(name: str, value: Any) -> Mapping[str, Any]:
    """A section that is one of several classes: which it is, and its options."""
    if value is None:
        return {name: "none"}
    if not isinstance(value, Call):
        return {name: str(value)}
    kind = value.name.partition(".")[0]
    short = {"SelectiveAC": "selective", "FullAC": "full", "MemoryBudgetAC": "memory-budget"}.get(kind, kind)
    plain = {key: one for key, one in value.named.items() if not isinstance(one, Call) and name != "optimizer"}
    return {name: short, **{f"{name}.{key}": one for key, one in plain.items() if key != "global_vocab_size"}}
