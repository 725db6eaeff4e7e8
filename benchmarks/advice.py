"""Whether a plan for which no stack is named is good advice under each of the stacks that could run it.

    python benchmarks/advice.py [--question 70B]

Twelve questions, from a model on one node to thousands of devices. The pick of `plan` without a stack is priced under each stack
that can run it, and so is every layout that a search for one of these stacks finds: the *best single pick* is the one whose
mean over these stacks, each against its own best, is the least. Prints for each question the pick, how far it is above that
single pick, and how far the two are above each stack's own best. The exit status is 1 where the mean is above `BAR`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean
from typing import NamedTuple

from shardwise.hardware.cluster import Cluster
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.stacks import STACK_KINDS, Stack, get_stack, stack_names
from shardwise.layout.choices import Choices
from shardwise.layout.layout import Layout
from shardwise.layout.rules.stack_abilities import unsupported_choices
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.price import Problem
from shardwise.price.estimate import estimate
from shardwise.search.balance_stages import StageBalancer
from shardwise.search.planner import make_plan
from shardwise.search.vectorised.search_layouts import search_layouts
from shardwise.search.verdicts import MEMORY_RESERVE
from shardwise.values.errors import NothingFitsError, ShardwiseError

BAR = 0.05  # of the pick above the best single pick, mean over the questions
NUM_TRIED = (
    16  # layouts of each stack's search that are tried under the others: the fastest, each of degrees of its own
)


class Question(NamedTuple):
    """A model, a cluster, and a batch of sequences."""

    model: str
    cluster: str
    num_seqs: int
    seq_len: int

    def __str__(self) -> str:
        return f"{self.model} on {self.cluster}"


# Batches are those of published runs: 4Mi tokens and 16Mi tokens of Llama 3 (arXiv 2407.21783, section 3.4.1), 15,360 sequences
# of 4,096 of DeepSeek-V3 (arXiv 2412.19437, section 4.2); 1Mi for one node, as of NVIDIA's recipes for Llama 3 8B (128 x 8,192).
QUESTIONS = (
    Question("llama-3-8b", "h100:8", 128, 8192),
    Question("llama-3-8b", "h100:64", 512, 8192),
    Question("llama-3-8b", "h100:512", 512, 8192),
    Question("llama-3-70b", "h100:64", 512, 8192),
    Question("llama-3-70b", "h100:512", 512, 8192),
    Question("llama-3-70b", "h100:2048", 2048, 8192),
    Question("llama-3-405b", "h100:1024", 2048, 8192),
    Question("llama-3-405b", "h100:16384", 2048, 8192),
    Question("mixtral-8x7b", "h100:64", 1024, 4096),
    Question("qwen3-30b-a3b", "h100:64", 1024, 4096),
    Question("deepseek-v3", "h800:2048", 15360, 4096),
    Question("llama-3-70b", "tpu-v5p:8x8x16", 1024, 8192),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The pick for a question, and seconds of a step under each stack that can run it: of the pick, of the best single pick, and
    of the stack's own best."""

    question: Question
    pick: Layout
    single: Layout
    seconds: Mapping[str, tuple[float, float, float]]

    @property
    def above_single(self) -> float:
        """By how much the pick takes longer than the best single one, mean over the stacks."""
        return fmean(pick / single - 1 for pick, single, _ in self.seconds.values())

    def above_best(self, of: int) -> float:
        """By how much the pick (0) or the best single one (1) takes longer than each stack's own best, mean."""
        return fmean(row[of] / row[2] - 1 for row in self.seconds.values())


def answer(question: Question) -> Answer:
    """Plan, search under each stack that can run the plan, and price everything under all of them."""
    model = load_model(question.model)
    job = Job(global_batch_tokens=question.num_seqs * question.seq_len, seq_len=question.seq_len)
    pick = make_plan(Problem(model, load_cluster(question.cluster), job)).layout
    stacks = [stack for stack in _stacks(question) if _seconds(model, question, job, stack, pick) is not None]
    layouts_by_stack = {stack.name: list(_fastest_layouts(model, question, job, stack)) for stack in stacks}
    fastest_by_stack = {name: rows[0] for name, rows in layouts_by_stack.items()}
    tried = {layout: None for rows in layouts_by_stack.values() for layout, _ in rows} | {pick: None}
    runs_everywhere = {layout: row for layout in tried if (row := _under(model, question, job, stacks, layout))}
    best = {
        name: min([seconds, *(row[name] for row in runs_everywhere.values())])
        for name, (_, seconds) in fastest_by_stack.items()
    }
    single = min(runs_everywhere, key=lambda layout: fmean(runs_everywhere[layout][name] / best[name] for name in best))
    return Answer(
        question=question, pick=pick, single=single,
        seconds={name: (runs_everywhere[pick][name], runs_everywhere[single][name], best[name]) for name in best},
    )  # fmt: skip


