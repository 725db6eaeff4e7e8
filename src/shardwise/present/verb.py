"""Verbs: typed functions from whose signatures the command line, its help, completion, errors and schemas follow.

A verb is a function of the Python API with the decorator `verb`. Each parameter whose type is `Annotated` with an `Argument` is a
flag or a positional argument of the command line; the others are for Python alone. `Verb.declare_arguments` fills a parser,
`Verb.run` calls the function with what was parsed.
"""

from __future__ import annotations

import argparse
import builtins
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Unpack, cast, get_args, get_origin, get_type_hints

from shardwise import present
from shardwise.present.registry import has_payload, json_indent, payload_of, report_of
from shardwise.present.rendering.report import Section
from shardwise.values import (
    Parser,
    argument_label,
    did_you_mean,
    format_problems,
    ignore_progress,
    label_arguments,
    raise_problems,
    write_error,
)
from shardwise.values.argument_parser import CompletionSource, non_empty_text

if TYPE_CHECKING:
    from shardwise.present.rendering.report import Report
    from shardwise.values import Progress

F = TypeVar("F", bound=Callable[..., Any])
NOT_PASSED: tuple[Any, ...] = (None, [])  # values of the parser for arguments that were left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """A parameter of a verb as an argument of the command line.

    Without a `flag` the argument is positional, in the order of the signature unless `position` says otherwise. A parameter of
    type `bool` is a switch, which sets it to `switch_value`. `parse` raises `ArgumentTypeError` for a text that is no value; what
    needs other arguments is checked by the verb. `repeat`: the flag may be written several times, and the verb gets a list;
    `variadic`: several words may follow. `help` and `choices` may be functions, which are called when the help is printed or the
    command line parsed. `completes` names what a shell completes (`ArgumentGroup.add_argument`).
    """

    flag: str = ""
    short_flag: str = ""
    group: str = "job"
    help: str | Callable[[], str] = ""
    metavar: str | None = None
    completes: CompletionSource = ""
    choices: Sequence[str] | Callable[[], Sequence[str]] | None = None
    parse: Callable[[str], Any] = non_empty_text
    repeat: bool = False
    variadic: bool = False
    required: bool = False
    optional: bool = False  # of a positional argument: it may be left out
    position: int = 0
    switch_value: bool = True

    @property
    def help_text(self) -> str:
        """The help, as a text."""
        return self.help if isinstance(self.help, str) else self.help()

    @property
    def choice_list(self) -> Sequence[str] | None:
        """The choices, as a list; None where any value may stand."""
        return self.choices() if callable(self.choices) else self.choices

    @property
    def is_required(self) -> bool:
        """True if the argument may not be left out."""
        return not self.optional and (self.required or not self.flag)


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A file that the command line makes of a verb's result: a picture, a table, a plan, a folder.

    `write` gets the result and the target; it raises `InputError` for a target that cannot be written. Sections that it returns
    are added to the report. `prepare` is called with the target before the verb runs, to refuse what will not work before
    minutes are spent.
    """

    flag: str
    help: str
    write: Callable[[Any, str], Report | None]
    metavar: str = "FILE"
    parse: Callable[[str], str] = non_empty_text
    prepare: Callable[[str], None] | None = None
    group: str = "output"

    @property
    def name(self) -> str:
        """The name of the flag's value in what was parsed."""
        return self.flag.lstrip("-").replace("-", "_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One of several functions behind one verb; the first whose `applies` is true of the arguments runs.

    `applies` gets the arguments that were written, by parameter, and the targets of exports, by name. `check` raises `InputError`
    for those that the mode refuses. `keywords` turns the arguments into those of the function, where they differ.
    `require_answer` raises for a result that a Python caller gets and that is an error on the command line, such as a comparison
    without a choice. Without a `function` it is the verb's own.
    """

    function: Callable[..., Any] | None = None
    applies: Callable[[Mapping[str, Any]], bool] = lambda arguments: True
    check: Callable[[Mapping[str, Any]], None] = lambda arguments: None
    keywords: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    require_answer: Callable[[Any, Progress], None] = lambda result, progress: None


@dataclass(frozen=True, kw_only=True)
class Verb:
    """A function with what the command line needs beside its signature.

    `defaults` says in words what stands for an argument that is left out, by parameter. `has_details`: the report has more with
    `--verbose`. `exit_code` reads the result, and `warning` is what the error stream says beside it. `last_lines` closes the
    report: it gets the result and the files that were written, by the names of their exports. `group_order` is the order of the
    groups of arguments in the help. `requires` are packages without which the verb does nothing, by import name, `requires_for`
    those that some of it needs, by what that is ("--run jax"). `serve` goes on with the result, such as to show it on a page,
    before the report; `--json` does without it, and without what the verb requires. `switches` are arguments that only choose the
    mode, by name; `help_sections` are texts that the help prints after the arguments, by title.
    """

    function: Callable[..., Any]
    examples: tuple[str, ...]
    description: str = ""
    remark: str | Callable[[], str] = ""
    exports: tuple[Export, ...] = ()
    modes: tuple[Mode, ...] = ()
    switches: Mapping[str, Argument] | None = None
    defaults: Mapping[str, str] | None = None
    has_details: bool = False
    requires: tuple[str, ...] = ()
    requires_for: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    serve: Callable[[Any], None] | None = None
    exit_code: Callable[[Any], int] = lambda result: 0
    warning: Callable[[Any], str] = lambda result: ""
    last_lines: Callable[[Any, Mapping[str, str]], Iterable[str]] = lambda result, files: ()
    group_order: tuple[str, ...] = ("job", "cluster", "search", "output")
    shows_progress: bool = True
    help_sections: Mapping[str, Callable[[], str]] | None = None

    @cached_property
    def arguments(self) -> dict[str, Argument]:
        """Arguments by parameter: positional ones, then those of `**fields`, then flags; modes add theirs behind."""
        switches = self.switches or {}
        merged = {name: argument for name, argument in switches.items() if not argument.flag}
        for function in (self.function, *(mode.function for mode in self.modes if mode.function)):
            merged = {**merged, **{n: a for n, a in read_arguments(function).items() if n not in merged}}
        merged |= switches
        defaults = self.defaults or {}
        return {
            name: replace(argument, help=_with_default(argument.help, defaults[name])) if name in defaults else argument
            for name, argument in merged.items()
        }

    @cached_property
    def labels(self) -> dict[str, str]:
        """What errors call each parameter."""
        return {name: argument.flag or argument.metavar or name for name, argument in self.arguments.items()}

    @property
    def full_description(self) -> str:
        """What the verb does: the description, or the first sentence of the function's docstring."""
        return self.description or first_sentence(self.function)

    def declare_arguments(self, parser: Parser) -> None:
        """Add the arguments, the exports and the output flags to a parser."""
        remark = self.remark if isinstance(self.remark, str) else self.remark()
        parser.describe(self.full_description, self.examples, remark)
        parser.groups(*self.group_order)
        for name, argument in self.arguments.items():
            names = tuple(filter(None, (argument.short_flag, argument.flag))) or (name,)
            parser.group(argument.group).add_argument(*names, **_argparse_settings(name, argument))
        for export in self.exports:
            parser.group(export.group).add_argument(
                export.flag, dest=export.name, type=export.parse, metavar=export.metavar, help=export.help
            )
        output = parser.group("output")
        if self.has_details:
            output.add_argument(
                "-v", "--verbose", action="store_true", help="print the whole report, with all its details"
            )
        if "json" not in self.arguments:  # of a verb that hands the flag on
            output.add_argument("--json", action="store_true", help="print the payload as JSON")
        for title, text in (self.help_sections or {}).items():
            parser.add_argument_group(title, text())

    def run(self, arguments: argparse.Namespace) -> str | Report:
        """Run the verb with parsed arguments; return its report, or the payload as JSON text."""
        values = {name: value for name in self.arguments if (value := getattr(arguments, name, None)) not in NOT_PASSED}
        is_served = not arguments.json and not any(
            mode.applies(values) for mode in self.modes
        )  # a mode has an answer of its own
        serve = self.serve if is_served else None
        if serve:
            self.require_packages()
        targets = {
            export.name: target for export in self.exports if (target := getattr(arguments, export.name)) is not None
        }
        with label_arguments(self.labels):
            progress = getattr(arguments, "progress", ignore_progress)
            result, added = self.call(values, targets, progress=progress)
            if result is None:  # the verb has printed all that there is
                return ""
            if serve:
                serve(result)
        arguments.exit_code = self.exit_code(result)
        if warning := self.warning(result):
            as_json = format_problems([warning], arguments.exit_code, as_json=True)
            write_error((as_json if arguments.json else warning) + "\n")
        if arguments.json and has_payload(result):
            return json.dumps(payload_of(result), indent=json_indent(result))
        report = report_of(result)
        if isinstance(report, str):
            return report
        last_lines = list(self.last_lines(result, targets))
        return [*report, *added, *([Section(last_lines)] if last_lines else [])]

    def call(
        self, values: Mapping[str, Any], targets: Mapping[str, str], *, progress: Progress
    ) -> tuple[Any, list[Section]]:
        """Call the function with the arguments that were written, and write the exports to their targets. Errors name parameters.

        Return the result, and the sections that exports add to its report. Raises `InputError` with the command that installs a
        package that the verb requires and this machine lacks.
        """
        if not self.serve:
            self.require_packages()
        exports = [(export, targets[export.name]) for export in self.exports if export.name in targets]
        mode = self._choose_mode({**values, **targets})
        for export, target in exports:
            if export.prepare:
                export.prepare(target)
        result = self._call(mode, values, progress)
        mode.require_answer(result, progress)
        return result, [section for export, target in exports for section in export.write(result, target) or ()]

    def require_packages(self) -> None:
        """Raise `InputError` for a package that the verb requires and this machine lacks."""
        if self.requires:
            present.require_packages(self.function.__name__, self.requires)

    def _choose_mode(self, written: Mapping[str, Any]) -> Mode:
        """Return the first mode that applies, checked; without one the verb's own function."""
        mode = next((mode for mode in self.modes if mode.applies(written)), Mode())
        mode.check(written)
        return mode

    def _call(self, mode: Mode, written: Mapping[str, Any], progress: Progress) -> Any:
        function = mode.function or self.function
        accepted = inspect.signature(function).parameters.keys() | read_arguments(function).keys()
        keywords = {**mode.keywords(written), "progress": progress}
        return function(**{name: value for name, value in keywords.items() if name in accepted})


def verb(**settings: Any) -> Callable[[F], F]:
    """Make a verb of a function: `Verb(function=..., **settings)` becomes its attribute `verb`.

    What the verb requires is checked for Python callers too.
    """

    def decorate(function: F) -> F:
        verb = Verb(function=function, **settings)
        decorated = _with_requirements(function, verb.requires) if verb.requires and not verb.serve else function
        decorated.verb = verb  # type: ignore[attr-defined]
        return decorated

    return decorate


def _with_requirements(function: F, modules: Sequence[str]) -> F:
    """Return the function with an `InputError` in place of the `ImportError` of a package that is missing."""

    @wraps(function)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        present.require_packages(function.__name__, modules)
        return function(*arguments, **keywords)

    return cast(F, checked)


def read_arguments(function: Callable[..., Any]) -> dict[str, Argument]:
    """Return the arguments of a function's parameters: positional ones, those of `**fields: Unpack[...]`, then flags.

    Annotations are evaluated in the function's module; types that are only imported for type checkers stay unread.
    """
    positional: dict[str, Argument] = {}
    fields: dict[str, Argument] = {}
    flags: dict[str, Argument] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            fields = _arguments_of_fields(function, str(parameter.annotation))
        elif argument := _argument_of(_evaluate(function, parameter.annotation)):
            (flags if argument.flag else positional)[name] = argument
    positional = dict(sorted(positional.items(), key=lambda pair: pair[1].position))
    return {**positional, **fields, **flags}


class _UnreadType:
    """Placeholder of a type that only type checkers import: annotations are read for their `Argument` alone."""

    def __getattr__(self, name: str) -> _UnreadType:
        if name.startswith("__"):  # `typing` looks for marks of special forms
            raise AttributeError(name)
        return self

    def __call__(self) -> None:
        """Do nothing: `typing` accepts callables as types."""

    def __getitem__(self, key: Any) -> _UnreadType:
        return self

    def __or__(self, alternative: Any) -> _UnreadType:
        return self

    __ror__ = __or__


class _AnnotationNames(dict[str, Any]):
    """Names of a module, with an `_UnreadType` for those that it does not have."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, None) or _UnreadType()


def _evaluate(function: Callable[..., Any], annotation: Any) -> Any:
    """Return the value of an annotation; types that only type checkers import stay unread."""
    if not isinstance(annotation, str):
        return annotation
    names = _AnnotationNames(inspect.unwrap(function).__globals__)
    return eval(annotation, {}, names)


def _argument_of(annotation: Any) -> Argument | None:
    if get_origin(annotation) is not Annotated:
        return None
    argument = next((part for part in get_args(annotation)[1:] if isinstance(part, Argument)), None)
    is_switch = get_args(annotation)[0] is bool
    return replace(argument, parse=bool) if argument and is_switch else argument


def require_known_fields(fields: Mapping[str, object], kind: type, required: Iterable[str] = ()) -> None:
    """Raise `InputError` for keyword arguments that `kind`, of `**fields: Unpack[kind]`, does not have, and for required ones
    that are missing: Python checks neither, and a misspelt one would be left out in silence."""
    names = list(kind.__annotations__)
    problems = [
        f"{name}: no such argument{did_you_mean(name, names)}; one of {', '.join(names)} is required"
        for name in fields
        if name not in names
    ]
    problems += [f"{argument_label(name)}: missing; it is required" for name in required if name not in fields]
    raise_problems(problems)


def _arguments_of_fields(function: Callable[..., Any], annotation: str) -> dict[str, Argument]:
    """Return the arguments of `**fields: Unpack[SomeTypedDict]`."""
    unpacked = _evaluate(function, annotation)
    if get_origin(unpacked) is not Unpack:
        return {}
    hints = get_type_hints(get_args(unpacked)[0], include_extras=True)
    return {name: argument for name, hint in hints.items() if (argument := _argument_of(hint))}


def _argparse_settings(name: str, argument: Argument) -> dict[str, Any]:
    settings: dict[str, Any] = {"help": argument.help_text, "completes": argument.completes}
    if argument.choices is not None:
        settings["choices"] = argument.choice_list
    if argument.flag:
        settings["dest"] = name
        if argument.required:
            settings["required"] = True
    if argument.parse is bool:
        return {**settings, "action": "store_const", "const": argument.switch_value}
    settings |= {"type": argument.parse}
    if argument.metavar is not None:
        settings["metavar"] = argument.metavar
    if argument.repeat:
        settings |= {"action": "append", "default": []}
    if argument.variadic:
        settings |= {"nargs": "*", "default": []} if argument.optional else {"nargs": "+"}
    elif argument.optional and not argument.flag:
        settings["nargs"] = "?"
    return settings


def _with_default(help_text: str | Callable[[], str], default: str) -> Callable[[], str]:
    return lambda: f"{help_text if isinstance(help_text, str) else help_text()} (default: {default})"


def first_sentence(function: Callable[..., Any]) -> str:
    """Return the first paragraph of a function's docstring on one line."""
    return " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
