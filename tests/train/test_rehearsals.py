"""One rank of a world of any size, run without the others: it issues and holds what is planned, and differences are
reported.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

import shardwise as sw
from shardwise.hardware.published_constants import published_calibration, with_calibration
from shardwise.hardware.stacks import get_stack
from shardwise.layout.layout import Layout
from shardwise.measure.reconcile.reconciliation import REHEARSAL_TOLERANCE, Rehearsal, cast_remarks, compare_rehearsal
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.run.kernels.attention import Attention
from shardwise.run.parallel.flat_parameters import FlatParameterGroup
from shardwise.run.parallel.mesh_collectives import MeshCollectives
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.engine_prediction import engine_instance
from shardwise.run.trainer.rehearsal import MAX_MICRO_BATCHES, rehearse_rank
from shardwise.search.plan import Plan, plan_layout
from shardwise.step.issued_collectives import count_collectives
from shardwise.values.errors import InputError

DENSE: dict[str, Any] = {
    "name": "dense", "num_layers": 4, "d_model": 512, "d_ff": 1408, "num_heads": 16, "num_kv_heads": 4, "head_dim": 32,
    "vocab_size": 6144,
}  # fmt: skip
MOE: dict[str, Any] = {**DENSE, "name": "moe", "d_ff": 256, "num_experts": 16, "experts_per_token": 4}
PREDICTING: dict[str, Any] = {
    **MOE,
    "name": "predicting",
    "num_dense_layers": 1,
    "dense_d_ff": 704,
    "num_predict_layers": 1,
}
LATENT: dict[str, Any] = {
    **PREDICTING, "name": "latent", "num_kv_heads": 16, "kv_lora_rank": 64, "rope_head_dim": 16, "v_head_dim": 32,
    "q_lora_rank": 96, "num_predict_layers": 0, "shared_expert_width": 128,
}  # fmt: skip
TIED: dict[str, Any] = {
    "name": "tied", "num_layers": 2, "d_model": 64, "d_ff": 256, "num_heads": 4, "num_kv_heads": 4, "head_dim": 16, "mlp": "gelu",
    "norm": "layer", "positions": "learned", "max_positions": 4096, "tied_embeddings": True,
    "vocab_size": 4096,
}  # fmt: skip
UNEVEN: dict[str, Any] = {**DENSE, "name": "uneven", "d_model": 160, "d_ff": 333}
SEQ_LEN = 512
CASES: dict[str, tuple[dict[str, Any], Layout]] = {
    "dp": (DENSE, Layout(dp=256, micro_batch_seqs=2)),
    "zero 1": (DENSE, Layout(fsdp=128, dp=2, zero_stage=1)),
    "zero 2": (DENSE, Layout(fsdp=128, dp=2, zero_stage=2)),
    "zero 3": (DENSE, Layout(fsdp=256, zero_stage=3, recompute="full")),
    "tp and zero 3": (DENSE, Layout(tp=4, fsdp=64, zero_stage=3, sequence_parallel=True, recompute="selective")),
    "plain tp and more ranks than key-value heads": (DENSE, Layout(tp=8, fsdp=32, zero_stage=2)),
    "cp in a ring": (DENSE, Layout(cp=8, cp_variant="zigzag", fsdp=32, zero_stage=3)),
    "cp with gathered keys, tp and fsdp": (
        DENSE, Layout(cp=4, tp=4, fsdp=16, zero_stage=3, sequence_parallel=True)
    ),
    "ulysses": (DENSE, Layout(cp=4, cp_variant="ulysses", fsdp=64, zero_stage=3)),
    "ep": (MOE, Layout(ep=8, fsdp=256, zero_stage=3)),
    "ep and zero 1": (MOE, Layout(ep=4, fsdp=128, zero_stage=1, micro_batch_seqs=2)),
    "whole experts, of tokens that all ranks of tp have": (
        {**MOE, "vocab_size": 32768}, Layout(ep=8, etp=1, tp=2, fsdp=64, zero_stage=3, micro_batch_seqs=2)
    ),
    "ep, tp and cp": (LATENT, Layout(ep=8, tp=2, cp=2, fsdp=32, zero_stage=3, sequence_parallel=True)),
    "tied, with a table of positions that is not": (TIED, Layout(fsdp=128, zero_stage=3)),
    "tied, without ZeRO": (TIED, Layout(dp=128)),
    "a vocabulary that tp does not divide": (
        {**DENSE, "vocab_size": 6143}, Layout(tp=4, fsdp=64, zero_stage=3, sequence_parallel=True, recompute="selective")
    ),
    "a tied vocabulary that tp does not divide": ({**TIED, "vocab_size": 4097}, Layout(tp=4, dp=32)),
    "dims that no number of ranks divides": (UNEVEN, Layout(fsdp=384, zero_stage=3)),
    "tp, and several sequences that are laid out anew": (
        DENSE, Layout(tp=4, fsdp=64, zero_stage=1, sequence_parallel=True, micro_batch_seqs=4)
    ),
    "tp in pieces": (
        DENSE, Layout(tp=4, fsdp=64, zero_stage=3, sequence_parallel=True, async_tp=True, recompute="selective")
    ),
    "tp in pieces, and several sequences": (
        DENSE, Layout(tp=8, fsdp=32, zero_stage=1, sequence_parallel=True, async_tp=True, micro_batch_seqs=4)
    ),
    "tp in pieces, that are put together where they are made again": (
        {**DENSE, "vocab_size": 64},
        Layout(tp=8, fsdp=32, zero_stage=1, sequence_parallel=True, async_tp=True, micro_batch_seqs=16, recompute="full"),
    ),
    "layers whose gradients are more than the head's": (
        {**DENSE, "vocab_size": 64, "d_ff": 4096, "name": "few words"}, Layout(fsdp=128, zero_stage=2, recompute="full")
    ),
    "multi-token prediction": (PREDICTING, Layout(ep=8, fsdp=128, zero_stage=3)),
}  # fmt: skip
# What stages exchange is held until the other stage's answer shows that it has come: by the first stages the longest.
PIPELINES: dict[str, Layout] = {
    "1f1b": Layout(pp=4, fsdp=8, schedule="1f1b", zero_stage=1),
    "interleaved, with tp": Layout(
        pp=2, tp=4, fsdp=4, num_virtual_stages=2, schedule="interleaved", zero_stage=1, sequence_parallel=True
    ),
    "zero bubble": Layout(pp=4, fsdp=8, schedule="zb_h1", zero_stage=1, recompute="selective"),
}
STATE = ("parameters", "gradients", "master", "optimizer", "activations")


def make_plan(architecture: dict[str, Any], layout: Layout, *, num_micro_batches: int = 2, **job: Any) -> Plan:
    model = Architecture(**architecture)
    num_seqs = layout.num_replicas * layout.micro_batch_seqs * num_micro_batches
    training_job = Job(global_batch_tokens=num_seqs * SEQ_LEN, seq_len=SEQ_LEN, loss="in_place", **job)
    return plan_layout(model, sw.load_cluster(f"h100:{layout.num_devices}"), training_job, layout)


def rehearse(plan: Plan, rank: int = 0, **recipe: Any) -> Rehearsal:
    training_recipe = TrainingRecipe(steps=1, **recipe)
    return compare_rehearsal(plan, training_recipe, rehearse_rank(plan, training_recipe, rank))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("rank", [0, 31])
@pytest.mark.parametrize("name", PIPELINES)
def test_the_first_and_the_last_stage_save_what_is_planned(name: str, rank: int) -> None:
    rehearsal = rehearse(make_plan(DENSE, PIPELINES[name], num_micro_batches=8), rank=rank)
    assert rehearsal.collectives.equal, rehearsal.collectives.miscounted
    (activations,) = (term for term in rehearsal.memory.terms if term.name == "activations")
    assert activations.is_within(REHEARSAL_TOLERANCE), activations


@pytest.mark.thinned(6)
@pytest.mark.parametrize("name", CASES)
def test_a_rank_issues_the_list_and_holds_what_is_planned(name: str) -> None:
    architecture, layout = CASES[name]
    rehearsal = rehearse(make_plan(architecture, layout), rank=77)
    assert rehearsal.collectives.found > 0
    assert rehearsal.collectives.equal, rehearsal.collectives.miscounted
    assert {term.name for term in rehearsal.terms} >= {*STATE, "peak"}
    assert rehearsal.failed_terms == ()


@pytest.mark.thinned(8)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        (Layout(fsdp=8, zero_stage=2), 0),
        (Layout(fsdp=8, zero_stage=3), 0),
        (Layout(pp=2, fsdp=4, schedule="1f1b", zero_stage=2), 0),
        (Layout(pp=2, fsdp=4, schedule="1f1b", zero_stage=2), 7),
        (Layout(pp=2, fsdp=4, schedule="1f1b", zero_stage=3), 0),
        (Layout(pp=2, fsdp=4, schedule="1f1b", zero_stage=3), 7),
    ],
)
@pytest.mark.parametrize("vocab_size", [6144, 65536])
def test_gathered_bytes_at_the_peak_equal_the_plan(vocab_size: int, layout: Layout, rank: int, *, tied: bool) -> None:
    """Gradients of a tied head stay whole until the embedding's are there, if the stage has it; those of another arrive when its
    weights have left. A stage without a head has neither; with many words its peak is where the embedding's arrive."""
    model = {**DENSE, "vocab_size": vocab_size, "tied_embeddings": tied}
    rehearsal = rehearse(make_plan(model, layout, num_micro_batches=4), rank=rank)
    (gathered,) = (term for term in rehearsal.terms if term.name == "gathered")
    assert gathered.predicted
    assert gathered.is_within(1e-3), gathered
    (peak,) = (term for term in rehearsal.terms if term.name == "peak")
    assert peak.is_within(REHEARSAL_TOLERANCE if layout.pp > 1 else 1e-3), peak


