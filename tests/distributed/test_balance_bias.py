"""Biases that balance experts, from a run on several ranks to files for `transformers` and back into a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from train.shard_files import write_shards

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.interop.frameworks.huggingface_families import read_config
from shardwise.interop.weights import checkpoint_to_hf, load_hf
from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.run.checkpoints import Checkpointer, latest
from shardwise.run.data.batches import Batches
from shardwise.run.data.token_shard_reader import TokenShards
from shardwise.run.parallel.world import World
from shardwise.run.rank_threads import run_rank_threads
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.engine_prediction import engine_instance
from shardwise.run.trainer.trainer import Trainer
from shardwise.search.plan import Plan, plan_layout
from shardwise.train import open_weights
from shardwise.values.errors import InputError

SEQ_LEN, SEQS, VOCABULARY = 8, 6, 61
ALONE = Layout(micro_batch_seqs=6)
SMALL: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24,
    "vocab_size": VOCABULARY, "head_dim": 8, "rms_norm_eps": 1e-4, "num_experts_per_tok": 2,
}  # fmt: skip
ROUTED = {
    **SMALL, "n_routed_experts": 6, "moe_intermediate_size": 12, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "n_group": 3, "topk_group": 2,
}  # fmt: skip
CONFIG = {**ROUTED, "model_type": "glm4_moe", "partial_rotary_factor": 0.5}
DEEPSEEK = {
    **ROUTED, "model_type": "deepseek_v3", "num_key_value_heads": 4, "head_dim": 4, "q_lora_rank": 6, "kv_lora_rank": 10,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 2, "rms_norm_eps": 1e-6,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "tokens"
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(1, VOCABULARY, (40,), generator=generator).tolist() for _ in range(30)]
    write_shards(folder, documents, vocab_size=VOCABULARY)
    return folder


def make_plan(model: Architecture, layout: Layout) -> Plan:
    job = Job(global_batch_tokens=SEQS * SEQ_LEN, seq_len=SEQ_LEN, precision="fp32")
    return plan_layout(model, load_cluster(f"local:{layout.num_devices}"), job, layout)


def trainer_of(plan: Plan, data: Path, initial: str | None = None) -> Trainer:
    recipe = TrainingRecipe(steps=4, learning_rate=1e-2, seed=3, balance="bias", balance_rate=0.3, initial=initial)
    batches = Batches(TokenShards(data), seq_len=SEQ_LEN, batch=SEQS, seed=recipe.seed)
    return Trainer(plan, recipe, batches, World(engine_instance(plan, recipe).mesh), open_weights)


def biases(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: bias.clone() for name, bias in trainer.engine.buffers()}


def train_and_save(plan: Plan, data: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Three steps and a checkpoint; the biases."""
    trainer = trainer_of(plan, data)
    for _ in range(3):
        trainer.train_step()
    with Checkpointer(folder, keep=1) as checkpoints:
        checkpoints.save(trainer.step, trainer.state())
    return biases(trainer)


def begun(plan: Plan, data: Path, folder: str) -> dict[str, torch.Tensor]:
    return biases(trainer_of(plan, data, initial=folder))


@pytest.mark.parametrize(
    ("config", "dtype"),
    [(CONFIG, None), (CONFIG, torch.bfloat16), (DEEPSEEK, None)],
    ids=["glm", "glm in bf16", "deepseek"],
)
def test_transformers_routes_as_the_run_did(
    config: dict[str, Any], dtype: torch.dtype | None, data: Path, tmp_path: Path
) -> None:
    """Of a checkpoint of two ranks: the biases to the bit, in float32, and each token's experts and gates."""
    import transformers

    model, _ = read_config(config)
    expected = run_rank_threads(
        train_and_save, 2, make_plan(model, Layout(fsdp=2, zero_stage=1, micro_batch_seqs=3)), data, tmp_path / "run"
    )[0]
    assert expected.keys() == {"layers.1.balance_bias", "layers.2.balance_bias"}
    assert all(bias.abs().max() > 0.2 for bias in expected.values()), "steps of 0.3 have moved them"
    path = latest(tmp_path / "run")
    assert path is not None
    checkpoint_to_hf(path, model, tmp_path / "hf", seq_len=SEQ_LEN, dtype=dtype)
    ours = load_hf(tmp_path / "hf")
    assert ours.biases.keys() == expected.keys()
    assert all(torch.equal(ours.biases[name], bias) for name, bias in expected.items())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    gates = {name: module for name, module in theirs.named_modules() if name.endswith("mlp.gate")}
    for (name, gate), bias in zip(gates.items(), expected.values(), strict=True):
        assert torch.equal(gate.e_score_correction_bias, bias), name
    if dtype is None:
        ids = torch.randint(VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(1))
        chosen: list[torch.Tensor] = []
        for gate in gates.values():
            gate.register_forward_hook(lambda module, args, out: chosen.append(out[2].sort().values))
        with torch.no_grad():
            torch.testing.assert_close(theirs(ids).logits, ours.logits(ids), rtol=0, atol=1e-5)
            for gate in gates.values():
                gate.e_score_correction_bias.zero_()
            theirs(ids)
        assert any(not torch.equal(*two) for two in zip(chosen[:2], chosen[2:], strict=True)), "the biases choose"


