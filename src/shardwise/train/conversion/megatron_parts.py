"""The parts of a model that ranks of Megatron-LM keep, along tp, pp and ep; experts are split along tp as the rest is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from shardwise.errors import require
from shardwise.model.architecture import Architecture
from shardwise.train.conversion.places import Part

SPLIT = "KFMS"  # dims that `tp` splits: groups of queries with their keys, and the widths of MLPs, experts and shared experts
DIVISIBLE = 128  # what a vocabulary is padded to a multiple of, times tp: --make-vocab-size-divisible-by (training/arguments.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Degrees of Megatron-LM's ranks, and the rows that a vocabulary is padded to a multiple of on each of them."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    divisible: int = DIVISIBLE

    def require(self, architecture: Architecture) -> None:
        """Raise `InputError` where the model cannot be split so."""
        widths = {name: getattr(architecture, name) for name in ("d_ff", "dense_d_ff", "shared_expert_width")}
        asked = {
            "tp": {"num_kv_heads": architecture.num_kv_heads, **widths}, "pp": {"num_layers": architecture.num_layers},
            "ep": {"num_experts": architecture.num_experts},
        }  # fmt: skip
        problems = [
            f"--{axis}: found {getattr(self, axis)}; a divisor of {name} = {size} of {architecture.name} is required"
            for axis, sizes in asked.items()
            for name, size in sizes.items()
            if size % getattr(self, axis)
        ]
        if self.ep > 1 and not architecture.num_experts:
            problems.append(f"--ep: found {self.ep}; {architecture.name} has no experts, so that 1 is required")
        require(problems)

    def padded(self, vocab_size: int) -> int:
        """Rows of a vocabulary on all ranks together."""
        multiple = self.divisible * self.tp
        return -(-vocab_size // multiple) * multiple

    def folder(self, tp: int, pp: int, ep: int) -> str:
        """Of a rank's file (get_checkpoint_name in training/checkpointing.py)."""
        return f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if self.pp > 1 else "") + (f"_{ep:03d}" if self.ep > 1 else "")


def even_stages(architecture: Architecture, pp: int) -> list[range]:
    """The layers of each stage."""
    count = architecture.num_layers // pp
    return [range(stage * count, (stage + 1) * count) for stage in range(pp)]


def rank_parts(
    architecture: Architecture, degrees: Degrees, stages: Sequence[range], rows: int
) -> Iterator[tuple[tuple[int, int, int], Part]]:
    """Of each rank along tp, pp and ep its part, by the layers of each stage and the rows of the padded vocabulary."""
    for tp, stage, ep in product(range(degrees.tp), range(len(stages)), range(degrees.ep)):
        sizes, begins = dict(architecture.dims), {}
        for dim in SPLIT:
            sizes[dim] = max(sizes[dim] // degrees.tp, 1)
            begins[dim] = tp * sizes[dim]
        begins["V"] = min(tp * rows // degrees.tp, architecture.vocab_size)
        sizes["V"] = min(rows // degrees.tp, architecture.vocab_size - begins["V"])
        sizes["Z"] = rows // degrees.tp - sizes["V"]
        experts = architecture.num_experts // degrees.ep
        ends = {"embedding"} if stage == 0 else set()
        yield (tp, stage, ep), Part(
            sizes=sizes, begins=begins, layers=stages[stage], experts=range(ep * experts, (ep + 1) * experts),
            ends=frozenset(ends | ({"head"} if stage == len(stages) - 1 else set())),
        )  # fmt: skip
