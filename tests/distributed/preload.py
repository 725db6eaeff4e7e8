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
    "shardwise.data.batches",
)
for name in MODULES:
    importlib.import_module(name)
importlib.import_module("torch").set_num_threads(1)
gc.collect()
gc.freeze()  # the ranks' collections go through what is theirs alone, and copy no page of the server's
