"""NeMo Automodel: a recipe in YAML, of a model on the Hugging Face hub.

Source of names and types: nemo-automodel 0.7.0, components/distributed/{config,mesh}.py, distributed/pipelining, recipes/llm.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.export.automodel_fields import FIELDS, NAMES
from shardwise.export.field import Options
from shardwise.export.formats.trees import dotted
from shardwise.export.formats.yaml_text import only_yaml, yaml_text, yaml_tree
from shardwise.export.hub import hub_model, hub_name
from shardwise.export.launch import Launch
from shardwise.export.launchers import torchrun
from shardwise.export.target import Files, Need, Target, option_table
from shardwise.model.architecture import Architecture

SCRIPT = "recipe.yaml"


def _model(options: Options) -> Architecture | None:
    name = next((options[name] for name in NAMES if isinstance(options.get(name), str)), None)
    return hub_model(name) if name else None


def _write(options: Options, launch: Launch) -> Files:
    usual = {
        "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
        **options,
        "dataset._target_": "nemo_automodel.components.datasets.llm.mock_iterable_dataset.MockIterableDataset",
        "dataset.vocab_size": launch.model.vocab_size,
        "dataloader._target_": "torch.utils.data.DataLoader",
        "dataloader.batch_size": None,
        "optimizer.lr": 3.0e-4,
        "checkpoint.enabled": False,
    }
    return {SCRIPT: yaml_text(usual)}


def _read(files: Files) -> Options:
    name, text = only_yaml(files, "a recipe of NeMo Automodel")
    return dotted(yaml_tree(text, name), option_table("automodel"))


def _notes(launch: Launch) -> Iterator[str]:
    yield "data is mock, and the learning rate one of many: set dataset, optimizer and checkpoint in the recipe"


def _is_ddp(launch: Launch) -> bool:
    layout = launch.layout
    return layout.zero_stage == 0 and layout.dp * layout.fsdp > 1


def _at_once(launch: Launch) -> int:
    """Sequences of one micro-batch on all replicas."""
    return launch.layout.dp * launch.layout.fsdp * launch.layout.micro_batch_seqs


def _has_whole_experts(launch: Launch) -> bool:
    """Whether the custom models of experts take the launch's tensor parallelism (components/moe/parallelizer.py)."""
    layout = launch.layout
    if not launch.model.num_experts or layout.tp == 1:
        return True
    return layout.ep > 1 and layout.expert_tp == 1 and not layout.sequence_parallel and not layout.async_tp


TARGET = Target(
    name="automodel", title="NeMo Automodel", version="0.7.0",
    source="https://github.com/NVIDIA-NeMo/Automodel, nemo_automodel/components/distributed/config.py", stack="automodel",
    table="automodel", fields=FIELDS,
    needs=(
        Need(
            lambda launch: hub_name(launch.model) is not None,
            lambda launch: f"{launch.model.name} has no name on the Hugging Face hub, by which models are built; take another",
        ),
        Need(
            lambda launch: not _is_ddp(launch) or launch.layout.num_devices == launch.layout.dp,
            lambda launch: "plain replicas are DDP's, which splits nothing else; set a zero_stage of 2 or 3",
        ),
        Need(
            lambda launch: launch.layout.zero_stage == 0 or launch.layout.dp == 1 or launch.layout.fsdp > 1,
            lambda launch: f"dp_replicate_size = {launch.layout.dp} has to be less than dp_size; set fsdp > 1",
        ),
        Need(
            _has_whole_experts,
            lambda launch: "experts beside tensor parallelism are whole, without sequence_parallel and async_tp; set tp=1, or "
            "ep > 1 etp=1 sequence_parallel=false",
        ),
        Need(
            lambda launch: not launch.layout.async_tp or launch.layout.sequence_parallel,
            lambda launch: "enable_async_tensor_parallel requires sequence_parallel; set sequence_parallel=true",
        ),
        Need(
            lambda launch: launch.job.num_seqs % _at_once(launch) == 0,
            lambda launch: f"global_batch_size = {launch.job.num_seqs} is not a multiple of {_at_once(launch)} for a micro-batch",
        ),
        Need(
            lambda launch: launch.layout.pp == 1 or launch.job.num_seqs >= _at_once(launch) * launch.layout.pp,
            lambda launch: f"fewer micro-batches than the {launch.layout.pp} ranks of the pipeline; take a larger batch or fewer",
        ),
    ),
    write=_write, read=_read, command=lambda launch: torchrun(launch.machines, f"-m nemo_automodel.cli.app {SCRIPT}"),
    notes=_notes, model=_model, says_model=False,
)  # fmt: skip
