"""Twenty steps of the engine equal those of the `transformers` model under plain PyTorch: losses, norms and weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.interop.weights.huggingface_folder import open_hf
from shardwise.layout.layout import Layout
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.parallel.world import World
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.step.rank_program import RankProgram
from shardwise.train import load_stored_weights
from shardwise.values.precision import get_precision

STEPS, SEQS, POSITIONS = 20, 4, 16
SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "vocab_size": 61, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "initializer_range": 0.1,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma": ("gemma", {}),
}
RECIPE = TrainingRecipe(steps=STEPS, learning_rate=3e-3, warmup_steps=3, clip_norm=0.5, balance="none")


def transformers_model(name: str) -> Any:
    """A model of `transformers` with random weights."""
    model_type, settings = MODELS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(model_type, **{**SMALL, **settings})
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()


def batch(step: int) -> torch.Tensor:
    """[SEQS, POSITIONS + 1] of a step."""
    return torch.randint(1, SMALL["vocab_size"], (SEQS, POSITIONS + 1), generator=torch.Generator().manual_seed(step))


def plain_steps(model: Any) -> list[tuple[float, float]]:
    """Return loss and norm of each step of a plain training loop."""
    kinds = [
        [parameter for parameter in model.parameters() if (parameter.dim() > 1) is matrix] for matrix in (True, False)
    ]
    optimizer = torch.optim.AdamW(
        [{"params": kinds[0], "weight_decay": 0.1}, {"params": kinds[1], "weight_decay": 0.0}],
        betas=(0.9, 0.95), eps=1e-8, lr=1.0,
    )  # fmt: skip
    steps = []
    for step in range(STEPS):
        tokens = batch(step)
        optimizer.zero_grad()
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), RECIPE.clip_norm or 0.0)
        for group in optimizer.param_groups:
            group["lr"] = RECIPE.learning_rate_at(step)
        optimizer.step()
        steps.append((loss.item(), norm.item()))
    return steps


@pytest.mark.parametrize("name", MODELS)
def test_twenty_steps_equal_plain_pytorch(name: str, tmp_path: Path) -> None:
    model = transformers_model(name)
    model.save_pretrained(tmp_path / "before")
    architecture = open_hf(tmp_path / "before").architecture
    layout = Layout(micro_batch_seqs=SEQS // 2)
    instance = RankProgram(architecture=architecture, layout=layout, precision=get_precision("fp32"))
    engine = TrainingEngine(instance, RECIPE, World(instance.mesh))
    load_stored_weights(engine, open_hf(tmp_path / "before"))
    expected, actual = plain_steps(model), []
    for step in range(STEPS):
        halves = [MicroBatch(half[:, :-1], half[:, 1:]) for half in batch(step).split(SEQS // 2)]
        result = engine.step(halves, SEQS * POSITIONS, len(halves), step)
        actual.append((result.loss.item(), result.norm.item()))
    assert actual[-1][0] < actual[0][0]
    for (loss, norm), (actual_loss, actual_norm) in zip(expected, actual, strict=True):
        assert actual_loss == pytest.approx(loss, rel=1e-6)
        assert actual_norm == pytest.approx(norm, rel=2e-5)
    model.save_pretrained(tmp_path / "after")
    stored = open_hf(tmp_path / "after")
    for kind, part, values in engine.checkpoint_tensors():
        if kind == "model":
            after = stored.read_flat(part.name, part.boxes())
            torch.testing.assert_close(values, after, rtol=1e-4, atol=3e-5)
