"""`shardwise train`: run a plan, as it says, and measure it."""

from __future__ import annotations

import argparse
import importlib.util

from shardwise.cli.section import Report, paragraphs
from shardwise.errors import InputError
from shardwise.parser import Parser
from shardwise.train.flags import DESCRIPTION, EXAMPLES, add_train_arguments

__all__ = ["DESCRIPTION", "EXAMPLES", "configure", "run"]


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    add_train_arguments(parser)


def run(arguments: argparse.Namespace) -> str | Report:
    """The run's summary, as text or as JSON, when it has ended."""
    if importlib.util.find_spec("torch") is None:
        raise InputError("train: PyTorch is not installed; pip install shardwise[train]")
    from shardwise.measurement.summary import shown, summary_text
    from shardwise.train.start import start

    summary = start(arguments)
    return shown(summary, as_json=True) if arguments.json else paragraphs(summary_text(summary))
