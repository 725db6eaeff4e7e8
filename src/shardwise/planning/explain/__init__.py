"""Why this plan: does it fit, does it reach the batch, what bounds its throughput, what was left out and by how much.

reasons   one layout against another in a sentence, and the lead it cannot tell apart
story     the three steps of the playbook's decision procedure, as values
options   what else could have been done, and the step at which it drops out
constants which measured constant moves the step the most
against   any other layout, term by term
critical_batch  which side of the critical batch a plan lies on, and what the next doubling gains
losses    which kind of loss would make a layout fit
terms     one term: its formula, its inputs, the expression that it was read off
report    all of it, as one value; payload: as plain data
"""

from shardwise.planning.explain.losses import leaner_losses, loss_would
from shardwise.planning.explain.reasons import (
    MEMORY_RESERVE,
    MODEL_ERROR,
    RESOLUTION,
    changed_fields,
    num_changes,
    offload_would,
    smallest_miss,
    verdict,
    why_slower,
)
from shardwise.planning.explain.report import Explanation, explain

__all__ = [
    "MEMORY_RESERVE",
    "MODEL_ERROR",
    "RESOLUTION",
    "Explanation",
    "changed_fields",
    "explain",
    "leaner_losses",
    "loss_would",
    "num_changes",
    "offload_would",
    "smallest_miss",
    "verdict",
    "why_slower",
]
