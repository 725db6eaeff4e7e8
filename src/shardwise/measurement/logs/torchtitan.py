"""torchtitan: a line with tokens/s of one device; no time of a step. Its tags have one. Means over `log_freq` steps."""

from __future__ import annotations

import re

from shardwise.measurement.logs.logged import GIB, LogFormat, LoggedStep, Tag, above_zero, number, of_unit, percent

# Every field but the last is followed by a blank and the last by what closes it, so that a number that was cut off is not taken
# for a whole one. Bounds keep the time of a search short, whatever a line has.
_STEP = re.compile(r"(?<!validate )\bstep:\s{0,16}(\d{1,12})\s")
_FIELDS = {
    name: re.compile(rf"\b{name}:\s{{0,16}}{value}")
    for name, value in {
        "loss": r"(\S{1,32})\s", "memory": r"([\d.]{1,32})GiB\(", "tps": r"([\d,]{1,32})\s", "tflops": r"([\d,.]{1,32})\s",
        "mfu": r"([\d.]{1,32})%",
    }.items()
}  # fmt: skip


def _step(text: str) -> LoggedStep | None:
    found = _STEP.search(text)
    if not found:
        return None
    glued = _STEP.search(text, found.end())  # another rank's line behind this one
    own = text[found.end() - 1 : glued.start() if glued else None]
    said = {name: match[1] for name, field in _FIELDS.items() if (match := field.search(own))}
    tokens_per_s, loss = above_zero(said.get("tps")), number(said.get("loss"))
    if tokens_per_s is None:
        return None
    return LoggedStep(
        step=int(found[1]), tokens_per_s=tokens_per_s, tflops=above_zero(said.get("tflops")), mfu=percent(said.get("mfu")),
        loss=loss if loss is None or loss >= 0 else None,  # ranks in front of a pipeline's last stage print -1
        memory_bytes=of_unit(said.get("memory"), GIB),
    )  # fmt: skip


TAGS = {
    "throughput(tps)": Tag("tokens_per_s"), "time_metrics/end_to_end(s)": Tag("step_time_s"), "tflops": Tag("tflops"),
    "mfu(%)": Tag("mfu", 0.01), "memory/max_reserved(GiB)": Tag("memory_bytes", GIB), "loss_metrics/global_avg_loss": Tag("loss"),
}  # fmt: skip
FORMAT = LogFormat(
    name="torchtitan", title="torchtitan", source="torchtitan 0.2.2 and 0.3.0, components/metrics.py, MetricsProcessor.log",
    markers=(b"tps:",), others=(b"validate step:",), step=_step, tags=TAGS,
)  # fmt: skip
