"""`torchrun ... -m shardwise.train`: a rank of a run on any number of hosts; without torchrun what `shardwise train` does."""

from __future__ import annotations

import sys

from shardwise.run.faults.rank_status import has_our_launcher
from shardwise.train import main, rank_main, run_and_exit

if __name__ == "__main__":
    if has_our_launcher():  # a rank of our launcher, which prints the summary itself
        run_and_exit(rank_main)
    sys.exit(main())
