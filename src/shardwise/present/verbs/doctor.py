"""`doctor`: what is installed, what this machine is, and which verbs work here."""

from __future__ import annotations

from shardwise import present
from shardwise.present.verb import verb


@verb(
    description="Say what is installed and which extra of shardwise brings what is missing, what this machine is (processor, "
    "memory, disk, GPUs, communication backends), and for every verb whether it works here, or the command that makes it work.",
    examples=("shardwise doctor", "shardwise doctor --json"),
    group_order=("output",),
)
def doctor() -> present.Diagnosis:
    """Return the packages that are installed, what this machine is, and which verbs work here.

    >>> import shardwise as sw
    >>> [verb.works for verb in sw.doctor().verbs if verb.name == "plan"]
    [True]
    """
    return present.diagnose()
