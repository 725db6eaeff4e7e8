"""How many blocks each pipeline stage holds.

The embedding and the head count as a block each, and virtual stages differ by at most one (126 blocks on 16 stages are
7 + 14 times 8 + 7). What is left over goes to the interior stages first.
"""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=4096)
def layers_per_stage(num_layers: int, pp: int, num_virtual_stages: int) -> tuple[int, ...]:
    """Blocks on each of `pp` stages, each with its virtual stages i, i + pp, i + 2 pp, ... added up."""
    count = pp * num_virtual_stages
    ends = 2 if count > 1 and (num_layers + 2) // count >= 2 else 0
    base, extra = divmod(num_layers + ends, count)
    order = [*range(1, count - 1), 0, count - 1] if count > 1 else [0]
    blocks = [base] * count
    for stage in order[:extra]:
        blocks[stage] += 1
    if ends:
        blocks[0] -= 1
        blocks[-1] -= 1
    return tuple(sum(blocks[stage::pp]) for stage in range(pp))
