"""Read the launch of a framework: its model, job and layout, and which options were not understood. Nothing of it is run.
Price it, and list changes of its options that make it faster.

`price_launch` predicts the step for the stack of the framework. `list_changes` searches the best layout that the framework runs,
and tries each option alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.hardware import Cluster, get_stack, with_published_constants
from shardwise.interop.frameworks.targets import get_reader
from shardwise.interop.launches.launch import (
    COSTLESS_FIELDS,
    Launch,
    LaunchFields,
    Machines,
    cluster_machines,
    launch_from_fields,
    with_numerics,
)
from shardwise.interop.launches.launch_scripts import process_count_notes, script_argument_notes
from shardwise.interop.launches.target import LaunchFiles, OptionReader, Target
from shardwise.interop.launches.translate_launch import from_options, refusals, to_options
from shardwise.interop.recognize_launch import read_options, recognize_target
from shardwise.interop.text_formats.option_tables import Options
from shardwise.layout import Layout, LayoutFacts, stack_of, unsupported_choices, violations
from shardwise.layout.choices import stack_search_values
from shardwise.model import Architecture, Job, ModelFacts, default_seq_len, load_model, model_names
from shardwise.pipeline import NATURAL, natural_schedule
from shardwise.price import Estimate, Problem
from shardwise.price.estimate import estimate
from shardwise.search import Plan, layout_of_plan, make_plan, plan_layout
from shardwise.values import (
    FileMessages,
    InputError,
    NothingFitsError,
    Payload,
    raise_problems,
    read_text,
)

# Fields that every launch has, and the options of `shardwise read` that give them if the files do not.
USER_FIELDS: Mapping[str, str] = {
    "job.seq_len": "--seq-len", "job.global_batch_seqs": "--batch-seqs", "layout.micro_batch_seqs": "--micro-batch-seqs",
}  # fmt: skip
MAX_FILE_BYTES = 4_000_000  # far above any launch


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedLaunch:
    """A launch as its files say it.

    `unknown` are options that the release does not have, `unread` those that no plan depends on, `not_priced` what options change
    ("memory" or "time") that the price leaves out, and `notes` say what is priced as something else.
    """

    target: Target
    options: Options
    launch: Launch
    unknown: tuple[str, ...]
    unread: tuple[str, ...]
    not_priced: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @property
    def memory_is_known(self) -> bool:
        """Return whether no option changes the memory that the price leaves out."""
        return "memory" not in self.not_priced.values()


def read_files(paths: list[str]) -> LaunchFiles:
    """Return the texts of files by name. Raises `InputError` if one cannot be read."""
    texts: dict[str, str] = {}
    for path in map(Path, paths):
        texts[path.name] = read_text(path, FileMessages("read: "), MAX_FILE_BYTES)
    return texts


def parse_launch(
    files: LaunchFiles, machines: Machines, *, target: str | None = None, model: Architecture | None = None,
    user_fields: LaunchFields | None = None, recipe: str | None = None,
) -> ParsedLaunch:  # fmt: skip
    """Read a launch from its files. Unless named, the target is the one that knows most of the options.

    `recipe` is the one of several that the files hold. `user_fields` are fields that the files may leave out (`USER_FIELDS`).
    Raises `InputError` if no target knows an option, or if the options make no valid launch.
    """
    framework = get_reader(target) if target else recognize_target(files, recipe)
    options = read_options(framework, files, recipe)
    framework = framework.for_launch(options)
    if not any(name in framework.options for name in options):
        raise InputError(
            f"read: found no option of {framework.title} {framework.version} in {', '.join(files)}; its launch is required"
        )
    named_by_user = model is not None
    model = model or framework.find_model(options)
    if model is None and not framework.includes_model:
        raise InputError(f"read: {_unknown_model_problem(framework, options)}; give --model, a name or a config.json")
    release_options, reader = (
        framework.options,
        OptionReader(options, machines, user_fields, model, framework.value_problem),
    )
    process_notes = (*process_count_notes(files, machines), *script_argument_notes(files))
    effects = {name: effect for name, value in options.items() if (effect := framework.unpriced_effect(name, value))}
    try:
        if not named_by_user:
            _require_known_model(options, effects)
        read_fields = from_options(framework, reader, model)
        launch_fields = _with_user_fields(read_fields, reader.user_fields, framework, model)
        launch = _build_launch(launch_fields, machines, model)
        length_notes = (
            _length_notes(framework, launch) if "job.seq_len" not in {**read_fields, **reader.user_fields} else ()
        )
    except InputError as error:
        raise InputError(*error.problems, *process_notes) from None
    except (TypeError, AttributeError, KeyError, ValueError, ArithmeticError) as error:
        raise InputError(f"read: {framework.title} with options that are missing or of another type: {error}") from None
    return ParsedLaunch(
        target=framework, options=options, launch=launch,
        unknown=tuple(name for name in options if name not in release_options),
        unread=tuple(name for name in reader.unread_names() if name in release_options and name not in effects),
        not_priced={name: effect for name, effect in effects.items() if effect != "model"},
        notes=(
            *reader.notes, *_omission_note(launch), *_vocabulary_note(launch_fields, launch, model),
            *length_notes, *process_notes,
        ),
    )  # fmt: skip


def _unknown_model_problem(target: Target, options: Options) -> str:
    """Return why the model of a launch is not known: it is not named, or not one of the catalogue."""
    name = target.model_name(options)
    if name is None:
        return f"a launch of {target.title} does not say its model"
    return f"the model of the launch is {name[:80]!r}, which the catalogue lacks"


def _require_known_model(options: Options, effects: Mapping[str, str]) -> None:
    """Raise `InputError` for options that make the model another one than its sizes say."""
    problem = "which makes the model another one than its sizes say, and is not known here; --model names it"
    raise_problems(
        [
            f"{name}: found {str(options[name])[:60]!r}, {problem}"
            for name, effect in effects.items()
            if effect == "model"
        ]
    )


def _length_notes(target: Target, launch: Launch) -> Iterator[str]:
    """Yield a note on the length of sequences that no file says."""
    yield (
        f"the files of {target.title} say no length of sequences, which the data have: priced with {launch.job.seq_len:,} tokens "
        "(default); --seq-len says another"
    )


def _omission_note(launch: Launch) -> Iterator[str]:
    """Yield a note if the catalogue's model is the language model of one with towers, which a launch loads too."""
    _, without, parts = launch.model.source.partition(", without its ")
    if without:
        yield f"{launch.model.name} is the language model alone: what it has beside it ({parts}) is left out of the price"


