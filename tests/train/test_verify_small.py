"""The reduced plan of `verify`: the sizes of its model, the layouts of its meshes, its tokens and its recipe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.layout.layout import Layout
from shardwise.model.load import load_model
from shardwise.run.recipe import TrainingRecipe
from shardwise.search.plan import Plan, plan_layout
from shardwise.values.errors import InputError
from shardwise.verify.training.plan_verification import small_case
from shardwise.verify.training.training_case import (
    BUCKET_BYTES,
    CLIP_NORM,
    LEARNING_RATE,
    MEAN_DOCUMENT_TOKENS,
    SEQ_LEN,
    TrainingCase,
    num_micro_batches,
    shrink_plan,
    small_recipe,
)

SHARED: dict[str, Any] = {"num_layers": 3, "d_model": 12, "head_dim": 4}
ONE: dict[str, Any] = {**SHARED, "d_ff": 5, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 11}  # without tp
LATENT: dict[str, Any] = {
    "num_layers": 4, "num_dense_layers": 1, "num_predict_layers": 1, "head_dim": 6, "kv_lora_rank": 5, "rope_head_dim": 2,
    "v_head_dim": 3, "q_lora_rank": 3, "experts_per_token": 2,
}  # fmt: skip
# A model and a layout, and the sizes of what stands for them, mesh by mesh.
SIZES: dict[str, list[dict[str, Any]]] = {
    # two key-value heads where a rank has several, and two queries of each
    "llama-3-8b dp=3": [ONE],
    # each rank has one key-value head, of four queries
    "llama-3-8b fsdp=64 tp=8": [{**SHARED, "d_ff": 20, "num_heads": 16, "num_kv_heads": 8, "vocab_size": 44}, ONE],
    "llama-3-8b tp=8": [{**SHARED, "d_ff": 40, "num_heads": 16, "num_kv_heads": 8, "vocab_size": 88}],
    # two ranks share a head, and then as many as there are heads
    "llama-3-8b fsdp=4 tp=16": [
        {**SHARED, "d_ff": 20, "num_heads": 8, "num_kv_heads": 2, "vocab_size": 44},
        {**SHARED, "d_ff": 20, "num_heads": 16, "num_kv_heads": 8, "vocab_size": 44}, ONE,
    ],
    # 32 ranks leave each one query
    "llama-3-8b tp=32": [
        {**SHARED, "d_ff": 40, "num_heads": 8, "num_kv_heads": 2, "vocab_size": 88},
        {**SHARED, "d_ff": 20, "num_heads": 8, "num_kv_heads": 8, "vocab_size": 44},
    ],
    # Ulysses splits heads over cp too
    "llama-3-8b fsdp=16 tp=2 cp=4 cp_variant=ulysses": [
        {**SHARED, "d_ff": 10, "num_heads": 8, "num_kv_heads": 4, "vocab_size": 22},
        {**SHARED, "d_ff": 5, "num_heads": 16, "num_kv_heads": 8, "vocab_size": 11}, ONE,
    ],
    # an uneven vocabulary, and learned positions
    "gpt-2 tp=2": [{**SHARED, "d_ff": 10, "num_heads": 4, "num_kv_heads": 4, "vocab_size": 23, "max_positions": 520}],
    # a whole number of pairs in a half, and in a quarter, of a head
    "glm-4.5 dp=2": [{"head_dim": 4}],
    "gpt-neox-20b dp=2": [{"head_dim": 8}],
    "gemma-3-27b dp=2": [{**ONE, "num_layers": 6, "sliding_window": 3, "global_every": 2}],
    # one expert more than a token takes
    "mixtral-8x7b dp=2": [{**ONE, "num_experts": 3, "experts_per_token": 2}],
    # two experts of a rank that has several, one of a rank that has one
    "mixtral-8x7b fsdp=4 ep=4": [{**ONE, "num_experts": 8, "experts_per_token": 2}],
    "mixtral-8x7b fsdp=8 ep=8": [{**ONE, "num_experts": 8, "experts_per_token": 2}],
    "deepseek-v3 fsdp=64 ep=128 tp=2 cp=2": [
        {**LATENT, "d_ff": 10, "num_heads": 4, "num_kv_heads": 4, "vocab_size": 22, "num_experts": 4,
         "shared_expert_width": 6, "dense_d_ff": 14},
        {**LATENT, "d_ff": 5, "num_heads": 2, "num_kv_heads": 2, "vocab_size": 11, "num_experts": 8,
         "shared_expert_width": 3, "dense_d_ff": 7},
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_shrunken_models_have_the_listed_sizes(name: str) -> None:
    model, _, layout = name.partition(" ")
    architectures = [mesh.architecture for mesh in shrink_plan(load_model(model), Layout.parse(layout))]
    assert [
        {size: getattr(architecture, size) for size in sizes}
        for architecture, sizes in zip(architectures, SIZES[name], strict=True)
    ] == SIZES[name]
    assert {architecture.nominal_num_params for architecture in architectures} == {None}


def test_a_vocabulary_stays_uneven() -> None:
    """Four ranks would divide that of the plan, whose eight do not."""
    model = replace(load_model("llama-3-8b"), vocab_size=128_260)
    meshes = shrink_plan(model, Layout.parse("fsdp=64 tp=8"))
    assert [(mesh.layout.tp, mesh.architecture.vocab_size) for mesh in meshes] == [(4, 45), (1, 12)]


def test_adapters_stay_adapters() -> None:
    model = replace(load_model("llama-3-8b"), lora_rank=16, lora_targets=("qkv",))
    (small,) = shrink_plan(model, Layout(dp=2))
    assert (small.architecture.lora_rank, small.architecture.lora_targets) == (2, ("qkv",))


# A layout of Llama 3 8B, and the layouts of the meshes that stand for it.
LAYOUTS = {
    "fsdp=64 tp=8 zero_stage=2 micro_batch_seqs=4": [
        "fsdp=2 tp=4 zero_stage=2 micro_batch_seqs=2", "fsdp=4 zero_stage=2 micro_batch_seqs=2 sequence_parallel=false",
    ],
    "fsdp=64 tp=8 async_tp=true": ["fsdp=2 tp=4 async_tp=true", "fsdp=4 sequence_parallel=false"],
    "dp=2 fsdp=6": ["dp=2 fsdp=4"],
    "dp=3 tp=8": ["dp=3 tp=2", "tp=4"],
    "cp=16 cp_variant=ring tp=2": ["tp=2 cp=4 cp_variant=ring"],
    "dp=2 tp=8 zero_stage=0 sequence_parallel=false": ["dp=2 tp=4 zero_stage=0 sequence_parallel=false"],
    "tp=4 recompute=full recompute_layers=3": ["tp=4 recompute=full recompute_layers=1"],
    "tp=4 recompute=full": ["tp=4 recompute=full"],
    "tp=4 recompute=full recompute_layers=32": ["tp=4 recompute=full"],
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shrunken_plans_have_the_listed_layouts(layout: str) -> None:
    layouts = [mesh.layout for mesh in shrink_plan(load_model("llama-3-8b"), Layout.parse(layout))]
    assert list(map(str, layouts)) == [str(Layout.parse(text)) for text in LAYOUTS[layout]]


def make_plan(layout: str, num_seqs: int, **job: Any) -> Plan:
    parsed = Layout.parse(layout)
    job_of_layout = sw.Job(global_batch_tokens=num_seqs * 512, seq_len=512, precision="fp32", **job)
    cluster = sw.load_cluster(f"local:{parsed.num_devices}")
    return plan_layout(sw.load_model("tiny-llama-15m"), cluster, job_of_layout, parsed)


@pytest.mark.parametrize(("num_seqs", "expected"), [(16, 20), (12, 20), (13, 19), (14, 19)])
def test_a_batch_that_is_uneven_over_the_plans_replicas_stays_uneven(num_seqs: int, expected: int) -> None:
    """Two replicas of two sequences each; the micro-batches are `num_micro_batches`."""
    plan = make_plan("dp=2 micro_batch_seqs=2", num_seqs, optimizer="lion")
    (small,) = shrink_plan(plan.model, plan.layout)
    case = small_case(plan, TrainingRecipe(steps=1), small)
    assert (case.num_seqs, case.num_micro_batches) == (expected, num_micro_batches(case.layout))
    assert (case.seq_len, case.num_targets, case.optimizer) == (SEQ_LEN, SEQ_LEN * expected, "lion")


def tokens_of(layout: str, *, num_seqs: int = 7, step: int = 1, **recipe: Any) -> tuple[TrainingCase, list[list[Any]]]:
    """A case, and its micro-batches by replica."""
    training_recipe = TrainingRecipe(steps=2, **{"seed": 5, "respect_documents": True, **recipe})
    (small,) = shrink_plan(load_model("llama-3-8b"), Layout.parse(layout))
    case = TrainingCase(
        architecture=small.architecture, layout=small.layout, recipe=training_recipe, num_seqs=num_seqs, seq_len=SEQ_LEN
    )
    return case, [list(case.micro_batches(step, replica)) for replica in range(case.layout.num_replicas)]


def test_replicas_have_together_what_one_process_has() -> None:
    """In micro-batches of three sequences, one for each of three replicas; the last replicas have none of the last."""
    case, parts = tokens_of("dp=3")
    whole_batches = list(case.on_single_device().micro_batches(1, 0))
    assert [len(ids) for ids, _, _ in whole_batches] == [3, 3, 1]
    assert [[len(ids) for ids, _, _ in part] for part in parts] == [[1, 1, 1], [1, 1, 0], [1, 1, 0]]
    for number, whole in enumerate(whole_batches):
        for place, array in enumerate(whole):
            assert array is not None
            assert np.array_equal(array, np.concatenate([part[number][place] for part in parts]))


def test_tokens_are_of_the_seed_and_the_step() -> None:
    """Each target is the id behind; ids are all of the vocabulary's."""
    case, ((*batches,),) = tokens_of("tp=2", num_seqs=64)
    ids = np.concatenate([ids_of_batch for ids_of_batch, _, _ in batches])
    targets = np.concatenate([targets_of_batch for _, targets_of_batch, _ in batches])
    assert ids.shape == targets.shape == (64, SEQ_LEN)
    assert np.array_equal(ids[:, 1:], targets[:, :-1])
    assert set(np.unique(ids)) == set(range(case.architecture.vocab_size))
    for arguments in ({"step": 0}, {"seed": 6}):
        _, ((*changed,),) = tokens_of("tp=2", num_seqs=64, **arguments)
        assert not np.array_equal(ids, np.concatenate([ids_of_batch for ids_of_batch, _, _ in changed]))


