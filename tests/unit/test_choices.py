"""Choices by name: an unknown name is an error that lists the known ones, everywhere; no branch stands for all others.

`CHOICES` calls every public function that takes a choice by its name, and every value that has such a field. The last test
reads the sources: no choice is compared with one of its names, since the other branch would cover all other names.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from schemes import scheme_of

import shardwise as sw
from shardwise.book_formulas import rules
from shardwise.book_formulas.collective_times import idealised_s
from shardwise.book_formulas.rooflines import KERNEL_FORMS, kernel_roofline
from shardwise.book_formulas.rooflines.chip_bandwidths import ORIGINS, transfer_rates
from shardwise.book_formulas.rules.parallelism_bounds import AxisOverlap, Scheme
from shardwise.derive.sharded_einsum import shard_expression
from shardwise.derive.sharded_unit import derived_unit
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.mesh_links import place_mesh
from shardwise.hardware.network import links
from shardwise.hardware.network.compare_collective_algorithms import collective_report
from shardwise.hardware.network.links import Cut
from shardwise.hardware.network.pods import Pods, pod_collective_costs
from shardwise.hardware.network.switches import Switched, switch_collective_costs
from shardwise.hardware.network.torus import WRAP_RULES, Torus, WrapRule, torus_collective_cost
from shardwise.hardware.stacks import get_stack, stack_names
from shardwise.layout.choices import Choices
from shardwise.layout.layout import (
    CP_VARIANTS,
    OFFLOAD_TARGETS,
    OFFLOADS,
    Layout,
    Offload,
    get_cp_variant,
    get_offload_targets,
)
from shardwise.layout.sharding_scheme import ParallelMode, ShardingScheme
from shardwise.measure.calibrate.constant_fit import fold_groups
from shardwise.measure.microbenchmarks.benchmark_lines import BENCHMARK_KINDS, list_benchmark_lines
from shardwise.model.architecture import Architecture
from shardwise.model.job import OVERLAP_CONVENTIONS, Job
from shardwise.model.optimizers.definition import get_optimizer, optimizer_names
from shardwise.model.recompute_policies import get_recompute_policy, policy_names
from shardwise.model.structure import MlpKind, NormKind, NormWidth, PositionKind
from shardwise.pipeline.registry import get_schedule, in_flight_split, schedule_names, schedule_names_by_alias
from shardwise.pipeline.schedule_definition import PassSeconds
from shardwise.price import overlap
from shardwise.price.product import Objective, price_product
from shardwise.price.stage_contents import Pipeline, host_offload
from shardwise.price.unit_values import unit_values
from shardwise.run.kernels.optimizers import build_torch_optimizer
from shardwise.run.recipe import BALANCE_METHODS, TrainingRecipe
from shardwise.run.recipe import LR_SCHEDULES as RATES
from shardwise.sharding.notation import parse_expression
from shardwise.sharding.spec import Mesh
from shardwise.step.issued_collectives import count_collectives
from shardwise.step.rank_program import RankProgram
from shardwise.values.dtypes import BYTES_PER_ELEMENT, bytes_per_element
from shardwise.values.engine_policies import GRADIENT_REDUCTIONS, LOSS_KERNELS, IssuePolicy, get_loss_kernel
from shardwise.values.errors import InputError, lookup
from shardwise.values.precision import PRECISIONS, get_precision

SOURCES = Path(__file__).parents[2] / "src" / "shardwise"
PASSES = PassSeconds(1.0, 2.0, 0.5, 2.5)
GROUP = [Cut(4, 1), Cut(1, 1)]
TORUS = load_cluster("tpu-v5e:4x4").topology
PODS = load_cluster("tpu-v5e:4x4*2").topology
SWITCHED = load_cluster("h100:16").topology
assert isinstance(TORUS, Torus)
assert isinstance(PODS, Pods)
assert isinstance(SWITCHED, Switched)
SMALL = Architecture(
    name="small",
    num_layers=4,
    d_model=64,
    d_ff=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=100,
    max_positions=64,
)
JOB = Job(global_batch_tokens=2**12, seq_len=64)
TRAFFIC = {"tp": 1.0, "fsdp": 2.0}


@dataclass(frozen=True)
class Choice:
    """`call` takes a name; `names` are those that it knows."""

    call: Callable[[Any], object]
    names: tuple[str, ...]


def issues(**changes: Any) -> object:
    policy = IssuePolicy(**changes)
    program = RankProgram(architecture=SMALL, layout=Layout(), precision=get_precision("bf16"), policy=policy)
    return count_collectives(program, 2)


def pinned(name: str) -> Callable[[str], object]:
    return lambda value: Choices().with_pins({name: value}, {})


CHOICES: Mapping[str, Choice] = {
    # schedules of pipelines
    "schedule, Layout": Choice(lambda name: Layout(schedule=name), schedule_names()),
    "schedule, pin": Choice(pinned("schedule"), schedule_names()),
    "schedule, schedule_of": Choice(get_schedule, schedule_names()),
    "schedule, in_flight_split": Choice(lambda name: in_flight_split(name, 4, 8), ("zb_h1", "zb_h2", "dualpipe")),
    "schedule, pipeline_bubble_s": Choice(
        lambda name: rules.pipeline_bubble_s(name, 4, 1.0, 2.0, 0.5, 2.5), tuple(schedule_names_by_alias())
    ),
    # recomputation, context parallelism, offload
    "recompute, Layout": Choice(lambda name: Layout(recompute=name), policy_names()),
    "recompute, policy_named": Choice(get_recompute_policy, policy_names()),
    "cp_variant, Layout": Choice(lambda name: Layout(cp_variant=name), tuple(CP_VARIANTS)),
    "cp_variant, pin": Choice(pinned("cp_variant"), tuple(CP_VARIANTS)),
    "cp_variant, variant_of": Choice(get_cp_variant, tuple(CP_VARIANTS)),
    "cp_variant, with_mode": Choice(
        lambda name: ShardingScheme.unsharded(SMALL.structure).with_mode(ParallelMode(name, False, False)), tuple(CP_VARIANTS)
    ),
    "cp_variant, unit_values": Choice(
        lambda name: unit_values(SMALL, 64, {"cp": 2, "micro_batch_seqs": 1}, name), tuple(CP_VARIANTS)
    ),
    "offload, Layout": Choice(lambda name: Layout(offload=name), OFFLOADS),
    "offload, pin": Choice(pinned("offload"), OFFLOADS),
    "offload, offloaded_by": Choice(get_offload_targets, OFFLOADS),
    "offload, host_of": Choice(lambda name: host_offload(name, sw.load_chip("h100")), OFFLOADS),
    # jobs
    "loss, Job": Choice(lambda name: replace(JOB, loss=name), tuple(LOSS_KERNELS)),
    "loss, loss_named": Choice(get_loss_kernel, tuple(LOSS_KERNELS)),
    "precision, Job": Choice(lambda name: replace(JOB, precision=name), tuple(PRECISIONS)),
    "precision, precision_named": Choice(get_precision, tuple(PRECISIONS)),
    "dtype, bytes_per_element": Choice(bytes_per_element, tuple(BYTES_PER_ELEMENT)),
    "optimizer, Job": Choice(lambda name: replace(JOB, optimizer=name), optimizer_names()),
    "optimizer, optimizer_named": Choice(get_optimizer, optimizer_names()),
    "optimizer, derived_unit": Choice(
        lambda name: derived_unit(scheme_of(SMALL.structure, optimizer=name), "block"), optimizer_names()
    ),
    "optimizer, torch_optimizer": Choice(
        lambda name: build_torch_optimizer(name, [torch.nn.Parameter(torch.zeros(3))], [], {}), optimizer_names()
    ),
    "overlap, Job": Choice(lambda name: replace(JOB, overlap=name), OVERLAP_CONVENTIONS),
    "overlap, exposed_s": Choice(lambda name: overlap.exposed_s(name, 1.0, TRAFFIC), OVERLAP_CONVENTIONS),
    "overlap, exposed_by_axis": Choice(lambda name: overlap.exposed_by_axis(name, 1.0, TRAFFIC), OVERLAP_CONVENTIONS),
    "overlap, mixed_min_tokens_per_chip": Choice(
        lambda name: rules.mixed_min_tokens_per_chip(850.0, 28672, 2, 1, name), get_args(AxisOverlap)
    ),
    "overlap, mlp_layer_times": Choice(
        lambda name: rules.mlp_layer_times(1e6, 8192, 28672, 1e14, 1e11, fsdp=4, tp=4, overlap=name), get_args(AxisOverlap)
    ),
    "scheme, interconnect_intensity": Choice(
        lambda name: rules.interconnect_intensity(name, 1e6, 28672, 64), get_args(Scheme)
    ),
    # clusters
    "stack, stack_named": Choice(get_stack, stack_names()),
    "stack, load_cluster": Choice(lambda name: load_cluster("local:2", stack=name), stack_names()),
    "chip, load_chip": Choice(sw.load_chip, sw.hardware.chips.chip_names()),
    "wrap_rule, Torus": Choice(lambda name: replace(TORUS, wrap_rule=name).wraps, get_args(WrapRule)),
    # collectives
    "collective, collective_report": Choice(
        lambda name: collective_report(name, 1e6, TORUS, GROUP), links.COLLECTIVE_NAMES
    ),
    "collective, torus_cost": Choice(
        lambda name: torus_collective_cost(name, 1e6, TORUS, GROUP), links.COLLECTIVE_NAMES
    ),
    "collective, pods_costs": Choice(
        lambda name: pod_collective_costs(name, 1e6, PODS, [*GROUP, Cut(2, 1)]), links.COLLECTIVE_NAMES
    ),
    "collective, switched_costs": Choice(
        lambda name: switch_collective_costs(name, 1e6, SWITCHED, [Cut(8, 1), Cut(2, 1)]), links.COLLECTIVE_NAMES
    ),
    "collective, nccl_bytes": Choice(lambda name: links.nccl_bytes(name, 1e6, 8), links.COLLECTIVE_NAMES),
    "collective, busbw_factor": Choice(lambda name: links.busbw_factor(name, 8), links.COLLECTIVE_NAMES),
    "collective, idealised_s": Choice(
        lambda name: idealised_s(name, 1e6, 9e10), ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    ),
    # kernels and products
    "kernel, kernel_roofline": Choice(
        lambda name: kernel_roofline(sw.load_chip("h100"), name, dict.fromkeys(KERNEL_FORMS[name].letters, 8)
                                     if name in KERNEL_FORMS else {}),
        tuple(KERNEL_FORMS),
    ),
    "origin, transfers": Choice(lambda name: transfer_rates(sw.load_chip("tpu-v5e"), name), ORIGINS),
    # structures of models
    "mlp, Architecture": Choice(lambda name: replace(SMALL, mlp=name).structure.has_gated_mlp, get_args(MlpKind)),
    "norm, Architecture": Choice(lambda name: sw.num_params(replace(SMALL, norm=name)), get_args(NormKind)),
    "positions, Architecture": Choice(
        lambda name: sw.num_params(replace(SMALL, positions=name)), get_args(PositionKind)
    ),
    "qk_norm_over, Architecture": Choice(
        lambda name: sw.num_params(replace(SMALL, qk_norm=True, qk_norm_over=name)), get_args(NormWidth)
    ),
    # engines, recipes and benchmarks
    "reduction, IssuePolicy": Choice(lambda name: issues(reduction=name), GRADIENT_REDUCTIONS),
    "statistics, IssuePolicy": Choice(lambda name: issues(statistics=name), ("micro_batch", "step", "never")),
    "schedule, Recipe": Choice(lambda name: TrainingRecipe(steps=10, schedule=name).learning_rate_at(5), RATES),
    "reduction, Recipe": Choice(lambda name: TrainingRecipe(steps=10, reduction=name), GRADIENT_REDUCTIONS),
    "balance, Recipe": Choice(lambda name: TrainingRecipe(steps=10, balance=name), BALANCE_METHODS),
    "fold, fold_groups": Choice(lambda name: fold_groups([], name), ("model", "source", "lab", "three")),
    "bench, shapes": Choice(lambda name: list(list_benchmark_lines(name, "cpu", ("fp32",), 2)), BENCHMARK_KINDS),
}  # fmt: skip


@pytest.mark.parametrize("where", CHOICES)
def test_an_unknown_name_is_an_error_that_lists_the_names(where: str) -> None:
    with pytest.raises(InputError) as caught:
        CHOICES[where].call("no-such-name")
    message = str(caught.value)
    assert "no-such-name" in message
    for name in CHOICES[where].names:
        assert name in message, name


@pytest.mark.parametrize(
    ("where", "name"), [(where, name) for where, choice in CHOICES.items() for name in choice.names]
)
def test_every_name_is_known(where: str, name: str) -> None:
    CHOICES[where].call(name)


@pytest.mark.parametrize(
    ("table", "names"),
    [
        (OFFLOAD_TARGETS, get_args(Offload)),
        (overlap.CONVENTIONS, OVERLAP_CONVENTIONS), (links.NCCL_FACTORS, links.COLLECTIVE_NAMES),
        (WRAP_RULES, get_args(WrapRule)),
        (dict.fromkeys(OFFLOADS), get_args(Offload)),
    ],
)  # fmt: skip
def test_tables_have_a_row_for_every_name_and_no_other(table: Mapping[str, object], names: tuple[str, ...]) -> None:
    assert tuple(table) == names


def test_a_product_is_solved_for_a_known_objective() -> None:
    expression = parse_expression("A[I_X, J] * B[J, K] -> C[I_X, K]")
    sharded = shard_expression(expression, Mesh((("X", 4),)), {"I": 8, "J": 8, "K": 8})
    assert get_args(Objective) == ("time", "bytes")
    with pytest.raises(InputError, match="objective: found 'no-such-name'; one of time, bytes is required"):
        price_product(sharded, place_mesh(sharded.mesh, "tpu-v5e:2x2"), objective="no-such-name")  # type: ignore[arg-type]


def test_a_stage_with_an_unknown_schedule_has_no_price() -> None:
    """Regression: an unknown schedule was priced as 1F1B. Aliases are not accepted here."""
    with pytest.raises(InputError, match="schedule: found 'gpipe'; one of none, afab, 1f1b, interleaved, zb_h1"):
        get_schedule("gpipe")
    assert get_schedule("afab").bubble_s(8, 1, 8, PASSES) == get_schedule("1f1b").bubble_s(8, 1, 8, PASSES) == 21.0
    unknown = Pipeline("gpipe", 8, 1, 16)
    for ask in (
        lambda: unknown.ends,
        lambda: unknown.in_flight(0),
        lambda: unknown.awaiting_weight_grads(0),
        lambda: unknown.overlapped_rounds,
    ):
        with pytest.raises(InputError, match="schedule: found 'gpipe'"):
            ask()


def test_lookup_states_the_unknown_and_the_known_names() -> None:
    assert lookup({"a": 1, "b": 2}, "b", "letter") == 2
    with pytest.raises(InputError, match=r"^letter: found 'c'; one of a, b is required$"):
        lookup({"a": 1, "b": 2}, "c", "letter")


# Names of choices as the sources write them. `train/` and the compilers' texts use some of these words with other meanings.
NAMED = {
    "schedule", "recompute", "cp_variant", "offload", "loss", "overlap", "stack", "operation", "wrap_rule", "scheme",
    "objective", "origin", "mlp", "norm", "positions", "qk_norm_over", "precision", "fold", "optimizer",
}  # fmt: skip
# "none" is the absence of a choice, not one of its names.
ABSENT = {"none"}
ALLOWED = {
    ("search/explain/playbook_steps.py", "recompute"), ("layout/choices.py", "recompute"),
    ("hardware/network/compare_collective_algorithms.py", "operation"), ("present/verbs/rooflines_and_rules.py", "origin"),
    ("measure/calibrate/constant_fit.py", "fold"), ("measure/calibrate/published_fit.py", "fold"),
    ("run/trainer/preflight.py", "recompute"), ("run/engine/micro_batch.py", "positions"),
    ("run/numpy/step.py", "loss"), ("measure/calibrate/user_runs.py", "recompute"),
    # a command without the flag of the default; a rule of a single kind of norm
    ("present/explorer/copy_as.py", "precision"),
    # an AllReduce crosses a level twice, gathers and scatters once; functions with separate weights
    ("hardware/network/switches.py", "operation"), ("model/decoder_block.py", "mlp"),
}  # fmt: skip


def word(node: ast.expr) -> str:
    """The last word of a name, an attribute or a key."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return name
        case _:
            return ""


