"""Arguments of searches: pins, maxima, limits of the run, the noise scale and the target loss."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from shardwise.layout import choices_from_pins
from shardwise.layout.choices import parse_pins
from shardwise.model import POLICY_FORMS, policy_names
from shardwise.present.arguments import CLUSTER_HELP
from shardwise.present.verb import Argument
from shardwise.values.argument_labels import argument_label

if TYPE_CHECKING:
    from shardwise.batch_size import NoiseScale
    from shardwise.hardware import Cluster
    from shardwise.layout import Choices
    from shardwise.search import Goal

GOALS = ("time", "usd")


def _pin_help() -> str:
    return (
        "search only layouts with this, such as tp=8, offload=optimizer or recompute=full, which is one of "
        f"{', '.join((*policy_names(), *POLICY_FORMS))}; may be repeated"
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
    return choices_from_pins(
        read_pins(pins, "pins"), read_pins(maxima, "maxima"), choices, runnable=runnable, divisible=divisible
    )


def read_pins(pins: str | Mapping[str, Any] | Sequence[str], parameter: str) -> Mapping[str, Any]:
    """Return pins by key: of a mapping, of a text with spaces, or of texts KEY=VALUE."""
    if isinstance(pins, Mapping):
        return pins
    return parse_pins(pins.split() if isinstance(pins, str) else pins, argument_label(parameter))