@pytest.mark.parametrize("layout", [ALONE, Layout(pp=2, schedule="1f1b", micro_batch_seqs=3)], ids=["alone", "pp=2"])
def test_a_run_begins_with_the_biases_of_a_model(layout: Layout, data: Path, tmp_path: Path) -> None:
    model, _ = read_config(CONFIG)
    expected = run_rank_threads(train_and_save, 1, make_plan(model, ALONE), data, tmp_path / "run")[0]
    path = latest(tmp_path / "run")
    assert path is not None
    checkpoint_to_hf(path, model, tmp_path / "hf", seq_len=SEQ_LEN)
    by_rank = run_rank_threads(begun, layout.num_devices, make_plan(model, layout), data, str(tmp_path / "hf"))
    biases = {name: bias for rank in by_rank for name, bias in rank.items()}
    assert biases.keys() == expected.keys()
    assert all(torch.equal(biases[name], bias) for name, bias in expected.items())


def first_loss(plan: Plan, data: Path, folder: str) -> float:
    return trainer_of(plan, data, initial=folder).train_step().loss


@pytest.mark.parametrize("config", [CONFIG, DEEPSEEK], ids=["glm", "deepseek"])
def test_the_loss_of_a_model_of_transformers_on_two_ranks(config: dict[str, Any], data: Path, tmp_path: Path) -> None:
    """Of models that turn half of each head, and that have pairs side by side, with heads split over tp."""
    import transformers

    described = transformers.AutoConfig.for_model(**config, num_nextn_predict_layers=0)
    described._attn_implementation = described._experts_implementation = "eager"
    theirs = transformers.AutoModelForCausalLM.from_config(described).eval()
    generator = torch.Generator().manual_seed(2)
    for parameter in theirs.parameters():
        parameter.data.normal_(0.5 if parameter.dim() == 1 else 0.0, 0.4, generator=generator)
    theirs.save_pretrained(tmp_path)
    batch = Batches(TokenShards(data), seq_len=SEQ_LEN, batch=SEQS, seed=3).batch(0)
    with torch.no_grad():
        logits, targets = theirs(torch.tensor(batch.inputs_BT)).logits, torch.tensor(batch.targets_BT).long()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    model, _ = read_config(described.to_dict())
    layout = Layout(tp=2, sequence_parallel=True, micro_batch_seqs=3)
    assert run_rank_threads(first_loss, 2, make_plan(model, layout), data, str(tmp_path)) == pytest.approx(
        [expected] * 2, rel=1e-5
    )


def test_biases_that_files_have_no_place_for_are_refused(data: Path, tmp_path: Path) -> None:
    """They would be lost, and tokens would go to other experts."""
    model, _ = read_config({**SMALL, "model_type": "mixtral", "num_local_experts": 6})
    run_rank_threads(train_and_save, 1, make_plan(model, ALONE), data, tmp_path / "run")
    path = latest(tmp_path / "run")
    assert path is not None
    with pytest.raises(
        InputError,
        match=r"layers.0.balance_bias.* no place in a Mixtral.*; one of glm4_moe, deepseek_v3 .* is required",
    ):
        checkpoint_to_hf(path, model, tmp_path / "hf", seq_len=SEQ_LEN)
    assert not (tmp_path / "hf").exists()
