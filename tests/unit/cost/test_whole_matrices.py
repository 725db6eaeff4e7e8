"""Updates of whole matrices: each device updates the matrices that it has a part of, and the fullest device is priced."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.price.layout_pricer import Pricing
from shardwise.price.problem import Problem
from shardwise.price.roofline import chip_rates
from shardwise.price.unit_cost import UnitPricer
from shardwise.price.unit_inputs import largest_update_share, unit_cost_inputs
from shardwise.step.parameters import ParameterGroup
from shardwise.step.rank_program import RankProgram
from shardwise.values.engine_policies import IssuePolicy
from shardwise.values.precision import get_precision

DENSE = Architecture(
    name="dense", num_layers=2, d_model=24, d_ff=40, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=96
)
MODELS = {"dense": DENSE, "experts": replace(DENSE, num_experts=4, experts_per_token=2)}
POLICY = IssuePolicy(bucket_bytes=4096)  # of which the largest matrix alone fills more than one


def instance(model: str, layout: Layout, optimizer: str = "muon") -> RankProgram:
    return RankProgram(
        architecture=MODELS[model], layout=layout, precision=get_precision("bf16"), policy=POLICY, optimizer=optimizer
    )


def flops(group: ParameterGroup, device: int) -> float:
    """FLOPs of the Newton-Schulz steps of all matrices that a device has a part of."""
    begin, total = device * group.shard_size, 0.0
    for member in group.members:
        if member.start < begin + group.shard_size and member.stop > begin:
            matrix = member.parameter.matrix
            assert matrix is not None
            num_stacked, border = len(matrix.stack), len(matrix.stack) + len(matrix.rows)
            rows, columns = prod(member.global_shape[num_stacked:border]), prod(member.global_shape[border:])
            shorter = min(rows, columns)
            total += prod(member.shape[:num_stacked]) * 5 * (4 * shorter * rows * columns + 2 * shorter**3)
    return total


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", [Layout(fsdp=n, zero_stage=zero) for n in (2, 3, 7, 64) for zero in (1, 3)]
                         + [Layout(fsdp=2, tp=2, zero_stage=2), Layout(dp=2, fsdp=4, zero_stage=1)], ids=str)  # fmt: skip
def test_the_fullest_device_is_priced(model: str, layout: Layout) -> None:
    """Compare with a count over all devices; arrays of a unit's matrices are not cut into buckets under any stage."""
    program = instance(model, layout)
    arrays = unit_cost_inputs(program.scheme, "block", POLICY).arrays
    groups = [group for group in program.groups if group.path == "layers.0" and group.members[0].parameter.matrix]
    fullest = sum(max(flops(group, device) for device in range(group.num_shards)) for group in groups)
    every = sum(flops(replace(group, num_shards=1), 0) for group in groups)
    assert largest_update_share(arrays, program.values) == pytest.approx(fullest / every)
    assert fullest < every


def test_the_largest_share_equals_the_priced_work() -> None:
    program = instance("dense", Layout(fsdp=7, zero_stage=1))
    rates = chip_rates(load_cluster("h100:8").chip, None)
    pricer = UnitPricer(replace(rates, policy=POLICY), program.precision, optimizer="muon")
    parts = pricer.parts(program.scheme, "block")
    matrix_kernels = [kernel for kernel in parts.kernels if kernel.kind == "of_matrix"]
    priced = sum(pricer.work(kernel, parts, program.values).flops for kernel in matrix_kernels)
    share = largest_update_share(parts.arrays, program.values)
    assert 0 < share < 1
    assert priced == pytest.approx(share * sum(kernel.flops.evaluate(program.values) for kernel in matrix_kernels))


def test_without_sharding_every_device_updates_all_matrices() -> None:
    program = instance("dense", Layout(dp=4, zero_stage=0))
    assert largest_update_share(unit_cost_inputs(program.scheme, "block", POLICY).arrays, program.values) == 1.0


def test_every_device_computes_the_state_of_sides() -> None:
    """Shampoo's squares and roots are kept wherever the matrix is used: only the step itself is made in parts."""
    program = instance("dense", Layout(fsdp=4, zero_stage=1), "shampoo")
    kernels = unit_cost_inputs(program.scheme, "block", POLICY).kernels
    in_part = {kernel.outputs[0].rpartition(".")[2] for kernel in kernels if kernel.shape.owned_matrices_only}
    assert in_part == {"preconditioned'"}


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "shampoo"])
def test_the_update_is_left_out_of_the_hardware_ratio(optimizer: str) -> None:
    """The ratio compares the passes of micro-batches, in which all optimizers run the same."""
    job = Job(global_batch_tokens=2**19, seq_len=4096, optimizer=optimizer)
    pricing = Pricing(Problem(load_model("llama-3.2-1b"), load_cluster("h100:8"), job), Layout(fsdp=8, zero_stage=3))
    updates = [k for k in pricing.pricer.parts(pricing.scheme, "block").kernels if k.phase == "update"]
    assert any(k.flops.evaluate(pricing.values) for k in updates) == (optimizer != "adamw")
    assert pricing.pricer.flops("block", pricing.scheme, pricing.values).keys() == {"forward", "backward"}
    assert pricing.hardware_ratio() == 1.0163286133435387
