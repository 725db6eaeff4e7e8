"""`torchrun ... -m shardwise.train`: a rank of a run on any number of hosts; without torchrun what `shardwise train` does."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from shardwise.errors import ShardwiseError, told
from shardwise.train import rank
from shardwise.train.flags import settings_of
from shardwise.train.start import start
from shardwise.train.stop import INTERRUPTED


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and print the summary where it is at hand: here, or on the first rank."""
    from shardwise.measurement.folder import read_json
    from shardwise.measurement.summary import shown

    arguments = rank.build_parser().parse_args(argv)
    if "RANK" in os.environ:
        code = rank.main(argv)
        if code == 0 and os.environ["RANK"] == "0":
            print(shown(read_json(settings_of(arguments).out.summary), as_json=arguments.json))
        return code
    try:
        print(shown(start(arguments), as_json=arguments.json))
    except ShardwiseError as error:
        print(told(error.problems, error.exit_code, as_json=arguments.json), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