def _vocabulary_note(launch_fields: LaunchFields, launch: Launch, model: Architecture | None) -> Iterator[str]:
    """Yield a note if the vocabulary was taken from the catalogue's model with the same sizes."""
    if model is None and _lacks_vocabulary(launch_fields):
        yield (
            f"the launch says no vocabulary, which its tokenizer decides: taken to be {launch.model.name}, whose other sizes are "
            f"the same, with {launch.model.vocab_size:,} tokens; --model says another"
        )


def _lacks_vocabulary(launch_fields: LaunchFields) -> bool:
    return launch_fields.get("model.vocab_size") is None


def _with_user_fields(
    launch_fields: LaunchFields, user_fields: LaunchFields, target: Target, model: Architecture | None
) -> dict[str, Any]:
    """Return the fields that were read and those that the user gave. Raises `InputError` if some differ or are missing."""
    problems = [
        f"{USER_FIELDS[field]}: found {value}, and the launch says {launch_fields[field]}; leave it out"
        for field, value in user_fields.items() if launch_fields.get(field, value) != value
    ]  # fmt: skip
    combined = {**user_fields, **launch_fields}
    if (
        "job.seq_len" not in combined
        and model is not None
        and len(combined.keys() & USER_FIELDS.keys()) == len(USER_FIELDS) - 1
    ):
        combined["job.seq_len"] = default_seq_len(model)  # as other verbs assume; `parse_launch` says so
    problems += [
        f"read: the files of {target.title} say no {field.partition('.')[2]}; give the script that starts it too, or {option}"
        for field, option in USER_FIELDS.items() if field not in combined
    ]  # fmt: skip
    raise_problems(problems)
    return combined


def _build_launch(launch_fields: Mapping[str, Any], machines: Machines, model: Architecture | None) -> Launch:
    """Build the launch, with the catalogue's model of the same sizes, if any, but the numerics that were read.

    If only the tokenizer knows the vocabulary, it is taken from the catalogue's model with all the other sizes. Raises
    `InputError` if there is none.
    """
    if model is not None:
        return launch_from_fields(launch_fields, machines, model)
    lacks_vocabulary = _lacks_vocabulary(launch_fields)
    complete = {**launch_fields, "model.vocab_size": 1} if lacks_vocabulary else launch_fields
    launch = launch_from_fields(complete, machines)
    read = launch.model
    ignored = ("lora_rank", "lora_targets", *(("vocab_size",) if lacks_vocabulary else ()))
    catalog_model = replace(find_catalog_model(read, ignored), lora_rank=read.lora_rank, lora_targets=read.lora_targets)
    if lacks_vocabulary and catalog_model == launch.model:
        raise InputError(
            "the vocabulary is missing, as the tokenizer decides it; --model is required, a name or a config.json"
        )
    return replace(launch, model=with_numerics(catalog_model, launch_fields))


