"""Shards of tokens that are given, without a text or a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from train.shard_files import Documents, write_shards

from shardwise.run.data.token_shard_reader import TokenShards

WriteShards = Callable[..., TokenShards]


@pytest.fixture(scope="module")
def shards_of(tmp_path_factory: pytest.TempPathFactory) -> WriteShards:
    """Writes documents, each into a new folder, and opens the shards: for any number of examples of a property."""
    place, numbers = tmp_path_factory.mktemp("shards"), count()

    def write(documents: Documents, held_out: Documents = (), **settings: Any) -> TokenShards:
        return write_shards(place / str(next(numbers)), documents, held_out, **settings)

    return write
