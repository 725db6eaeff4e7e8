"""`simulate`: a plan's step on simulated streams; `instructions`: what each device of a plan does, in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from shardwise import present, price, search
from shardwise.present import charts
from shardwise.present.arguments import PlanOrFile, read_plan
from shardwise.present.exports import picture, text_file
from shardwise.present.verb import Argument, verb
from shardwise.price.simulation.contention import parse_contention

if TYPE_CHECKING:
    from shardwise.price import Simulation
    from shardwise.search import InstructionListing

OVERLAP_CHOICES = ("list", "sum", "max", "per_axis", "none")
PASSES = ("forward", "backward", "update")
EXAMPLE_PLAN = "shardwise plan llama-3-8b h100:8 --batch-tokens 512Ki --seq-len 8Ki --out plan.json"


def _step_chart(simulation: Simulation) -> charts.Chart:
    return charts.step_chart(simulation)


def _trace_text(simulation: Simulation) -> str:
    return present.step_trace_text(simulation.step) + "\n"


@verb(
    description="""\
A plan's step, instruction by instruction: kernels on the compute stream, collectives on a stream for each axis,
waited for where the list has it, and the schedule of its passes. Says what is exposed of each axis, what the stages wait for one
another, what a device holds over time, and what the length of the step is made of; beside the plan's estimate.""",
    examples=(
        EXAMPLE_PLAN,
        "shardwise simulate plan.json --draw step.svg --trace step.json",
        "shardwise simulate plan.json --overlap sum --json",
    ),
    exports=(
        picture("--draw", "draw streams and memory over time", _step_chart),
        text_file(
            "--trace", "write every kernel and transfer as a trace for Chrome and Perfetto (JSON)", _trace_text
        ),
    ),
    group_order=("plan", "output"),
    has_details=True,
)  # fmt: skip
def simulation(
    plan: PlanOrFile,
    *,
    overlap: Annotated[
        str,
        Argument(
            flag="--overlap", group="plan", choices=OVERLAP_CHOICES,
            help="list: starts and waits where the instruction list has them (the default); a convention of the estimate; none: "
            "each collective is waited for where it starts",
        ),
    ] = "list",
    contention: Annotated[
        float | str,
        Argument(
            flag="--contention", group="plan", metavar="X",
            help="how many times as long a kernel takes beside traffic, or published: what is known of the chip (default: 1, as "
            "constants fitted to whole steps have their contention in them)",
        ),
    ] = 1.0,
) -> Simulation:  # fmt: skip
    """Return a plan's step on simulated streams: exposed communication by axis, the bubble, memory over time, the critical path.

    `plan` is a `Plan` or its file. `overlap`: "list", where every collective starts and is waited for where the instruction list
    says; "sum", "max" or "per_axis", the conventions of an estimate; "none", where every collective is waited for at once.
    `contention`: how many times as long a kernel takes while a transfer runs, or "published" for the figure of the chip. Raises
    `InputError` for a file that is no plan, an unknown overlap, a contention below 1 and a chip without a published one.

    >>> import shardwise as sw
    >>> plan = sw.plan("llama-3-8b", "h100:8", overlap="sum", global_batch_tokens="512Ki", seq_len=4096)
    >>> abs(sw.simulation(plan, overlap="sum").step_time_s / plan.estimate.step_time_s - 1) < 1e-9
    True
    >>> step = sw.simulation(plan)
    >>> abs(sum(part.seconds for part in step.critical_path) / step.step_time_s - 1) < 1e-9
    True
    """
    loaded = read_plan(plan)
    return price.simulate(
        loaded.problem, loaded.layout, overlap=overlap,
        contention=parse_contention(contention, loaded.problem.cluster.chip.catalog_name), estimate=loaded.estimate,
    )  # fmt: skip


@verb(
    description="""What each device does in a step of a plan, in order: kernels, collectives where they start and where they are
waited for, and what is freed; on which stream, how many bytes, how long by itself, and why. The plan is priced by this list.""",
    examples=(EXAMPLE_PLAN, "shardwise instructions plan.json --pass forward --unit block"),
    group_order=("plan", "output"),
)
def instructions(
    plan: PlanOrFile,
    *,
    passes: Annotated[
        Sequence[str],
        Argument(flag="--pass", group="plan", choices=PASSES, repeat=True, help="this pass only (may be repeated)"),
    ] = PASSES,
    unit: Annotated[
        str | None,
        Argument(flag="--unit", group="plan", metavar="NAME", help="this unit only: embedding, block, head, ..."),
    ] = None,
    stage: Annotated[
        int, Argument(flag="--stage", group="plan", metavar="N", parse=int, help="of this pipeline stage (default: 0)")
    ] = 0,
    shows_all: Annotated[bool, Argument(flag="--all", group="plan", help="what is sliced and freed too")] = False,
) -> InstructionListing:
    """Return what each device of a pipeline stage does in a step of a plan, in order: kernels, collectives, frees.

    `plan` is a `Plan` or its file; `passes` and `unit` select a part of the list. `shows_all`: the report has what is sliced and
    freed too. Raises `InputError` for a file that is no plan, and for a stage, a pass or a unit that the plan does not have.

    >>> import shardwise as sw
    >>> plan = sw.plan("gpt-2", "h100:8", global_batch_tokens="64Ki", seq_len=1024)
    >>> [(segment.unit, segment.name) for segment in sw.instructions(plan, unit="block").segments]
    [('block', 'forward'), ('block', 'backward'), ('block', 'update')]
    """
    loaded = read_plan(plan)
    segments = search.list_instructions(loaded, stage=stage, passes=passes, unit=unit)
    return search.InstructionListing(plan=loaded, stage=stage, segments=segments, shows_all=shows_all)
