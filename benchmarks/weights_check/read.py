"""Whether what the frameworks saved is read as the model that they had: its logits, in float64.

PYTHONPATH=src python benchmarks/weights_check/read.py FORMAT FOLDER

FOLDER is what `write.py` wrote, and what a judge beside this file saved under `saved/` is read. Prints the largest
difference, and a line for each model that is read as another one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from shardwise.interop.weights.distributed_checkpoints import open_megatron, open_torchtitan
from shardwise.interop.weights.megatron_rank_files import open_megatron_ranks
from shardwise.model.architecture import Architecture
from shardwise.values.errors import ShardwiseError
from shardwise.values.payload import parse_dataclass

OPEN = {"torchtitan": open_torchtitan, "megatron": open_megatron, "megatron-ranks": open_megatron_ranks}
LIMIT = 1e-10  # of the largest logit


def difference(name: str, folder: Path) -> float:
    """How far the logits are from those expected, of the largest."""
    described = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    model, expected = parse_dataclass(Architecture, described, str(folder)), torch.load(folder / "expected.pt")
    computed = OPEN[name](folder / "saved", model).weights().logits(expected["ids"])
    return float((computed - expected["logits"]).abs().max() / expected["logits"].abs().max())


def main(name: str, folder: str) -> int:
    folders = sorted(path.parent for path in Path(folder).glob("*/model.json"))
    differences: dict[str, float] = {}
    for model_folder in folders:
        try:
            differences[model_folder.name] = difference(name, model_folder)
        except ShardwiseError as error:
            print(f"{model_folder.name}: {error}")
    far = [f"{name}: logits differ by {value:.1e}" for name, value in differences.items() if not value <= LIMIT]
    worst = max(differences.values(), default=float("nan"))
    print(
        "\n".join(
            [*far, f"{len(differences) - len(far)} of {len(folders)} are read; logits differ by {worst:.1e} at most"]
        )
    )
    return int(bool(far) or len(differences) < len(folders) or not folders)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
