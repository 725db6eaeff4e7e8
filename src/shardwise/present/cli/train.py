"""`shardwise train`: run a plan, as it says, and measure it."""

from __future__ import annotations

import argparse
import importlib.util

from shardwise.present.rendering.report import Report, sections_of_text
from shardwise.run.trainer.flags import DESCRIPTION, EXAMPLES, add_train_arguments
from shardwise.values import InputError, Parser

__all__ = ["DESCRIPTION", "EXAMPLES", "configure", "run"]


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    add_train_arguments(parser)


def run(arguments: argparse.Namespace) -> str | Report:
    """The run's summary, as text or as JSON, when it has ended."""
    if importlib.util.find_spec("torch") is None:
        raise InputError("train: PyTorch is not installed; pip install shardwise[train]")
    from shardwise.records.run_summary import format_summary, summary_text
    from shardwise.train import start_run

    summary = start_run(arguments)
    return format_summary(summary, as_json=True) if arguments.json else sections_of_text(summary_text(summary))
