"""The plan: one value that holds everything that was decided, and what it was decided from."""

from shardwise.planning.codec import dump_plan, load_plan
from shardwise.planning.plan import Alternative, Plan, SearchSummary

__all__ = ["Alternative", "Plan", "SearchSummary", "dump_plan", "load_plan"]
