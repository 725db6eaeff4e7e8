"""`shardwise train`: run a plan, as it says, and measure it."""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

from shardwise.errors import InputError
from shardwise.train.flags import DESCRIPTION, EPILOG, add_train_arguments


def configure(verbs: Any) -> None:
    """Declare the verb."""
    parser = verbs.add_parser(
        "train", help="train the model of a plan as it says, and measure it", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_train_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> str:
    """The run's summary, as text or as JSON, when it has ended."""
    if importlib.util.find_spec("torch") is None:
        raise InputError("train: PyTorch is not installed; pip install shardwise[train]")
    from shardwise.measurement.summary import shown
    from shardwise.train.start import start

    return shown(start(arguments), as_json=arguments.json)
