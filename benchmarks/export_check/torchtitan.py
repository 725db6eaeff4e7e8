"""Whether torchtitan itself takes launches that were written for it: its parser, its meshes' degrees, its stages and schedules.

    python benchmarks/export_check/torchtitan.py FOLDER

FOLDER has a folder for each launch, as `shardwise export --to torchtitan --out` writes it. Run it in an environment with the
wheel of torchtitan 0.3.0 and what its configs import: torch, triton, tyro, spmd_types, torchdata, datasets, tokenizers, torchao,
torch_checkpointing, tensorboard, einops, pillow. No GPU is needed: what asks for one is told that there is one. Prints a line
for each launch that is refused, and how many are not; exits with 1 where any is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from launch_verdicts import find_launches, launch_arguments, print_refusals

MAIN = "torchtitan.train"


def started(folder: Path) -> list[str]:
    """The words that a launch gives to torchrun."""
    with tempfile.TemporaryDirectory() as path:
        stand_in = Path(path) / "torchrun"
        stand_in.write_text("#!/bin/bash\nprintf '%s\\n' \"$@\"\n")
        stand_in.chmod(0o755)
        where = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}", "HEAD_NODE": "host", "HF_ASSETS": "/tokenizer"}
        return subprocess.run(
            ["bash", "launch.sh"], cwd=folder, env=where, check=True, capture_output=True, text=True
        ).stdout.splitlines()


def num_devices(words: list[str]) -> int:
    """Devices of all nodes."""
    return int(words[words.index("--nnodes") + 1]) * int(words[words.index("--nproc-per-node") + 1])


def judge(folder: Path) -> None:
    """Raises what torchtitan raises."""
    from torchtitan.config import ConfigManager
    from torchtitan.distributed.parallel_dims import ParallelDims

    words = started(folder)
    sys.modules.pop("run_config", None)
    sys.path[0] = str(folder)
    config: Any = ConfigManager().parse_args(words[words.index(MAIN) + 1 :])
    dims = ParallelDims.from_config(config.parallelism, num_devices(words))
    if dims.dp_shard * dims.cp * dims.tp % dims.ep:
        raise ValueError("the sparse mesh does not come out")
    model = config.model_spec.model
    model.update_from_config(config=config)
    training, batch = config.training, dims.dp_replicate * dims.dp_shard
    divisor = (dims.tp if config.parallelism.enable_sequence_parallel else 1) * (2 * dims.cp if dims.cp > 1 else 1)
    assert training.seq_len % divisor == 0, "trainer.py: sequence length"
    assert training.global_batch_size % (training.local_batch_size * batch) == 0, "trainer.py: global batch size"
    if dims.pp > 1:
        pipeline(config, dims, model)


def pipeline(config: Any, dims: Any, model: Any) -> None:
    """Stages as torchtitan deals them out, and its schedule made of them."""
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
    from torchtitan.distributed import pipeline_parallel as its

    parallelism = config.parallelism
    count, layers, first, last = its._get_pipeline_metadata(dims, parallelism, model)
    names = parallelism.module_fqns_per_model_part or its._generate_llm_fqn_per_model_part(count, layers, first, last)
    assert [name for stage in names for name in stage if name.startswith("layers.")] == [
        f"layers.{layer}" for layer in range(layers)
    ], "layers in order"
    of_first = its._get_pp_rank_to_stage_indices_mapping(0, dims.pp, parallelism.pipeline_parallel_schedule, len(names))
    stages = [Stage(index, len(names), dims.pp) for index in of_first]
    kind = get_schedule_class(parallelism.pipeline_parallel_schedule)
    micro_batches = config.training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    if issubclass(kind, PipelineScheduleMulti):
        kind(stages, n_microbatches=micro_batches, loss_fn=lambda *args: None, scale_grads=False)
    else:
        assert len(stages) == 1, "one stage on each rank"
        kind(stages[0], n_microbatches=micro_batches, loss_fn=lambda *args: None, scale_grads=False)


class Stage:
    """What a schedule asks of a stage before there is one."""

    def __init__(self, index: int, count: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, count, ranks, 0
        self.is_first, self.is_last, self.has_backward = index == 0, index == count - 1, False
        self.stage_index_to_group_rank = {stage: stage % ranks for stage in range(count)}
        self.group = self.device = self.submod = None


def with_gpus() -> None:
    """Say that there are GPUs of the kind that formats of 8 bits ask for."""
    import torchtitan.components.quantization.float8 as float8

    float8.has_cuda_capability = lambda major, minor: True


def refused(folder: Path) -> str | None:
    """Return why torchtitan does not take a launch; None where it does."""
    try:
        judge(folder)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return None


def main() -> int:
    warnings.simplefilter("ignore")
    launches = find_launches(launch_arguments(__doc__).parse_args().folders, "launch.sh")
    sys.path[0] = ""  # in place of this file's own folder, where it has torchtitan's name; then the launch's
    with_gpus()
    return print_refusals(launches, refused)


if __name__ == "__main__":
    sys.exit(main())