NARROW: dict[str, tuple[dict[str, Any], Layout]] = {
    "fp8_delayed": (DENSE, Layout(tp=4, fsdp=64, zero_stage=3, sequence_parallel=True)),
    "fp8_blockwise": (DENSE, Layout(fsdp=128, zero_stage=1, recompute="selective")),
    "fp8_deepseek_v3": (MOE, Layout(tp=8, ep=8, etp=1, dp=2, sequence_parallel=True)),
    "fp8_nanotron": (DENSE, Layout(tp=4, dp=8, sequence_parallel=True)),
}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", NARROW)
def test_operands_of_narrow_products_are_kept_as_they_are(name: str) -> None:
    """Which a plan of Shardwise's own stack says too; that of software that keeps casts is no price of a run of `train`."""
    architecture, layout = NARROW[name]
    plan = make_plan(architecture, layout, precision=name)
    rehearsal = rehearse(plan, rank=5)
    assert rehearsal.collectives.equal, rehearsal.collectives.miscounted
    # Emulated products of a small model have more workspace than what it saves, and so their peak is elsewhere.
    assert {term.name for term in rehearsal.failed_terms} <= {"peak", "gathered"}
    (remark,) = rehearsal.remarks
    assert "keeps what products in fp8 take as it is" in remark
    (activations,) = (term for term in rehearsal.terms if term.name == "activations")
    assert activations.predicted != pytest.approx(plan.estimate.memory["activations"], rel=REHEARSAL_TOLERANCE)
    cluster = with_calibration(plan.cluster, published_calibration("h100", get_stack("shardwise")))
    cast_plan = plan_layout(plan.model, cluster, plan.job, layout)
    assert cast_plan.estimate.memory["activations"] == activations.predicted
    assert list(cast_remarks(cast_plan, TrainingRecipe(steps=1))) == []


