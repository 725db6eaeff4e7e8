"""A layout of which only some choices are said: the others as a search chooses them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import Any

from shardwise.cluster.cluster import Cluster
from shardwise.errors import InputError, NothingFitsError
from shardwise.job import Job
from shardwise.layout.layout import Layout
from shardwise.layout.text import layout_of
from shardwise.model.architecture import Architecture
from shardwise.planning.abilities import as_run, stack_of
from shardwise.search.choices import FACTORED, PINNABLE, Choices
from shardwise.search.search import search

APART = ("etp", "layers_per_stage", "placement")  # fields of a layout that no search pins
OF_STAGES = ("num_virtual_stages", "schedule")  # what layers per stage decide together with


def filled(architecture: Architecture, cluster: Cluster, job: Job, said: Mapping[str, Any]) -> Layout:
    """The fastest layout with some choices said: of those that fit, or else that with the least memory.

    Degrees that are left out are 1 where the others are all devices. Where no legal layout has the choices, the others are
    natural ones (`layout_of`), and whoever prices it says what is wrong.

    >>> import shardwise as sw
    >>> cluster = sw.load_cluster("h100:16", stack="megatron")
    >>> job = sw.Job(global_batch_tokens=2**20, seq_len=4096)
    >>> found = filled(sw.load_model("llama-3-8b"), cluster, job, {"tp": 4, "fsdp": 4})
    >>> (found.tp, found.fsdp, found.pp), found.micro_batch_seqs > 1
    ((4, 4, 1), True)
    """
    pins = {name: value for name, value in said.items() if name in PINNABLE and value is not None}
    if prod(said.get(axis, 1) for axis in FACTORED) == cluster.num_devices:
        pins = {**dict.fromkeys(FACTORED, 1), **pins}
    if "layers_per_stage" in said:
        pins = {**{name: getattr(layout_of(said), name) for name in OF_STAGES}, **pins}
    found = _searched(architecture, cluster, job, pins)
    layout = layout_of(said) if found is None else replace(found, placement=None)
    apart = {name: said[name] for name in APART if name in said}
    return as_run(stack_of(cluster), replace(layout, **apart))


def _searched(architecture: Architecture, cluster: Cluster, job: Job, pins: Mapping[str, Any]) -> Layout | None:
    """The best layout within the pins; None where there is none."""
    try:
        choices = Choices().narrowed(pins, {})
        with suppress(InputError):  # of what the stack does not run the others are of any stack
            choices = choices.of_stack(stack_of(cluster), architecture, replace(job, loss=None), cluster.domain)
        found = search(architecture, cluster, job, choices=choices, top=1)
    except (InputError, NothingFitsError):
        return None
    return found.best[0].layout if found.best else found.leanest.layout


def chosen_for(layout: Layout, said: Mapping[str, Any]) -> str:
    """The choices of a filled layout that were not said, as its text has them."""
    return " ".join(word for word in str(layout).split() if word.partition("=")[0] not in said)