def find_catalog_model(model: Architecture, ignored: Sequence[str] = ()) -> Architecture:
    """Return the catalogue's model with the same sizes (apart from the `ignored` fields), or the given model."""
    sizes = _priced_fields(model, ignored)
    catalog = map(load_model, model_names())
    return next((candidate for candidate in catalog if _priced_fields(candidate, ignored) == sizes), model)


def _priced_fields(model: Architecture, ignored: Sequence[str]) -> dict[str, Any]:
    """Return the model's fields that affect its costs. Learned positions do: their rows are weights."""
    excluded = {*COSTLESS_FIELDS, *ignored} - ({"max_positions"} if model.structure.has_learned_positions else set())
    return {name: value for name, value in asdict(model).items() if name not in excluded}


MAX_CHANGES = 5
MIN_GAIN = 0.01  # part of the step time that a change must save


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchChange:
    """Options to set (None: to leave out), the layout that results, and its estimate."""

    options: dict[str, Any]
    layout: Layout
    estimate: Estimate


def list_changes(launch: Launch, target: Target, cluster: Cluster) -> list[LaunchChange]:
    """List at most `MAX_CHANGES` changes that make the step faster, or make it fit.

    The layout that a search picks comes first, then changes of a single choice, fastest first. A target that is read only has
    none.
    """
    if not target.is_written:
        return []
    current = estimate(Problem(launch.model, cluster, launch.job), launch.layout)
    time_limit_s = current.step_time_s * (1 - MIN_GAIN) if current.fits else float("inf")
    try_layout = partial(_try_layout, launch, target, cluster, time_limit_s)
    searched = try_layout(layout) if (layout := _searched_layout(launch, cluster)) else None
    neighbors = {layout: change for layout in _neighbor_layouts(launch, cluster) if (change := try_layout(layout))}
    ranked = sorted(neighbors.values(), key=lambda change: change.estimate.step_time_s)
    distinct = [change for change in ranked if searched is None or change.layout != searched.layout]
    return [*([searched] if searched else []), *distinct][:MAX_CHANGES]


def _try_layout(
    launch: Launch, target: Target, cluster: Cluster, time_limit_s: float, layout: Layout
) -> LaunchChange | None:
    """Return the change to another layout, or None if the target cannot run it or it is not faster than the limit."""
    changed = replace(launch, layout=layout, plan=None)
    if violations(launch.model, launch.job, cluster.num_devices, layout) or refusals(changed, target):
        return None
    estimated = estimate(Problem(launch.model, cluster, launch.job), layout)
    if not estimated.fits or estimated.step_time_s >= time_limit_s:
        return None
    return LaunchChange(options=_changed_options(target, launch, changed), layout=layout, estimate=estimated)


def _searched_layout(launch: Launch, cluster: Cluster) -> Layout | None:
    """Return the layout that a search picks for the job, or None if nothing fits."""
    try:
        return make_plan(Problem(launch.model, cluster, launch.job), elsewhere=False).layout
    except (InputError, NothingFitsError):
        return None


def _neighbor_layouts(launch: Launch, cluster: Cluster) -> Iterator[Layout]:
    """Yield layouts that differ in one choice: those that a search under the stack tries, and half or twice the micro-batch."""
    layout, stack = launch.layout, stack_of(cluster)
    choices: dict[str, tuple[Any, ...]] = {} if stack is None else stack_search_values(stack, launch.model, launch.job)
    choices.pop("stages", None)
    choices["micro_batch_seqs"] = _half_and_twice(layout.micro_batch_seqs)
    choices["num_virtual_stages"] = _half_and_twice(layout.num_virtual_stages) if layout.pp > 1 else ()
    for name, alternatives in choices.items():
        for alternative in alternatives:
            try:
                yield _replace_choice(layout, name, alternative)
            except InputError:
                continue


