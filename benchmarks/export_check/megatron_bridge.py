"""Recipes of Megatron Bridge, judged by its own ConfigContainer and by the configurations of Megatron-Core within it.

    python benchmarks/export_check/megatron_bridge.py --packages PACKAGES:PACKAGES FOLDER...

PACKAGES hold megatron-bridge, megatron-core, omegaconf and hydra-core (their wheels, unpacked), each FOLDER recipe.py files that
`shardwise export --to megatron-bridge` wrote beside its README. A recipe is run and validated as `pretrain` does it, as on that
many devices. Prints a line for each that is refused; status 1 where one is. Needs PyTorch and transformers; packages of GPUs are
stubbed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import sys
import traceback
import typing
import warnings
from pathlib import Path

from launch_verdicts import find_launches, launch_arguments, print_refusals
from stubs import stub

# Packages of kernels, of other models and of reports
STUBBED = (
    *(
        "modelopt",
        "nvidia_resiliency_ext",
        "nemo_run",
        "wandb",
        "mamba_ssm",
        "causal_conv1d",
        "datasets",
        "accelerate",
        "peft",
    ),
    *(
        "fla",
        "qwen_vl_utils",
        "timm",
        "open_clip",
        "mlflow",
        "megatron.energon",
        "PIL",
        "diffusers",
        "torchvision",
        "google",
    ),
    *(
        "tensorboard",
        "nvdlfw_inspect",
        "multistorageclient",
        "nv_grouped_gemm",
        "six",
        "ftfy",
        "sentencepiece",
        "tiktoken",
    ),
)
VERSIONS = {
    **dict.fromkeys(STUBBED, "1.0"),
    "triton": "3.5.0",
    "einops": "0.8.1",
    "transformer_engine": "2.12.0",
    "tensorboard": "2.19.0",
}
MACHINES = re.compile(r"machines: (\d+) nodes of (\d+) devices")


def problem(folder: Path) -> str | None:
    """Why Megatron Bridge refuses a recipe; None where it takes it."""
    nodes, devices = map(int, MACHINES.search((folder / "README.md").read_text(encoding="utf-8")).groups())  # type: ignore
    os.environ.update(WORLD_SIZE=str(nodes * devices), RANK="0", LOCAL_RANK="0")
    spec = importlib.util.spec_from_file_location("recipe", folder / "recipe.py")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            spec.loader.exec_module(module)  # type: ignore[union-attr]
            config = module.recipe()
            from megatron.bridge.training.config import runtime_config_update

            runtime_config_update(config)
            batch = config.train.micro_batch_size * config.data_parallel_size
            assert config.train.global_batch_size % batch == 0, (
                "the batch is not a multiple of micro-batches and replicas"
            )
    except (Exception, SystemExit) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{str(error).strip() or where.line} ({Path(where.filename).name}:{where.lineno})"
    return None


def main() -> int:
    options = launch_arguments(__doc__)
    options.add_argument("--packages", required=True, metavar="PACKAGES:PACKAGES")
    chosen = options.parse_args()
    import torch

    sys.path[:1] = chosen.packages.split(":")  # in the place of this folder, whose files have the frameworks' names
    stub(VERSIONS)
    if not hasattr(typing, "override"):  # of Python 3.12
        typing.override = lambda method: method  # type: ignore[attr-defined]
    warnings.simplefilter("ignore")
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # type: ignore[assignment]
    h100 = type("H100", (), {"major": 9, "minor": 0, "name": "NVIDIA H100 80GB HBM3"})()
    torch.cuda.get_device_properties = lambda device=None: h100  # type: ignore[assignment,misc]
    return print_refusals(find_launches(chosen.folders, "recipe.py"), problem)


if __name__ == "__main__":
    sys.exit(main())
