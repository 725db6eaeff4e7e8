"""Fit the constants of chips and stacks to the published runs, and say how good predictions are where they were not fitted.

    python benchmarks/published.py            # folds only
    python benchmarks/published.py --write    # and src/shardwise/cluster/measured/constants.toml

Takes about a minute on one core.
"""

from __future__ import annotations

import argparse
import sys
import time

from shardwise.reconcile.calibrate.published import fit_published, fold_report
from shardwise.reconcile.calibrate.record import constants_toml, write_constants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the constants into the package")
    arguments = parser.parse_args()
    started = time.process_time()
    result = fit_published(progress=lambda text: print(text, file=sys.stderr, flush=True))
    print(fold_report(result))
    print(f"{time.process_time() - started:.0f} s of CPU")
    if arguments.write:
        write_constants(constants_toml(result))


if __name__ == "__main__":
    main()
