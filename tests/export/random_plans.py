"""Random plans with pins under a software stack: models of the catalogue on clusters, with choices that the user fixes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from shardwise.hardware import get_stack
from shardwise.interop.frameworks.targets import TARGETS, require_launchable, require_stack_model
from shardwise.interop.launches.launch import launch_from_plan
from shardwise.interop.launches.translate_launch import choose_precision, refusals
from shardwise.layout import choices_from_pins
from shardwise.model import load_model, model_names, num_params
from shardwise.price.problem import resolve_problem
from shardwise.search import make_plan
from shardwise.search.nearest_to_pins import naming_nearest
from shardwise.values import InputError, NothingFitsError

CLUSTERS = {
    "GPU": ("h100:8", "h100:16", "h100:32", "h100:64", "b200:16", "a100-80gb:32"),
    "TPU": ("tpu-v5p:2x2x2", "tpu-v5p:2x2x4", "tpu-v5p:4x4x4", "tpu-v6e:4x4", "tpu-v6e:8x8"),
}
MAX_PARAMS = {8: 9e9, 16: 16e9, 32: 40e9, 64: 80e9}  # by devices: larger models fit under few pins
PIN_VALUES: Mapping[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4, 8), "pp": (1, 2, 4, 8), "cp": (1, 2, 4), "ep": (1, 2, 4, 8), "dp": (1, 2, 4), "zero_stage": (0, 1, 2, 3),
    "micro_batch_seqs": (1, 2, 4), "num_virtual_stages": (1, 2, 4), "sequence_parallel": (False, True),
    "async_tp": (False, True), "recompute": ("none", "full", "selective", "alternate", "core_attn"),
    "schedule": ("1f1b", "interleaved", "afab", "interleaved_zb", "zb_v", "looped_bfs", "dualpipe_v"),
    "cp_variant": ("zigzag", "all_gather", "ulysses"), "offload": ("none", "optimizer", "activations"),
}  # fmt: skip


class PinnedProblem(NamedTuple):
    """Arguments of `plan` with the stack and some choices fixed."""

    model: str
    cluster: str
    stack: str
    seq_len: int
    global_batch_tokens: int
    pins: Mapping[str, Any]

    def __str__(self) -> str:
        pins = "".join(f" --pin {name}={str(value).lower()}" for name, value in self.pins.items())
        return (
            f"plan {self.model} {self.cluster} --stack {self.stack} --seq-len {self.seq_len} --batch-tokens "
            f"{self.global_batch_tokens}{pins}"
        )


@cache
def model_sizes() -> Mapping[str, float]:
    """Parameters of each model of the catalogue."""
    return {name: num_params(load_model(name)) for name in model_names()}


def random_problems(stack: str, seed: int) -> Iterator[PinnedProblem]:
    """Problems without an end, of models that may fit on their cluster."""
    rng = random.Random(f"{stack} {seed}")
    clusters = CLUSTERS["GPU" if "GPU" in get_stack(stack).platforms else "TPU"]
    while True:
        cluster = rng.choice(clusters)
        devices = _num_devices(cluster)
        model = rng.choice([name for name, params in model_sizes().items() if params <= MAX_PARAMS[devices]])
        seq_len = rng.choice((1024, 2048, 4096))
        names = rng.sample(sorted(PIN_VALUES), rng.choice((1, 2, 2, 3)))
        pins = {name: rng.choice(PIN_VALUES[name]) for name in names}
        batch = seq_len * devices * rng.choice((1, 2, 4, 8))
        yield PinnedProblem(model, cluster, stack, seq_len, batch, pins)


def _num_devices(cluster: str) -> int:
    product = 1
    for size in cluster.partition(":")[2].split("x"):
        product *= int(size)
    return product


class Outcome(NamedTuple):
    """What became of a problem: "exported", or "lost" of a plan that no framework of its stack runs; "refused" before the
    search or "refused after" it, with the nearest that the stack runs; "unnamed" without it; "full" where nothing fits."""

    kind: str
    text: str = ""


def judge_problem(problem: PinnedProblem) -> Outcome:
    """Plan a problem and export the plan to the framework of its stack."""
    fields = {"seq_len": problem.seq_len, "global_batch_tokens": problem.global_batch_tokens, "stack": problem.stack}
    try:
        inputs = resolve_problem(problem.model, [problem.cluster], fields=fields)
    except InputError as error:
        return Outcome("invalid", str(error))
    try:
        require_stack_model(inputs.problem)
        choices = choices_from_pins(problem.pins, {})
        with naming_nearest(inputs.problem, choices):
            plan = make_plan(inputs.problem, choices=choices, elsewhere=False)
    except NothingFitsError as error:
        if not str(error).startswith("no legal layout"):
            return Outcome("full", str(error))
        return _refused(error)
    except InputError as error:
        return _refused(error)
    try:
        require_launchable(plan)
    except InputError as error:
        refused = _refused(error)
        return refused._replace(kind="refused after") if refused.kind == "refused" else refused
    targets = [target for target in TARGETS.values() if target.stack == problem.stack]
    launch, reasons = launch_from_plan(plan), list[str]()
    for target in targets:
        problems = refusals(choose_precision(launch, target), target)
        if not problems:
            return Outcome("exported")
        reasons += [f"{target.name}: {text}" for text in problems]
    return Outcome("lost", f"{plan.layout}: {'; '.join(reasons)}")


def _refused(error: InputError | NothingFitsError) -> Outcome:
    """The outcome of a problem that the stack does not run: "refused" with the nearest that it runs, else "unnamed"."""
    text = str(error)
    return Outcome("refused" if "the nearest" in text else "unnamed", text)
