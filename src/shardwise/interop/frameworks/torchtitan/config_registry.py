"""Config functions of torchtitan 0.3.0's registries: chosen for a run, written where flags are not enough, and read by syntax.

A function makes a `Trainer.Config` of calls with keywords, or takes that of another function, and sets attributes of it. Only
such statements are understood, by `ast`; nothing is run. What has another form becomes an option by its own text, so that it is
reported as not understood.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from shardwise.interop.frameworks.torchtitan.models import attention_of
from shardwise.interop.launches.target import Options
from shardwise.values.errors import InputError

MODELS = "torchtitan.models."
MODULE = "run_config"  # the file of a function of its own
LISTS = ("parallelism.module_fqns_per_model_part",)  # what tyro does not read back as it was
DATA = ("sft", "debug")  # functions with other data than text from the web
LOSSES = {
    "ChunkedLossWrapper": "ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config({vocabulary}))",
    "CrossEntropyLoss": "CrossEntropyLoss.Config({vocabulary})",
    "MTPLoss": "MTPLoss.Config({vocabulary})",
}
VOCABULARY = "global_vocab_size=decoder_vocab_size(config.model_spec)"
HOMES = {
    "ChunkedLossWrapper": "torchtitan.components.loss", "CrossEntropyLoss": "torchtitan.components.loss",
    "MTPLoss": "torchtitan.models.deepseek_v3.mtp", "decoder_vocab_size": "torchtitan.models.common.config_utils",
    "Float8LinearConverter": "torchtitan.components.quantization",
    "Float8GroupedExpertsConverter": "torchtitan.components.quantization",
}  # fmt: skip
# Arguments that say what is so without them
USUAL = {"model.moe_comm_backend": "standard", "Float8LinearConverter.recipe_name": "rowwise"}


class Base(NamedTuple):
    """A function of a registry, and what it sets."""

    module: str
    name: str
    options: Options


def base_of(options: Options) -> Base:
    """The function of the model's module from which the fewest steps lead to some options."""
    module = options["model.name"]
    every = [Base(module, name, own) for name, own in registered()[module].items()]
    usual = [one for one in every if not any(word in one.name for word in DATA)] or every
    return min(usual, key=lambda one: _distance(options, one))


def _distance(options: Options, base: Base) -> tuple[Any, ...]:
    """How far: formats that were not requested, statements that it takes, and whether it is of the same flavour."""
    strange = "model.converters" in base.options and "model.converters" not in options
    return strange, len(list(_statements(options, base))), base.options.get("model.flavor") != options["model.flavor"]


def _of_model(options: Options) -> dict[str, Any]:
    """What a model registry is asked for, without what it would give unasked."""
    usual = {**USUAL, "model.attn_backend": attention_of(options.get("model.name"), options.get("model.flavor"))}
    return {
        name: value for name, value in options.items()
        if (name.startswith("model.") or "Converter." in name) and not name.endswith("model_compile_enabled")
        and value != usual.get(name)
    }  # fmt: skip


def _statements(options: Options, base: Base) -> Iterator[tuple[str, str]]:
    """What changes a config to some options where flags cannot: where each name is from, and the statement."""
    module = options["model.name"]
    other = _of_model(options) != {"model.flavor": base.options.get("model.flavor"), **_of_model(base.options)}
    if other:
        yield f"{MODELS}{module}", f"config.model_spec = model_registry({', '.join(_arguments(options))})"
    loss = options["loss"]
    if loss != base.options.get("loss") or (other and options["model.flavor"] != base.options.get("model.flavor")):
        yield "", f"config.loss = {LOSSES[loss].format(vocabulary=VOCABULARY)}"
    for name in LISTS:
        if name in options:
            yield "", f"config.{name} = {options[name]!r}"


def _arguments(options: Options) -> Iterator[str]:
    """Arguments of model_registry."""
    yield repr(options["model.flavor"])
    for name in ("attn_backend", "num_mtp_layers"):
        if f"model.{name}" in options:
            yield f"{name}={options[f'model.{name}']!r}"
    if "model.converters" in options:
        yield f"converters=[{', '.join(_converter(options, name) for name in options['model.converters'])}]"


def _converter(options: Options, name: str) -> str:
    own = [f"{key.partition('.')[2]}={value!r}" for key, value in options.items() if key.startswith(f"{name}.")]
    return f"{name}.Config({', '.join([*own, 'model_compile_enabled=True'])})"


def file_text(options: Options, base: Base) -> str:
    """The file of a function of its own; empty where flags say all."""
    statements = list(_statements(options, base))
    if not statements:
        return ""
    imports = [f"from {home} import model_registry" for home, _ in statements if home]
    imports += [
        f"from {home} import {name}" for name, home in HOMES.items() if any(name in text for _, text in statements)
    ]
    return function_text(base.name, base.module, options, imports, [text for _, text in statements])


def changed(options: Options, base: Base) -> dict[str, Any]:
    """The flags of some options: those that the function does not set as they are."""
    told = (*LISTS, "loss", "optimizer")
    return {
        name: value for name, value in options.items()
        if name not in told and not name.startswith("model.") and "Converter." not in name and base.options.get(name) != value
    }  # fmt: skip


@cache
def registered() -> Mapping[str, Mapping[str, Options]]:
    """Functions of the release's registries by module, each with the options that it sets, as read from the wheel."""
    text = (
        resources.files("shardwise.interop.frameworks")
        .joinpath("options", "torchtitan_configs.json")
        .read_text(encoding="utf-8")
    )
    found: Mapping[str, Mapping[str, Options]] = json.loads(text)
    return found


def registered_options(module: str, name: str) -> Options:
    """The options of a function of the release. Raises `InputError` for one that it lacks."""
    functions = registered().get(module, {})
    if name not in functions:
        known = ", ".join(functions) or ", ".join(registered())
        raise InputError(
            f"config: found {module} {name}, whose file is not among those given; it, or one of {known}, is required"
        )
    return functions[name]


def function_text(base: str, module: str, options: Options, imports: Sequence[str], statements: Sequence[str]) -> str:
    """A file with one function, `run`: the config of a registered one, and statements that change it."""
    lines = "\n".join(f"    {line}" for line in statements)
    names = "\n".join(sorted({*imports, f"from {MODELS}{module}.config_registry import {base}",
                              "from torchtitan.trainer import Trainer"}))  # fmt: skip
    return (
        f'"""Settings of {options["model.name"]} {options["model.flavor"]} that have no flag."""\n\n{names}\n\n\n'
        f"def run() -> Trainer.Config:\n    config = {base}()\n{lines}\n    return config\n"
    )


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
