"""What the server that starts the ranks imports, so that they need not."""

from __future__ import annotations

import gc
import importlib

MODULES = (
    "pytest",
    "torch.distributed",
    "torch._dynamo",  # every optimizer of PyTorch's loads it
    "shardwise.derive.derivation",
    "shardwise.planning.plan",
    "shardwise.train.checkpoint",
    "shardwise.train.trainer",
    "shardwise.train.rank",
    "shardwise.train.parts",
    "shardwise.train.run",
    "shardwise.cli",
    "shardwise.data.batches",
)
for name in MODULES:
    importlib.import_module(name)
importlib.import_module("torch").set_num_threads(1)
# What the machine does is no matter of a test: a run looks at it for two seconds and more, before it and after it.
probe = importlib.import_module("shardwise.train.probe")
probe.BUDGET_S, probe.REPEATS, probe.WARM_UPS, probe.SUMMED, probe.COPIED_BYTES = 0.0, 1, 0, 1, 2**16
gc.collect()
gc.freeze()  # the ranks' collections go through what is theirs alone, and copy no page of the server's
