"""Hypothesis runs the same examples every time, and no example has a time limit; the golden cases' counts are printed."""

from __future__ import annotations

from golden.summary import pytest_configure
from hypothesis import settings

__all__ = ["pytest_configure"]

settings.register_profile("shardwise", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("shardwise")
