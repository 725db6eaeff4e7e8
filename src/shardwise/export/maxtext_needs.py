"""What MaxText asks of a launch beside what its stacks' abilities say.

Source: MaxText at e591f30 (2026-08-22), src/maxtext/configs/types.py, set_derived_and_validate_values; base.yml,
logical_axis_rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from shardwise.export.launch import Launch
from shardwise.export.maxtext_mesh import say_mesh, slices, spans_slices
from shardwise.export.maxtext_model import block_of, num_blocks
from shardwise.export.target import Need
from shardwise.layout.context import variant_of

AT_ONCE = ("fp8_delayed",)  # precisions whose scales gradient accumulation does not carry on


def num_micro_batches(launch: Launch) -> int:
    """Micro-batches of a replica in a step."""
    layout = launch.layout
    return launch.job.num_seqs // (layout.num_replicas * layout.micro_batch_seqs)


def _rings(launch: Launch) -> bool:
    return launch.layout.cp > 1 and variant_of(launch.layout.cp_variant).ring


def _exchanges(launch: Launch) -> bool:
    return launch.layout.cp > 1 and variant_of(launch.layout.cp_variant).exchanges_heads


def _mesh_devices(launch: Launch) -> int:
    return math.prod(degree for name, degree in say_mesh(launch).items() if name.endswith("_parallelism"))


COMMON = (
    Need(
        lambda launch: spans_slices(launch) and _mesh_devices(launch) == launch.machines.num_devices,
        lambda launch: f"the axes of {launch.layout} do not divide evenly over the {slices(launch.machines)} slices",
    ),
    Need(
        lambda launch: launch.job.num_seqs % (launch.layout.num_replicas * launch.layout.micro_batch_seqs) == 0,
        lambda launch: (
            f"a batch of {launch.job.num_seqs} sequences is not a multiple of micro_batch_seqs × replicas = "
            f"{launch.layout.num_replicas * launch.layout.micro_batch_seqs}"
        ),
    ),
    Need(
        lambda launch: launch.layout.zero_stage != 1 or launch.layout.dp == 1,
        lambda launch: (
            f"shard_optimizer_over_data is of all replicas, found dp = {launch.layout.dp} beside fsdp = "
            f"{launch.layout.fsdp}; set dp=1"
        ),
    ),
    Need(
        lambda launch: launch.layout.pp == 1 or num_micro_batches(launch) % launch.layout.pp == 0,
        lambda launch: (
            f"the {num_micro_batches(launch)} micro-batches of a pipeline are not a multiple of its {launch.layout.pp} stages"
        ),
    ),
    Need(
        lambda launch: (
            launch.layout.pp == 1
            or num_blocks(launch.model) % (launch.layout.pp * launch.layout.num_virtual_stages) == 0
        ),
        lambda launch: (
            f"the {num_blocks(launch.model)} decoder layers of {block_of(launch.model)} do not divide evenly over "
            f"{launch.layout.pp * launch.layout.num_virtual_stages} stages; set pp=1, or a divisor of {num_blocks(launch.model)}"
        ),
    ),
    Need(
        lambda launch: launch.layout.pp == 1 or not launch.model.num_dense_layers,
        lambda launch: (
            f"the {launch.model.num_dense_layers} leading dense layers are outside of the pipeline; set pp=1"
        ),
    ),
    Need(
        lambda launch: not (launch.model.sinks and (_rings(launch) or _exchanges(launch))),
        lambda launch: "attention with sinks goes neither in rings nor by exchanging heads; set cp_variant=all_gather",
    ),
    Need(
        lambda launch: not _rings(launch) or launch.model.sliding_window is None,
        lambda launch: "attention with windows does not go in rings; set cp_variant=all_gather",
    ),
)
OF_TPU = (
    Need(
        lambda launch: not _rings(launch) or launch.job.seq_len % launch.layout.cp**2 == 0,
        lambda launch: f"a ring asks for sequences that cp² = {launch.layout.cp**2} divides, found {launch.job.seq_len}",
    ),
    Need(
        lambda launch: not _rings(launch) or not launch.model.num_predict_layers,
        lambda launch: "a balanced ring does not go with multi-token prediction; set cp_variant=all_gather",
    ),
    Need(
        lambda launch: not _exchanges(launch)
        or (launch.model.kv_lora_rank == 0 and launch.model.sliding_window is None),
        lambda launch: "exchanging heads goes with global attention alone; set cp_variant=all_gather",
    ),
)  # fmt: skip
OF_GPU = (
    Need(
        lambda launch: not _exchanges(launch),
        lambda launch: "MaxText exchanges heads on TPUs alone; set cp_variant=all_gather or zigzag",
    ),
    Need(
        lambda launch: launch.job.precision not in AT_ONCE or launch.layout.pp > 1 or num_micro_batches(launch) == 1,
        lambda launch: (
            "fp8 with delayed scaling does not go with gradient accumulation; take a larger micro-batch or fp8_current"
        ),
    ),
)
NEEDS: Mapping[str, tuple[Need, ...]] = {"tpu": (*COMMON, *OF_TPU), "gpu": (*COMMON, *OF_GPU)}
