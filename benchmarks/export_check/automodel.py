"""Recipes of NeMo Automodel, judged by its own parsing of them, its meshes and its stages.

    PYTHONPATH=src python benchmarks/export_check/automodel.py --package PACKAGE FOLDER...

PACKAGE holds nemo-automodel (its wheel, unpacked), each FOLDER recipe.yaml files that `shardwise export --to automodel` wrote
beside its README. Meshes are made of a process group that communicates nothing, of as many ranks as the launch has. Prints a line
for each that is refused; status 1 where one is. Needs PyTorch, transformers and PyYAML; packages of GPUs are stubbed.
"""

from __future__ import annotations

import re
import sys
import traceback
import warnings
from pathlib import Path

from launch_verdicts import find_launches, launch_arguments, print_refusals
from stubs import stub

STUBBED = (
    *(
        "datasets",
        "torchdata",
        "torchao",
        "wandb",
        "mlflow",
        "megatron_fsdp",
        "flashoptim",
        "quack",
        "transformer_engine",
        "peft",
    ),
    *(
        "deep_ep",
        "mistral_common",
        "tiktoken",
        "triton",
        "einops",
        "bitsandbytes",
        "liger_kernel",
        "fla",
        "causal_conv1d",
    ),
)
MACHINES = re.compile(r"machines: (\d+) nodes of (\d+) devices")


def problem(folder: Path) -> str | None:
    """Why Automodel refuses a recipe; None where it takes it."""
    import torch.distributed as dist
    import yaml
    from torch.testing._internal.distributed.fake_pg import FakeStore

    nodes, devices = map(int, MACHINES.search((folder / "README.md").read_text(encoding="utf-8")).groups())  # type: ignore
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    dist.init_process_group("fake", rank=0, world_size=nodes * devices, store=FakeStore())
    try:
        _judge(recipe, nodes * devices)
    except (Exception, SystemExit) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{str(error).strip() or where.line} ({Path(where.filename).name}:{where.lineno})"
    finally:
        dist.destroy_process_group()
    return None


def _judge(recipe: dict, world: int) -> None:  # type: ignore[type-arg]
    from nemo_automodel.components.distributed.config import DistributedSetup
    from nemo_automodel.components.training.step_scheduler import StepSchedulerConfig
    from nemo_automodel.recipes._dist_utils import parse_distributed_section

    parsed = parse_distributed_section(recipe["distributed"])
    sizes = parsed["parallelism_sizes"]
    DistributedSetup.build(
        parsed["strategy_config"], sizes, parsed["pipeline_config"], parsed["moe_parallel_config"],
        parsed["activation_checkpointing"], world_size=world,
    )  # fmt: skip
    steps = dict(recipe["step_scheduler"])
    local = steps.pop("local_batch_size")
    batch = StepSchedulerConfig(**steps).global_batch_size
    replicas = world // (sizes.tp_size * sizes.pp_size * sizes.cp_size)
    if batch % (local * replicas):
        raise ValueError(
            f"global_batch_size {batch} is not a multiple of {local} x {replicas}"
        )  # StepScheduler.__init__
    if sizes.pp_size > 1:
        _judge_stages(recipe, parsed["pipeline_config"], sizes.pp_size, local)


def _judge_stages(recipe: dict, pipeline, ranks: int, local: int) -> None:  # type: ignore[no-untyped-def,type-arg]
    from nemo_automodel.components.distributed.pipelining.functional import (
        calculate_virtual_stages,
        generate_hf_model_fqn_per_model_part,
    )
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    if local // pipeline.pp_microbatch_size < ranks:
        raise ValueError(
            f"{local} // {pipeline.pp_microbatch_size} must be at least {ranks}"
        )  # recipes/llm/train_ft.py
    single = issubclass(get_schedule_class(pipeline.pp_schedule), PipelineScheduleSingle)
    layers = _num_layers(recipe["model"]["config"]["pretrained_model_name_or_path"])
    rounds = pipeline.round_virtual_stages_to_pp_multiple
    stages, _ = calculate_virtual_stages(layers, pipeline.layers_per_stage, ranks, single, rounds)
    generate_hf_model_fqn_per_model_part(stages, layers)


def _num_layers(name: str) -> int:
    """Layers of a model, without its config from the hub."""
    from shardwise.interop.frameworks.huggingface_hub_names import hub_model

    model = hub_model(name)
    assert model is not None, name
    return model.num_layers


def main() -> int:
    options = launch_arguments(__doc__)
    options.add_argument("--package", required=True, metavar="PACKAGE")
    chosen = options.parse_args()
    sys.path[0] = chosen.package  # in the place of this folder, whose files have the frameworks' names
    stub(dict.fromkeys(STUBBED, "1.0"))
    warnings.simplefilter("ignore")
    return print_refusals(find_launches(chosen.folders, "recipe.yaml"), problem)


if __name__ == "__main__":
    sys.exit(main())