def test_documents_are_numbered_in_each_sequence() -> None:
    """One in `MEAN_DOCUMENT` tokens ends one; without documents there are no numbers."""
    _, ((*batches,),) = tokens_of("tp=2", num_seqs=256)
    numbers = np.concatenate([documents for _, _, documents in batches])
    assert set(np.unique(np.diff(numbers, axis=1))) == {0, 1}
    assert set(np.unique(numbers[:, 0])) == {0, 1}
    assert numbers[:, -1].mean() == pytest.approx(SEQ_LEN / MEAN_DOCUMENT_TOKENS, rel=0.1)
    _, ((*without,),) = tokens_of("tp=2", respect_documents=False)
    assert {documents for _, _, documents in without} == {None}


def test_the_recipe_is_clipped_and_in_several_buckets() -> None:
    plan = make_plan("dp=2", 16)
    usual = TrainingRecipe(
        steps=3, seed=4, learning_rate=LEARNING_RATE, warmup_steps=2, clip_norm=CLIP_NORM, bucket_bytes=BUCKET_BYTES
    )
    assert small_recipe(plan, "3", "4", []) == usual
    assert small_recipe(plan, "1", "4", []) == replace(usual, steps=1, warmup_steps=1)
    assert small_recipe(plan, "3", "4", ["recipe.balance=bias"]) == replace(usual, balance="bias")
    packed = make_plan("dp=2", 16, document_tokens=64)
    assert small_recipe(packed, "3", "4", []) == replace(usual, respect_documents=True)


@pytest.mark.parametrize(("steps", "seed", "message"), [
    ("0", "0", "steps: found 0; 1 to 10 are required"), ("x", "0", "steps: found 'x'"),
    ("11", "0", "steps: found 11"), ("1", "x", "seed: found 'x'"),
])  # fmt: skip
def test_invalid_recipes_are_refused(steps: str, seed: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        small_recipe(make_plan("dp=2", 16), steps, seed, [])
    assert small_recipe(make_plan("dp=2", 16), "10", "0", []).steps == 10