def test_llama_3_8b_on_1024_ranks() -> None:
    layout = Layout(tp=8, fsdp=128, zero_stage=3, sequence_parallel=True, micro_batch_seqs=2, recompute="selective")
    job = Job(global_batch_tokens=2**21, seq_len=8192, loss="in_place")
    plan = plan_layout(sw.load_model("llama-3-8b"), sw.load_cluster("h100:1024"), job, layout)
    rehearsal = rehearse(plan, rank=1000)
    assert rehearsal.ok, rehearsal
    assert (rehearsal.ranks, rehearsal.rehearsed.rank, rehearsal.rehearsed.num_micro_batches) == (1024, 1000, 1)
    assert rehearsal.collectives.found == 561
    assert (
        engine_instance(plan, TrainingRecipe(steps=1)).local_vocab_size == 128256 // 8
    )  # by which logits are told from workspace
    (logits,) = (term for term in rehearsal.terms if term.name == "logits")
    assert logits.compared_bytes == logits.predicted == 2 * 8192 * 128256 // 8 * 2


def test_only_some_of_many_micro_batches_are_rehearsed() -> None:
    plan = make_plan(DENSE, Layout(dp=128, tp=2), num_micro_batches=64)
    rehearsal = rehearse(plan)
    assert (rehearsal.rehearsed.num_micro_batches, rehearsal.planned_micro_batches) == (MAX_MICRO_BATCHES, 64)
    assert rehearsal.collectives.equal


