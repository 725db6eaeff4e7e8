"""Every value of a target, with its source."""

from __future__ import annotations

from shardwise.interop import get_target
from shardwise.values import SourcedValue

OWN = "interop/frameworks/options"


def target_values(name: str) -> list[SourcedValue]:
    """The release that a target is written for, the stack that predicts it, and the options of the release."""
    target = get_target(name)
    return [
        ("title", target.title, target.source), ("version", target.version, target.source),
        ("stack", target.stack, "hardware/catalog/stacks.toml"), ("says_model", target.includes_model, target.source),
        ("ranks", list(target.order or ["as the plan places them"]), target.source),
        ("num_options", len(target.options), f"{OWN}/{target.options_file}.csv"),
    ]  # fmt: skip
