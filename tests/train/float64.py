"""Plans of small models in float64, which no hardware trains in: runs on any layout are then equal, but for the order of sums."""

from __future__ import annotations

from dataclasses import replace

from train.stand_in import SEQ_LEN, VOCAB

from shardwise.hardware.cluster import Cluster
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.search.plan import Plan, plan_layout
from shardwise.values import precision
from shardwise.verify.training.training_case import FP64

DENSE = Architecture(
    name="dense", num_layers=2, d_model=32, d_ff=64, num_heads=2, num_kv_heads=2, head_dim=16, vocab_size=VOCAB
)
EXPERTS = replace(DENSE, name="experts", d_ff=32, num_experts=4, experts_per_token=2)
SAME = 1e-10  # on another layout, whose sums have another order


def register() -> None:
    """Float64 is a recipe of this process, and none of the catalogue."""
    precision.PRECISIONS.setdefault("fp64", FP64)


def host(devices: int) -> Cluster:
    """Processes of this machine, as a machine of its own that has a rate in float64."""
    cluster = load_cluster(f"local:{devices}")
    peaks = dict(cluster.chip.peak_flops_per_s)
    chip = replace(cluster.chip, name="host", peak_flops_per_s={**peaks, "fp64": peaks["fp32"] / 2})
    return replace(cluster, chip=chip)


def make_plan(model: Architecture, layout: Layout, num_seqs: int) -> Plan:
    """A plan of the model with a global batch of so many sequences."""
    register()
    job = Job(global_batch_tokens=num_seqs * SEQ_LEN, seq_len=SEQ_LEN, precision="fp64")
    return plan_layout(model, host(layout.num_devices), job, layout)