def _half_and_twice(count: int) -> tuple[int, ...]:
    return (count // 2, count * 2) if count % 2 == 0 else (count * 2,)


def _replace_choice(layout: Layout, name: str, choice: Any) -> Layout:
    """Return the layout with another choice. The schedule follows the number of virtual stages; flags become booleans."""
    if (name == "schedule" and choice == NATURAL) or name == "num_virtual_stages":
        num_virtual_stages = choice if name == "num_virtual_stages" else layout.num_virtual_stages
        schedule = natural_schedule(layout.pp, num_virtual_stages)
        return replace(layout, num_virtual_stages=num_virtual_stages, schedule=schedule, layers_per_stage=None)
    if isinstance(getattr(layout, name), bool):
        choice = bool(choice)
    return replace(layout, **{name: choice})


def _changed_options(target: Target, before: Launch, after: Launch) -> dict[str, Any]:
    """Return the options that differ after a change; None for those that go away."""
    old, new = to_options(target, before), to_options(target, after)
    changed = {name: value for name, value in new.items() if old.get(name) != value}
    return {**changed, **{name: None for name in old if name not in new}}


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedLaunch:
    """A launch as it was read, as a plan with its estimate, and the changes that make it faster."""

    parsed: ParsedLaunch
    plan: Plan
    better: tuple[LaunchChange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchChangeRecord(Payload):
    """Change of a launch: options to set (null: to leave out), their layout, and its step and memory."""

    change: Mapping[str, Any]
    layout: LayoutFacts
    step_time_s: float
    memory_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRecord(Payload):
    """Launch of a framework with its estimate and changes that make it faster.

    `unknown`: options that the release does not have; `unread`: those that no plan depends on; `not_priced`: what options change,
    memory or time, that the estimate leaves out, so that whether it fits is not known with one that changes memory.
    """

    SCHEMA = "shardwise.read/3"
    target: str
    version: str
    model: ModelFacts
    cluster: str
    job: Job
    layout: LayoutFacts
    unknown: Sequence[str]
    unread: Sequence[str]
    not_priced: Mapping[str, str]
    notes: Sequence[str]
    estimate: Estimate
    better: Sequence[LaunchChangeRecord]

    @classmethod
    def of(cls, launch: PricedLaunch) -> LaunchRecord:
        """Return the record of a launch."""
        parsed, plan = launch.parsed, launch.plan
        changes = [
            LaunchChangeRecord.from_attributes(
                change.estimate, change=change.options, layout=layout_of_plan(plan, change.layout)
            )
            for change in launch.better
        ]
        return cls.from_attributes(
            parsed, plan, target=parsed.target.name, version=parsed.target.version, model=ModelFacts.of(plan.model),
            cluster=plan.cluster.name, job=plan.job, layout=layout_of_plan(plan), better=changes,
        )  # fmt: skip


def _as_read(priced: Estimate, launch: Launch, cluster: Cluster) -> Estimate:
    """Return the estimate with notes on what plans under the stack do not have: the launch has it, so its framework does too."""
    stack = stack_of(cluster)
    outside = set() if stack is None else set(unsupported_choices(stack, launch.model, launch.job, launch.layout))
    notes = (
        f"as the files say it, beyond the plans under {stack.name}: {note}" if stack and note in outside else note
        for note in priced.notes
    )
    return replace(priced, notes=tuple(notes))


def price_launch(
    files: LaunchFiles, cluster: Cluster, *, target: str | None = None, model: Architecture | None = None,
    user_fields: LaunchFields | None = None, recipe: str | None = None,
) -> PricedLaunch:  # fmt: skip
    """Read a launch from its files and price it on a cluster, with changes that make it faster.

    It is priced for the framework's stack, unless the cluster was measured. `target` names the framework if the options do not
    tell, `recipe` the function of a Python file with several, `model` is the model if the files do not say it, and `user_fields`
    are fields that the files may leave out (`read_launch.USER_FIELDS`). Raises `InputError` if the files are no launch, or one
    that this cluster cannot run.
    """
    parsed = parse_launch(
        files, cluster_machines(cluster), target=target, model=model, user_fields=user_fields, recipe=recipe
    )
    priced_cluster = cluster
    if not cluster.calibration:
        priced_cluster = with_published_constants(cluster, get_stack(parsed.target.stack))
    launch = parsed.launch
    plan = plan_layout(launch.model, priced_cluster, launch.job, launch.layout, as_run=False)
    plan = replace(plan, estimate=_as_read(plan.estimate, launch, priced_cluster))
    return PricedLaunch(parsed=parsed, plan=plan, better=tuple(list_changes(launch, parsed.target, priced_cluster)))