@pytest.mark.parametrize("recipe", [{"reduction": "after"}, {"bucket_bytes": 2**20}, {"respect_documents": True}])
def test_a_recipe_changes_what_is_planned_and_what_is_done_alike(recipe: dict[str, Any]) -> None:
    plan = make_plan(DENSE, Layout(dp=128, tp=2))
    assert rehearse(plan, **recipe).collectives.equal
    changed, usual = (
        count_collectives(engine_instance(plan, TrainingRecipe(steps=1, **changes)), 2) for changes in (recipe, {})
    )
    assert (changed != usual) == ("bucket_bytes" in recipe)


@pytest.mark.parametrize("rank", [0, 100, 255])
def test_the_groups_of_a_rank_are_those_of_the_whole_world(rank: int) -> None:
    layout = Layout(tp=4, cp=2, fsdp=32, zero_stage=3, sequence_parallel=True)
    plan = make_plan(DENSE, layout)
    rehearsal, mesh = (
        rehearse_rank(plan, TrainingRecipe(steps=1), rank),
        engine_instance(plan, TrainingRecipe(steps=1)).mesh,
    )
    coordinates = list(mesh.coordinates())
    assert rehearsal.coordinate == coordinates[rank]
    assert len(rehearsal.groups) > 2
    for axes, ranks in rehearsal.groups.items():
        alike = [
            peer for peer, at in enumerate(coordinates)
            if all(at[axis] == coordinates[rank][axis] for axis in mesh.names if axis not in axes)
        ]  # fmt: skip
        assert list(ranks) == sorted(alike, key=lambda peer: mesh.position(coordinates[peer], axes))


def test_a_rehearsal_leaves_no_state_behind() -> None:
    rehearse_rank(make_plan(DENSE, Layout(dp=2)), TrainingRecipe(steps=1), 1)
    assert not dist.is_initialized()


@pytest.mark.parametrize("rank", [-1, 256])
def test_an_unknown_rank_is_refused(rank: int) -> None:
    with pytest.raises(InputError, match=f"rank: found {rank}; the plan's ranks are 0 to 255"):
        rehearse_rank(make_plan(DENSE, Layout(dp=256)), TrainingRecipe(steps=1), rank)
    assert not dist.is_initialized()


