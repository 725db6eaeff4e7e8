"""Whether a model's layers make what a layout's set of tensors keeps."""

from __future__ import annotations

from shardwise.model.architecture import Architecture
from shardwise.model.decoder import LAYERS, results, unit_counts
from shardwise.model.kept_sets import is_budget, is_set, kept_tensors
from shardwise.names import unknown


def wrong_set(architecture: Architecture, policy: str) -> list[str]:
    """What is wrong with a set of tensors to keep, which all have to be results of a model's layers; and with a budget, for which
    a set has not been chosen."""
    if is_budget(policy):
        return [
            f"recompute: {policy} asks for a set of tensors, which estimate, memory and plan choose; a set is required here"
        ]
    if not is_set(policy):
        return []
    made = {kind: results(architecture, kind) for kind in LAYERS if unit_counts(architecture).get(kind)}
    every = dict.fromkeys(name for names in made.values() for name in names)
    found = []
    for kind, tensors in kept_tensors(policy).items():
        if kind and kind not in made:
            found.append(
                f"recompute: {architecture.name} has no layers of kind {kind!r}; one of {', '.join(made)} is required"
            )
            continue
        known = made[kind] if kind else tuple(every)
        found += [f"recompute: {unknown(name, known)}" for name in tensors if name not in known]
    return found
