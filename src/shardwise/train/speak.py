"""Of ranks that end with the same error one speaks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from shardwise.errors import ShardwiseError

# A rank that ends has the launcher end all others at once: those that do not speak wait for the one that does.
SPEAK_S = 2.0


@contextmanager
def first_of_host_speaks() -> Iterator[None]:
    """Around what every rank finds alike before the ranks meet: `ShardwiseError` is raised on the first rank of a host alone."""
    try:
        yield
    except ShardwiseError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            end_quietly(error.exit_code)
        raise


def end_quietly(code: int) -> NoReturn:
    """End with a code, as another rank says why."""
    time.sleep(SPEAK_S)
    raise SystemExit(code)
