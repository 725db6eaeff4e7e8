"""The main job, twice: plan the training of Llama-3-70B on a whole TPU v5p pod, then on 512 H100.

make demo
"""

from __future__ import annotations

import shlex
import sys

from shardwise.cli import main

RUNS = (
    "plan llama-3-70b tpu-v5p:16x20x28 --batch-tokens 4Mi --seq-len 4096 --tokens 15T",
    "plan llama-3-70b h100:512 --batch-tokens 4Mi --seq-len 8192 --tokens 15T",
)


def demo() -> int:
    """Run each command as a user would and stop at the first that fails."""
    for run in RUNS:
        print(f"$ shardwise {run}\n", flush=True)
        code = main(shlex.split(run))
        if code:
            return code
        print()
    return 0


if __name__ == "__main__":
    sys.exit(demo())
