"""Of ranks that end with the same error only one reports it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.errors import ShardwiseError
from shardwise.train.stop import StopRequest
from shardwise.train.waits import LostRankError

# How long a rank waits for the first one of its host to have reported what both have found, before it reports it itself.
REPORT_S = 60.0


@contextmanager
def first_of_host_reports(stop: StopRequest | None) -> Iterator[None]:
    """Around what every rank finds alike before the ranks meet: `ShardwiseError` is raised on the first rank of a host alone.

    A launcher asks all to stop as soon as one has ended. So the others wait to be asked, and it is the first one that ends first.
    """
    try:
        yield
    except LostRankError:
        raise
    except ShardwiseError as error:
        if stop is not None and os.environ.get("LOCAL_RANK", "0") != "0" and stop.wait(REPORT_S):
            raise SystemExit(error.exit_code) from None
        raise
