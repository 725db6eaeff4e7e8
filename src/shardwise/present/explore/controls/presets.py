"""Jobs to begin with: trainings that were published, each with its source. The layout is left to the search."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shardwise.present.explore.asked import Asked
from shardwise.present.explore.controls.control import Control, Edit, Option, select
from shardwise.values import format_binary

OWN = "none"  # the name of a job that is no preset


class Preset(NamedTuple):
    """A job by the values of an address, and who trained it, or reckons with it."""

    name: str
    model: str
    cluster: str
    batch_tokens: int
    seq_len: int
    precision: str
    source: str

    @property
    def edit(self) -> Edit:
        """What of an address it changes."""
        return {
            "model": self.model, "cluster": self.cluster, "batch_tokens": format_binary(self.batch_tokens),
            "seq_len": str(self.seq_len), "precision": self.precision, "layout": None, "stack": None, "overlap": None,
        }  # fmt: skip


PRESETS = (
    Preset("GPT-2 on 8 A100", "gpt-2", "a100-40gb:8", 480 * 1024, 1024, "bf16",
           "karpathy/nanoGPT, config/train_gpt2.py: 480 sequences of 1,024 tokens on a node of 8 A100 with 40 GB"),
    Preset("GPT-3 175B on 1,024 A100", "gpt-3-175b", "a100-80gb:1024", 1536 * 2048, 2048, "bf16",
           "Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021, section 5.1"),
    Preset("Llama 3 70B on 8,960 TPU v5p", "llama-3-70b", "tpu-v5p:16x20x28", 1024 * 4096, 4096, "bf16",
           "Austin et al., How to Scale Your Model, 2025, Training LLaMA 3 on TPUs"),
    Preset("Llama 3 405B on 16,384 H100", "llama-3-405b", "h100:16384", 2048 * 8192, 8192, "bf16",
           "Llama Team, The Llama 3 Herd of Models, 2024, table 4"),
    Preset("DeepSeek-V3 on 2,048 H800", "deepseek-v3", "h800:2048", 15360 * 4096, 4096, "fp8_deepseek_v3",
           "DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv 2412.19437, sections 3 and 4.2"),
)  # fmt: skip


def preset_control(asked: Asked, group: str) -> Control:
    """The presets as one choice; what an address has of the model's sizes goes with the model."""
    anew: Edit = {key: None for key, _ in asked.state.changes}
    options = (Option(value=one.name, edit={**anew, **one.edit}, note=one.source) for one in PRESETS)
    chosen = next((one.name for one in PRESETS if _is(asked, one)), OWN)
    return select("preset", "preset", group, chosen, [*_own(chosen), *options])


def _own(chosen: str) -> Iterator[Option]:
    if chosen == OWN:
        yield Option(value=OWN, edit={})


def _is(asked: Asked, preset: Preset) -> bool:
    state = asked.state
    return not state.changes and preset[1:6] == (
        state.model, state.cluster, state.batch_tokens, state.seq_len, state.precision,
    )  # fmt: skip