def literals(node: ast.expr) -> set[str]:
    items = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return {item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)}


def find_comparisons(text: str) -> set[tuple[str, str]]:
    """Choices that a source compares with one of their names, and the name."""
    comparisons = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare) and word(node.left) in NAMED:
            comparisons |= {
                (word(node.left), name) for comparator in node.comparators for name in literals(comparator) - ABSENT
            }
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "get"
            and len(node.args) == 2
        ):
            comparisons |= {(name, "get with a default") for name in {word(node.args[0])} & NAMED}
    return comparisons


def test_no_choice_is_compared_with_a_name() -> None:
    """With a comparison, one branch stands for all other names; tables and `match` have a row for each. Launches of other
    frameworks are exempt: choices without an equivalent there are lost when they are read back, and are refused
    (`interop.launches.translate_launch.refusals`)."""
    comparisons = {
        (path.relative_to(SOURCES).as_posix(), choice, name)
        for path in SOURCES.rglob("*.py")
        if not {SOURCES / "interop" / "launches", SOURCES / "interop" / "frameworks"} & set(path.parents)
        for choice, name in find_comparisons(path.read_text(encoding="utf-8"))
    }
    assert {comparison for comparison in comparisons if comparison[:2] not in ALLOWED} == set()


def test_comparisons_in_sources_are_detected() -> None:
    assert find_comparisons('x = 1 if layout.schedule == "zb_h1" else 2') == {("schedule", "zb_h1")}
    assert find_comparisons('x = d["overlap"] in ("sum", "max")') == {("overlap", "sum"), ("overlap", "max")}
    assert find_comparisons('x = {"a": 1}.get(schedule, 1)') == {("schedule", "get with a default")}
    assert find_comparisons('x = layout.offload != "none"') == set()
