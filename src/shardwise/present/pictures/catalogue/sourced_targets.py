"""Every value of a target, with its source."""

from __future__ import annotations

from shardwise.interop.frameworks.targets import target_named
from shardwise.values.sourced_value import SourcedValue

OWN = "interop/frameworks/options"


def target_values(name: str) -> list[SourcedValue]:
    """The release that a target is written for, the stack that predicts it, and the options of the release."""
    target = target_named(name)
    return [
        ("title", target.title, target.source), ("version", target.version, target.source),
        ("stack", target.stack, "hardware/catalog/stacks.toml"), ("says_model", target.says_model, target.source),
        ("ranks", list(target.order or ["as the plan places them"]), target.source),
        ("num_options", len(target.options), f"{OWN}/{target.table}.csv"),
    ]  # fmt: skip
