"""What the server that starts the ranks imports, so that they need not."""

from __future__ import annotations

import gc
import importlib

MODULES = (
    "pytest",
    "torch.distributed",
    "torch._dynamo",  # every optimizer of PyTorch's loads it
    "shardwise.derive.sharded_unit",
    "shardwise.search.plan",
    "shardwise.run.checkpoints",
    "shardwise.run.trainer.trainer",
    "shardwise.train",
    "shardwise.run.trainer.interfaces",
    "shardwise.run.trainer.worker",
    "shardwise.present.command_line",
    "shardwise.run.data.batches",
)
for name in MODULES:
    importlib.import_module(name)
importlib.import_module("torch").set_num_threads(1)
# What the machine does is no matter of a test: a run looks at it for two seconds and more, before it and after it.
probe = importlib.import_module("shardwise.run.trainer.machine_probe")
probe.BUDGET_S, probe.REPEATS, probe.WARM_UPS, probe.SUMMED, probe.COPIED_BYTES = 0.0, 1, 0, 1, 2**16
gc.collect()
gc.freeze()  # the ranks' collections go through what is theirs alone, and copy no page of the server's
