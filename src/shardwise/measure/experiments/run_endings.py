"""The state of an attempt that has ended, from facts: how its command ended, what it printed, what the scheduler says."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.measure.experiments.attempt_files import AttemptResult
from shardwise.measure.experiments.ledger_lines import State

# Sources: torch/cuda/__init__.py, OutOfMemoryError; c10/core/CPUAllocator.cpp; XLA, RESOURCE_EXHAUSTED; NumPy, _ArrayMemoryError.
_OUT_OF_MEMORY = re.compile(
    r"CUDA out of memory|HIP out of memory|OutOfMemoryError|CUDA error: out of memory|RESOURCE_EXHAUSTED: Out of memory|"
    r"DefaultCPUAllocator: (?:can't|not enough) |std::bad_alloc|\bMemoryError\b|Cannot allocate memory"
)
# Reasons that another attempt may not meet again, by what the output says.
_CAUSES = {
    "disk full": re.compile(r"No space left on device|Disk quota exceeded"),
    "port in use": re.compile(r"[Aa]ddress already in use|EADDRINUSE"),
    "connection lost": re.compile(r"NCCL error|NCCL WARN|Connection reset by peer|Connection closed by peer"),
}
CANCELLED = "cancelled"
LOST = "lost"  # cause of an attempt whose process ended without a result
TRANSIENT = (LOST, "killed", *_CAUSES)  # causes after which an attempt is made again
_ERROR_LINE = re.compile(r"^(?:error: |\w*(?:Error|Exception|Interrupt)\b)")
LONGEST_REASON = 300  # characters


@dataclass(frozen=True, slots=True)
class AttemptEnding:
    """State of an ended attempt, its reason as a sentence, and its cause in a few words.

    `is_transient`: another attempt may end otherwise.
    """

    state: State
    reason: str = ""
    cause: str = ""

    @property
    def is_transient(self) -> bool:
        """True if another attempt of the same may end otherwise."""
        return self.state in ("timeout", "hung") or (self.state == "failed" and self.cause in TRANSIENT)


def judge_attempt(
    results: Sequence[AttemptResult | None], output: str, *, limit_s: float, hang_s: float
) -> AttemptEnding:
    """Return the ending of an attempt from the results of its nodes, None for one without, and the end of its output.

    An attempt is done if the command of every node exited with 0. The first of its nodes that did not decides otherwise.

    >>> judge_attempt([AttemptResult(ending="exit", exit_code=0, seconds=3.0)], "", limit_s=60, hang_s=30).state
    'done'
    >>> judge_attempt([AttemptResult(ending="exit", exit_code=-9, seconds=3.0)], "", limit_s=60, hang_s=30)
    AttemptEnding(state='failed', reason='ended by SIGKILL', cause='killed')
    """
    if any(result is None for result in results):
        return AttemptEnding("failed", "its process, or its machine, ended before it wrote a result", LOST)
    bad = next((result for result in results if result and (result.ending != "exit" or result.exit_code)), None)
    if bad is None:
        return AttemptEnding("done")
    if bad.ending == "time limit":
        return AttemptEnding(
            "timeout", f"not done after {bad.seconds:.0f} s, its limit of {limit_s:.0f} s", "time limit"
        )
    if bad.ending == "no heartbeat":
        return AttemptEnding(
            "hung", f"no output and no step for {hang_s:.0f} s, after {bad.seconds:.0f} s", "no heartbeat"
        )
    if bad.ending == "cancelled":
        return AttemptEnding("failed", "cancelled before its end", CANCELLED)
    if bad.ending == "not started":
        return AttemptEnding("failed", f"its command could not be started: {bad.error}", "not started")
    return _judge_exit(bad, output)


def _judge_exit(result: AttemptResult, output: str) -> AttemptEnding:
    """Return the ending of a command that exited by itself, or was killed."""
    if match := _OUT_OF_MEMORY.search(output):
        return AttemptEnding("out of memory", line_around(output, match.start()), "out of memory")
    if result.exit_code == -signal.SIGKILL and result.oom_kills > 0:
        return AttemptEnding(
            "out of memory", "killed by the system as the host ran out of memory", "host out of memory"
        )
    for cause, pattern in _CAUSES.items():
        if match := pattern.search(output):
            return AttemptEnding("failed", line_around(output, match.start()), cause)
    if result.exit_code < 0:
        return AttemptEnding("failed", f"ended by {signal.Signals(-result.exit_code).name}", "killed")
    return AttemptEnding("failed", describe_failure(output, result.exit_code), f"exit code {result.exit_code}")


def describe_failure(output: str, code: int) -> str:
    """Return the error that a program printed last, or else its exit code with its last line.

    >>> describe_failure("step 1\\nerror: no such plan\\n", 2), describe_failure("step 1\\n", 3)
    ('no such plan', 'ended with exit code 3: step 1')
    """
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if _ERROR_LINE.match(line)]
    last_line = "".join(f": {line}" for line in lines[-1:])
    return (errors[-1] if errors else f"ended with exit code {code}{last_line}")[:LONGEST_REASON]


def line_around(text: str, position: int) -> str:
    """Return the line of a text that has a position."""
    start, end = text.rfind("\n", 0, position) + 1, text.find("\n", position)
    return text[start : end if end >= 0 else len(text)].strip()[:LONGEST_REASON]


# States of SLURM. Source: SLURM documentation, sacct, "JOB STATE CODES".
SCHEDULER_ACTIVE = (
    "PENDING", "RUNNING", "REQUEUED", "COMPLETING", "CONFIGURING", "SUSPENDED", "RESIZING", "REQUEUE_HOLD", "SPECIAL_EXIT",
    "STAGE_OUT", "SIGNALING", "STOPPED", "UNKNOWN",
)  # fmt: skip
_SCHEDULER_ENDINGS = {
    "TIMEOUT": AttemptEnding("timeout", "ended by the scheduler at its time limit", "time limit"),
    "DEADLINE": AttemptEnding("timeout", "ended by the scheduler at its deadline", "time limit"),
    "OUT_OF_MEMORY": AttemptEnding("out of memory", "ended by the scheduler as its host ran out of memory", "host out of memory"),
    "NODE_FAIL": AttemptEnding("failed", "a node failed under it", LOST),
    "BOOT_FAIL": AttemptEnding("failed", "a node did not start", LOST),
    "PREEMPTED": AttemptEnding("failed", "preempted, and not requeued", LOST),
    "CANCELLED": AttemptEnding("failed", "cancelled at the scheduler", CANCELLED),
}  # fmt: skip


def judge_scheduler(state: str) -> AttemptEnding | None:
    """Return the ending that a scheduler's state means for an attempt without a result; None while it is active.

    >>> judge_scheduler("RUNNING"), judge_scheduler("CANCELLED by 1000").cause, judge_scheduler("NODE_FAIL").is_transient
    (None, 'cancelled', True)
    """
    word = state.split(" ")[0].upper()
    if word in SCHEDULER_ACTIVE or not word:
        return None
    return _SCHEDULER_ENDINGS.get(word, AttemptEnding("failed", f"{word} at the scheduler, without a result", LOST))