def _stacks(question: Question) -> Iterable[Stack]:
    """Stacks that published runs are of, by name, that run on the question's chip."""
    platform = load_cluster(question.cluster).chip.platform
    return [
        stack for name in stack_names() if name not in STACK_KINDS if platform in (stack := get_stack(name)).platforms
    ]


@lru_cache(maxsize=64)
def _cluster(question: Question, stack: Stack) -> Cluster:
    return load_cluster(question.cluster, stack=stack.name)


def _fastest_layouts(model: Architecture, question: Question, job: Job, stack: Stack) -> Iterable[tuple[Layout, float]]:
    """The fastest layouts under a stack, the best first: each the fastest of its way to factor the devices over the axes."""
    cluster, stack_job = _cluster(question, stack), replace(job, loss=stack.loss)
    choices = Choices().limit_to_stack(stack, model, job, cluster.scale_up_size)
    try:
        result = search_layouts(
            Problem(model, cluster, stack_job), choices=choices, top=NUM_TRIED, reserve=MEMORY_RESERVE
        )
    except NothingFitsError:
        return
    if "balanced" in choices.stages and result.best:
        result = StageBalancer(
            model, cluster, stack_job, cluster.chip.memory_bytes * (1 - MEMORY_RESERVE)
        ).balance_result(result)
    rows = {row.layout: row.step_time_s for row in (*result.best[:1], *result.by_factorisation)}
    yield from sorted(rows.items(), key=lambda row: row[1])[:NUM_TRIED]


def _under(
    model: Architecture, question: Question, job: Job, stacks: Iterable[Stack], layout: Layout
) -> dict[str, float]:
    """Seconds of a layout under each of the stacks; none where one of them cannot run it."""
    seconds_by_stack: dict[str, float] = {}
    for stack in stacks:
        seconds = _seconds(model, question, job, stack, layout)
        if seconds is None:
            return {}
        seconds_by_stack[stack.name] = seconds
    return seconds_by_stack


def _seconds(model: Architecture, question: Question, job: Job, stack: Stack, layout: Layout) -> float | None:
    """Seconds of a layout under a stack, which overlaps tensor parallelism where it can; None where it does not run or fit."""
    stack_job = replace(job, loss=stack.loss)
    layout = replace(layout, async_tp=stack.abilities.async_tp and layout.sequence_parallel and layout.tp > 1)
    if unsupported_choices(stack, model, stack_job, layout):
        return None
    try:
        estimated = estimate(Problem(model, _cluster(question, stack), stack_job), layout)
    except ShardwiseError:
        return None
    return estimated.step_time_s if estimated.fits else None


def table(answers: Iterable[Answer]) -> str:
    """The answers for people, and their mean."""
    lines = [f"{'above the best single pick':>30}{'above own bests':>18}{'single above':>14}{'stacks':>8}"]
    every = list(answers)
    for answered in every:
        lines += [
            f"{answered.question}",
            f"{answered.above_single:>30.1%}{answered.above_best(0):>18.1%}{answered.above_best(1):>14.1%}{len(answered.seconds):>8}",
            f"  pick    {answered.pick}",
            f"  single  {answered.single}",
        ]
    lines.append(
        f"mean of {len(every)}: {fmean(answered.above_single for answered in every):.1%} above the best single pick, "
        f"{fmean(answered.above_best(0) for answered in every):.1%} above each stack's own best"
    )
    return "\n".join(lines)


def main() -> int:
    """Print the table; the exit status says whether the mean is within the bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--question", default="", help="only questions whose text has this")
    arguments = parser.parse_args()
    answers = [answer(question) for question in QUESTIONS if arguments.question.lower() in str(question).lower()]
    print(table(answers))
    return 0 if fmean(answered.above_single for answered in answers) <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
