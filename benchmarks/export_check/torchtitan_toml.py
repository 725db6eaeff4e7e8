"""Whether torchtitan 0.2.2 itself takes launches that were written for it: its parser, its meshes' degrees, its stages.

    python benchmarks/export_check/torchtitan_toml.py FOLDER

FOLDER has a folder for each launch, as `shardwise export --to torchtitan-toml --out` writes it. Run it in an environment with the
wheel of torchtitan 0.2.2 and what its models import: torch, tyro, torchdata, datasets, tokenizers, einops. Prints a line for
each launch that is refused, and how many are not; exits with 1 where any is.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

from launch_verdicts import find_launches, launch_arguments, print_refusals

MODELS = "torchtitan.models."


def judge(folder: Path) -> None:
    """Raises what torchtitan raises."""
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims

    words = (folder / "launch.sh").read_text().split()
    devices = int(words[words.index("--nnodes") + 1]) * int(words[words.index("--nproc-per-node") + 1])
    config: Any = ConfigManager().parse_args(["--job.config_file", str(folder / "run.toml")])
    parallelism = config.parallelism
    dims = ParallelDims(
        dp_shard=parallelism.data_parallel_shard_degree, dp_replicate=parallelism.data_parallel_replicate_degree,
        cp=parallelism.context_parallel_degree, tp=parallelism.tensor_parallel_degree, pp=parallelism.pipeline_parallel_degree,
        ep=parallelism.expert_parallel_degree, etp=parallelism.expert_tensor_parallel_degree, world_size=devices,
    )  # fmt: skip
    if dims.ep > 1 and dims.dp_shard * dims.cp * dims.tp % (dims.ep * dims.etp):
        raise ValueError("the sparse mesh does not come out")
    spec = import_module(MODELS + config.model.name).get_train_spec()
    model = spec.model_args[config.model.flavor]
    model.update_from_config(config)
    training, batch = config.training, dims.dp_replicate * dims.dp_shard
    assert training.seq_len % dims.seq_len_divisor == 0, "parallelize.py: sequence length"
    assert training.global_batch_size % (training.local_batch_size * batch) == 0, "train.py: global batch size"
    assert dims.fsdp_enabled or dims.tp * dims.pp == 1, "parallelize.py: DDP beside other parallelism"
    if dims.pp > 1:
        assert spec.pipelining_fn is not None, "train.py: no pipeline of this model"
        pipeline(parallelism, training, dims, model.n_layers)


def pipeline(parallelism: Any, training: Any, dims: Any, layers: int) -> None:
    """Stages as torchtitan deals them out, and what its schedules ask."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
    from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part

    single = issubclass(get_schedule_class(parallelism.pipeline_parallel_schedule), PipelineScheduleSingle)
    first, last = (
        parallelism.pipeline_parallel_first_stage_less_layers,
        parallelism.pipeline_parallel_last_stage_less_layers,
    )
    per = parallelism.pipeline_parallel_layers_per_stage
    count = -(-(layers + first + last) // per) if per else dims.pp * (1 if single else 2)
    names = parallelism.module_fqns_per_model_part or generate_llm_fqn_per_model_part(count, layers, first, last)
    assert [name for stage in names for name in stage if name.startswith("layers.")] == [
        f"layers.{layer}" for layer in range(layers)
    ], "layers in order"
    assert len(names) % dims.pp == 0, "stages on each rank"
    assert single == (len(names) == dims.pp), "stages of the schedule"
    assert training.local_batch_size % parallelism.pipeline_parallel_microbatch_size == 0, "micro-batches"


def refused(folder: Path) -> str | None:
    """Return why torchtitan does not take a launch; None where it does."""
    try:
        judge(folder)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return None


def main() -> int:
    warnings.simplefilter("ignore")
    launches = find_launches(launch_arguments(__doc__).parse_args().folders, "run.toml")
    del sys.path[0]  # this folder, where a file has the package's name
    return print_refusals(launches, refused)


if __name__ == "__main__":
    sys.exit(main())
