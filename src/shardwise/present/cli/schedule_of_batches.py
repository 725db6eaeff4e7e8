"""`--batch-schedule` of the verbs that price a run."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.values.argument_parser import ArgumentGroup

if TYPE_CHECKING:
    from shardwise.price import Reliability
    from shardwise.search import Plan


def add_schedule_argument(group: ArgumentGroup) -> None:
    """The flag."""
    group.add_argument(
        "--batch-schedule", metavar="TEXT",
        help="price the --tokens with a batch that changes by the tokens seen, each phase with this layout: "
        "0:1Mi,100G:4Mi or linear:from=1Mi,by=1Mi,over=100G",
    )  # fmt: skip


def with_schedule(arguments: argparse.Namespace, plan: Plan, reliability: Reliability) -> Plan:
    """The plan whose run has the phases of the schedule; the same without one. Raises `InputError`."""
    from shardwise.batch_size import parse_batch_schedule
    from shardwise.price.training_run import price_scheduled_run

    if arguments.batch_schedule is None:
        return plan
    schedule = parse_batch_schedule(arguments.batch_schedule)
    run = price_scheduled_run(plan.problem, plan.layout, schedule, reliability)
    return replace(plan, run=run)
