"""Arguments that verbs share, as annotated types of their parameters: model, cluster, layout, job, and those of searches.

A type says what the Python function takes, the `Argument` beside it how it is written on the command line. Types are texts: they
are read by type checkers alone, so that `--help` loads no other room.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from shardwise import layout, model, pipeline, search
from shardwise.present.verb import Argument
from shardwise.values import argument_label

if TYPE_CHECKING:
    from shardwise.batch_size import NoiseScale
    from shardwise.hardware import Cluster
    from shardwise.layout import Choices, Layout
    from shardwise.model import Architecture
    from shardwise.search import Goal, Plan


MODEL_HELP = "a model of the catalogue, such as llama-3-70b, or a Hugging Face config.json"
CLUSTER_HELP = "CHIP:COUNT or CHIP:SHAPE, such as h100:512 or tpu-v5p:16x20x28 (*2: two pods of it), or a .toml file"
PLAN_HELP = "a file that `shardwise plan --out` wrote"


def layout_help() -> str:
    """Return the help of a layout on the command line, with the names of policies and schedules."""
    return (
        'such as "tp=8 pp=4 fsdp=16 recompute=selective"; recompute is one of '
        f"{', '.join((*model.policy_names(), *model.POLICY_FORMS))}, schedule of {', '.join(pipeline.schedule_names())}"
    )


def several_layouts_help() -> str:
    """Return the help of a layout that may be repeated."""
    return f"{layout_help()}; may be repeated, to compare"


def overrides_argument(rooms: str, example: str | Callable[[], str], group: str = "job") -> Argument:
    """Return `--set`, which replaces values of the catalogue; `example` may be a function, called when the help is printed."""

    def help_text() -> str:
        return f"replace a value of {rooms}, such as {example() if callable(example) else example}; may be repeated"

    return Argument(flag="--set", repeat=True, metavar="KEY=VALUE", group=group, help=help_text)


def _job_example() -> str:  # the registry as it is when the help is printed
    return (
        f"model.num_layers=40, job.optimizer={'|'.join(model.optimizer_names())}, chip.memory_bytes=96GB or run.pue=1.1"
    )


Model = Annotated["str | os.PathLike[str] | Architecture", Argument(completes="models", help=MODEL_HELP)]
ClusterName = Annotated[
    "str | os.PathLike[str] | Cluster", Argument(group="cluster", completes="clusters", help=CLUSTER_HELP)
]
LayoutText = Annotated["str | Layout | None", Argument(flag="--layout", metavar="TEXT", parse=str, help=layout_help)]
Layouts = Annotated[
    "str | Layout | Sequence[str | Layout] | None",
    Argument(flag="--layout", metavar="TEXT", parse=str, repeat=True, help=several_layouts_help),
]
PlanOrFile = Annotated["str | os.PathLike[str] | Plan", Argument(group="plan", metavar="PLAN", help=PLAN_HELP)]
BatchSchedule = Annotated[
    "str | None",
    Argument(
        flag="--batch-schedule", metavar="TEXT",
        help="price the --tokens with a batch that changes by the tokens seen, each phase with this layout: "
        "0:1Mi,100G:4Mi or linear:from=1Mi,by=1Mi,over=100G",
    ),
]  # fmt: skip


def read_plan(plan: str | os.PathLike[str] | Plan) -> Plan:
    """Return a plan, read from its file where it is a path. Raises `InputError` for a file that is no plan."""
    return search.load_plan(os.fspath(plan)) if isinstance(plan, (str, os.PathLike)) else plan


class JobFields(TypedDict, total=False):
    """Fields of a `Job`, the stack to predict, and values of the catalogue to replace."""

    global_batch_tokens: Annotated[
        int | str,
        Argument(
            flag="--batch-tokens", metavar="N", help="tokens of one global batch, such as 4Mi, or 32Ki/device",
        ),
    ]  # fmt: skip
    seq_len: Annotated[
        int | str, Argument(flag="--seq-len", metavar="N", help="tokens of one sequence, such as 4096 or 8Ki")
    ]
    tokens: Annotated[
        float | str | None, Argument(flag="--tokens", metavar="N", help="tokens of the whole run, such as 15T")
    ]
    precision: Annotated[
        str,
        Argument(
            flag="--precision", metavar="NAME", completes="precisions",
            help="precision recipe, such as fp8_delayed (default: that of the stack, else bf16; see: show precisions)",
        ),
    ]  # fmt: skip
    overrides: Annotated[
        Sequence[str],
        overrides_argument("model, job, chip or run", _job_example),
    ]
    stack: Annotated[
        str | None,
        Argument(
            flag="--stack", metavar="NAME", completes="stacks", group="cluster",
            help="predict with the constants that published runs give for a software stack, such as nemo-25 (see: show stacks); "
            "default: what is typical of the chip, fused on GPUs and maxtext on TPUs",
        ),
    ]  # fmt: skip
    overlap: Annotated[
        str | None,
        Argument(
            flag="--overlap", metavar="NAME", group="cluster",
            help="price the bound, kernels and links at their best, with communication hidden by a convention: per_axis, sum or "
            "max; without it the step is predicted for a stack",
        ),
    ]  # fmt: skip
    loss: str | None
    document_tokens: int | None
    optimizer: str


# Defaults of batch and sequence, in words.
USUAL_JOB: Mapping[str, str] = {
    "global_batch_tokens": "that of published runs of the model's size, 512Ki to 16Mi",
    "seq_len": "4096, or the model's positions",
}

GOALS = ("time", "usd")


def _pin_help() -> str:
    return (
        "search only layouts with this, such as tp=8, offload=optimizer or recompute=full, which is one of "
        f"{', '.join((*model.policy_names(), *model.POLICY_FORMS))}; may be repeated"
    )


PlannedCluster = Annotated[  # the command line takes several, and compares them
    "str | os.PathLike[str] | Cluster",
    Argument(group="cluster", completes="clusters", variadic=True, help=f"{CLUSTER_HELP}; several are compared"),
]
Pins = Annotated[
    "str | Mapping[str, Any] | Sequence[str]",
    Argument(flag="--pin", group="search", repeat=True, metavar="KEY=VALUE", help=_pin_help),
]
Maxima = Annotated[
    "str | Mapping[str, Any] | Sequence[str]",
    Argument(
        flag="--max", group="search", repeat=True, metavar="KEY=VALUE",
        help="search only layouts with at most this, such as pp=4; may be repeated",
    ),
]  # fmt: skip
Deadline = Annotated[
    "str | None",
    Argument(
        flag="--deadline", group="search", metavar="TIME",
        help="finish the --tokens within this, such as 30d, 12h or 2w",
    ),
]  # fmt: skip
Budget = Annotated[
    "str | None",
    Argument(
        flag="--budget", group="search", metavar="USD",
        help="spend at most this on the --tokens, such as 2M or 500k",
    ),
]  # fmt: skip
NoiseScaleText = Annotated[
    "str | float | os.PathLike[str] | NoiseScale | None",
    Argument(
        flag="--noise-scale", group="search", metavar="N|RUN",
        help="choose batch and devices by the time to the loss, with this noise scale of the gradient in tokens, such as 1.2Mi, "
        "or the one that a run measured (its folder); --batch-tokens may be several then (1Mi,2Mi or 512Ki:8Mi:x2) or left out, "
        "and --tokens are those to the loss with the smallest of them, or without them the fewest",
    ),
]  # fmt: skip
TargetLoss = Annotated[
    "float | str | None",
    Argument(
        flag="--to-loss", group="search", metavar="NATS",
        help="the loss, in nats per token; without --noise-scale it stands for the noise scale of a published law",
    ),
]  # fmt: skip
GoalName = Annotated[
    "Goal | None",
    Argument(
        flag="--minimise", group="search", metavar="GOAL", choices=GOALS,
        help="to the loss: time, or usd (default: time; with a deadline usd)",
    ),
]  # fmt: skip
IsRunnable = Annotated[
    bool,
    Argument(flag="--runnable", group="search", help="search only layouts that `train` runs, with its kind of loss"),
]
IsDivisible = Annotated[
    bool,
    Argument(
        flag="--divisible", group="search",
        help="search only layouts that share the batch out evenly: no idle replica, every micro-batch full",
    ),
]  # fmt: skip


def read_choices(
    pins: Pins, maxima: Maxima, choices: Choices | None, *, runnable: bool, divisible: bool
) -> Choices | None:
    """Return what a search may choose from; errors name the pins as the user wrote them."""
    return layout.choices_from_pins(
        read_pins(pins, "pins"), read_pins(maxima, "maxima"), choices, runnable=runnable, divisible=divisible
    )


def read_pins(pins: str | Mapping[str, Any] | Sequence[str], parameter: str) -> Mapping[str, Any]:
    """Return pins by key: of a mapping, of a text with spaces, or of texts KEY=VALUE."""
    if isinstance(pins, Mapping):
        return pins
    return layout.parse_pins(pins.split() if isinstance(pins, str) else pins, argument_label(parameter))
