"""AdamW whose moments of matrices are kept in 8 bits, with a scale for each block of elements."""

from __future__ import annotations

from shardwise.model.optimizers.adamw import OPTIMIZER as ADAMW
from shardwise.model.optimizers.definition import Optimizer

# Of moments of squares, which have no sign, and of others.
MOMENT_FORMATS = {True: "unsigned_dynamic8", False: "dynamic8"}

OPTIMIZER = Optimizer(
    fields=ADAMW.fields,
    updates={
        name: update._replace(format=MOMENT_FORMATS[update.is_second_moment]) if name in ADAMW.moments else update
        for name, update in ADAMW.updates.items()
    },
    fallback=ADAMW,
    covers_vocabulary=True,
    source="Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization; torchao.optim.AdamW8bit and bitsandbytes, which "
    "leave a weight of fewer than 4,096 elements to AdamW; here that is what is no matrix, whatever its size",
)
