"""Recompute policies that are sets of tensors: those that a layout names, "keep:q,k,v", and a budget of bytes, "budget:20GB".

A budget asks for the set that fits it; what is planned, run and written down is the set (`planning/budget.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwise.errors import InputError
from shardwise.units import parse_quantity

KEEP, BUDGET = "keep:", "budget:"
FORMS = ("keep:TENSOR,...", "budget:BYTES")  # how they are written
OF_KIND, KINDS = ":", "/"  # behind the name of a kind of layer, and between kinds


def is_set(policy: str) -> bool:
    """Whether a policy names the tensors that it keeps."""
    return policy.startswith(KEEP)


def is_budget(policy: str) -> bool:
    """Whether a policy is a budget, for which a set is still to be chosen."""
    return policy.startswith(BUDGET)


def budget_bytes(policy: str) -> float:
    """The bytes of a budget. Raises `InputError` for what is not written as bytes are.

    >>> budget_bytes("budget:20GB")
    20000000000.0
    """
    return parse_quantity(policy.removeprefix(BUDGET), what="layout: recompute: budget", unit="B")


def kept_tensors(policy: str) -> dict[str, tuple[str, ...]]:
    """The tensors of a set by kind of layer; those of "" are of every kind that is not named. Raises `InputError`.

    >>> kept_tensors("keep:q,k")
    {'': ('q', 'k')}
    >>> kept_tensors("keep:block:q,gates/dense_block:q")
    {'block': ('q', 'gates'), 'dense_block': ('q',)}
    """
    found: dict[str, tuple[str, ...]] = {}
    for part in policy.removeprefix(KEEP).split(KINDS):
        kind, _, names = part.rpartition(OF_KIND)
        tensors = tuple(name for name in names.split(",") if name)
        if kind in found or (not tensors and not kind):
            raise InputError(
                f"layout: recompute is {policy!r}; names of tensors with commas between them are required, such as {KEEP}q,k,v, "
                f"or for each kind of layer once, such as {KEEP}block{OF_KIND}q,k{KINDS}dense_block{OF_KIND}q"
            )
        found[kind] = tensors
    return found


def set_named(kept: Mapping[str, Sequence[str]]) -> str:
    """The text of a set, by kind of layer as `kept_tensors` gives them.

    >>> set_named({"": ("q", "k")}), set_named({"block": ("q",), "dense_block": ()})
    ('keep:q,k', 'keep:block:q/dense_block:')
    """
    return KEEP + KINDS.join((f"{kind}{OF_KIND}" if kind else "") + ",".join(names) for kind, names in kept.items())


def of_kind(policy: str, kind: str) -> str:
    """What of a policy is about a kind of layer: the same for all kinds that it treats alike.

    >>> of_kind("keep:block:q/dense_block:", "block"), of_kind("keep:block:q/dense_block:", "dense_block")
    ('keep:q', 'full')
    """
    if not is_set(policy):
        return policy
    kept = kept_tensors(policy)
    tensors = kept.get(kind, kept.get("", ()))
    return set_named({"": tensors}) if tensors else "full"
