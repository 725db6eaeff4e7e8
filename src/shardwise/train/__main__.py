"""`torchrun ... -m shardwise.train`: a rank of a run on any number of hosts; without torchrun what `shardwise train` does."""

from __future__ import annotations

import sys

from shardwise.run.faults.rank_status import launched_here
from shardwise.train import ended, main, rank_main

if __name__ == "__main__":
    if launched_here():  # a rank of our launcher, which prints the summary itself
        ended(rank_main)
    sys.exit(main())