def test_a_missing_collective_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, sum_now = make_plan(DENSE, Layout(fsdp=256, zero_stage=3)), MeshCollectives.sum_and_wait
    monkeypatch.setattr(
        MeshCollectives,
        "sum_and_wait",
        lambda collectives, values, axes: values if values.ndim == 0 else sum_now(collectives, values, axes),
    )
    rehearsal = rehearse(plan)
    assert not rehearsal.ok
    (missing,) = rehearsal.collectives.miscounted
    assert (str(missing.issued.kind), missing.issued.num_bytes) == ("all_reduce", 4)
    assert (missing.planned, missing.found) == (2, 0)  # the loss and the norm


def test_a_collective_in_another_format_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, gather = make_plan(DENSE, Layout(fsdp=256, zero_stage=3)), MeshCollectives.all_gather
    monkeypatch.setattr(
        MeshCollectives,
        "all_gather",
        lambda collectives, whole, part, axes, *carries: gather(
            collectives, whole.float(), part.float(), axes, *carries
        ),
    )
    rehearsal = rehearse(plan)
    assert not rehearsal.collectives.equal
    assert {miscount.issued.dtype for miscount in rehearsal.collectives.miscounted} == {"bf16", "fp32"}


def test_an_activation_that_is_kept_too_long_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's activations are recomputed in the plan, and here they are kept."""
    plan, forward = make_plan(DENSE, Layout(dp=256, micro_batch_seqs=4, recompute="full")), Attention.forward
    assert rehearse(plan).failed_terms == ()
    kept: list[Tensor] = []

    def keeping(self: Attention, q: Tensor, *operands: Any) -> tuple[Tensor, Tensor]:
        kept.append(q.clone())
        return forward(self, q, *operands)

    monkeypatch.setattr(Attention, "forward", keeping)
    rehearsal = rehearse(plan)
    assert rehearsal.collectives.equal
    assert {term.name for term in rehearsal.failed_terms} == {"activations", "peak"}
    assert not rehearsal.ok


def test_gathered_weights_that_are_not_released_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(DENSE, Layout(fsdp=256, zero_stage=3, micro_batch_seqs=4, recompute="full"))
    monkeypatch.setattr(
        "shardwise.run.parallel.flat_parameters.FlatParameterGroup.release", lambda self: setattr(self, "whole", False)
    )
    rehearsal = rehearse(plan)
    assert not rehearsal.ok
    assert [term.name for term in rehearsal.failed_terms] == ["gathered", "peak"]


def test_a_second_copy_of_the_gradients_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, build = make_plan(DENSE, Layout(fsdp=256, zero_stage=3)), FlatParameterGroup._make_gradients
    assert rehearse(plan).memory.undeclared_bytes == 0
    copies: list[Tensor] = []

    def build_twice(self: FlatParameterGroup) -> None:
        build(self)
        copies.append(self.gradients.clone())

    monkeypatch.setattr(FlatParameterGroup, "_make_gradients", build_twice)
    rehearsal = rehearse(plan)
    assert not rehearsal.ok
    assert rehearsal.memory.undeclared_bytes == sum(copy.nbytes for copy in copies) > 0
    peak, honest = rehearsal.memory.total, rehearse(plan).memory.total
    assert peak.measured >= (honest.predicted or 0.0) + rehearsal.memory.undeclared_bytes


TINY: dict[str, Any] = {
    "name": "tiny", "num_layers": 2, "d_model": 32, "d_ff": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "vocab_size": 64
}  # fmt: skip


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations_as_wide_as_the_vocabulary_of_a_rank_are_no_logits(recompute: str) -> None:
    """Of 64 words two ranks have 32 each, as many as the model has dims; neither batch nor angles are activations."""
    layout = Layout.parse(f"tp=2 recompute={recompute}")
    job = Job(global_batch_tokens=64, seq_len=16, precision="fp32", loss="in_place")
    plan = plan_layout(Architecture(**TINY), sw.load_cluster("local:2"), job, layout)
    rehearsal = rehearse(plan)
    assert rehearsal.ok, rehearsal.failed_terms
    (activations,) = (term for term in rehearsal.terms if term.name == "activations")
    assert activations.is_within(2e-3), activations
