"""Split of a served model: the degrees and forms of one instance of an engine, and how many instances there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from shardwise.derive.inference_unit import Dispatch
from shardwise.values import InputError, did_you_mean, parse_count, raise_problems

CacheSplit = Literal["heads", "heads_then_batch"]
# Values of the forms: choices that degrees leave open. The first is what an engine does without an option.
FORMS: Mapping[str, tuple[str, ...]] = {
    "dispatch": ("all_gather", "all_to_all"), "cache_split": ("heads", "heads_then_batch"),
}  # fmt: skip
FORM_DEGREES = ("ws", *FORMS)  # of which no published row has another value than the first


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLayout:
    """Degrees of one instance of an engine, and `replicas`, instances that share nothing but the requests.

    `tp` splits attention by heads; where it exceeds the key-value heads, devices keep copies of them. `attention_dp` splits the
    requests over copies of attention inside one instance, each with a cache of its own. Experts are split over the same
    tp · attention_dp devices: by expert over `ep`, and each expert's matrices over `expert_tp` (None: what `ep` leaves). A dense
    MLP is split over `tp`. `pp` splits the layers, `cp` the tokens of a prefill, `ws` the width of hidden states and of all
    weights (2-D weight-stationary: Pope et al. 2023, "Efficiently Scaling Transformer Inference", 3.2.2).

    `dispatch` says how tokens reach their experts: `all_gather`, each device gets the tokens of all copies of attention, and
    results are reduced; or `all_to_all`, each token is sent to the devices of its experts and back. `redundant_experts` are
    copies of experts beside the model's (DeepSeek-AI 2025, DeepSeek-V3, 3.4.2). `cache_split` says where the cache rests beyond
    the key-value heads: in copies (`heads`), or a part of the sequences on each device (`heads_then_batch`: Pope et al., 3.3).

    Raises `InputError` with every value that no layout has. Whether a model allows it is checked when it is priced.

    >>> layout = ServingLayout.parse("tp=2 attention_dp=4 ep=8 replicas=2")
    >>> layout.expert_tp_degree, layout.devices_per_replica, layout.num_devices
    (1, 8, 16)
    >>> ServingLayout.parse("attention_dp=8 ep=8 dispatch=all_to_all redundant_experts=8").dispatch
    'all_to_all'
    """

    tp: int = 1
    attention_dp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int | None = None
    ws: int = 1
    replicas: int = 1
    dispatch: Dispatch = "all_gather"
    redundant_experts: int = 0
    cache_split: CacheSplit = "heads"

    @classmethod
    def parse(cls, text: str, label: str = "layout") -> ServingLayout:
        """Return the layout of a text of KEY=VALUE words, separated by spaces or commas; `str` of a layout is such a text.

        Raises `InputError`, which begins with `label`, for unknown words and for values that no layout has.
        """
        values: dict[str, Any] = {}
        for word in text.replace(",", " ").split():
            key, equals, value = word.partition("=")
            if not equals or key not in DEFAULTS:
                hint = f" (did you mean {ALIASES[key]!r}?)" if key in ALIASES else did_you_mean(key, tuple(DEFAULTS))
                raise InputError(
                    f"{label}: found {word!r}{hint}; KEY=VALUE with a key of {', '.join(DEFAULTS)} is required"
                )
            if key in values:
                raise InputError(f"{label}: {key} is given twice")
            values[key] = value if key in FORMS else parse_count(value, label=f"{label}: {key}", minimum=LEAST[key])
        return cls(**values)

    def __post_init__(self) -> None:
        problems = [
            f"layout: {name} is {value!r}; a whole number of at least {LEAST[name]} is required"
            for name, value in asdict(self).items()
            if name not in FORMS
            and not (name == "expert_tp" and value is None)
            and (isinstance(value, bool) or not isinstance(value, int) or value < LEAST[name])
        ]
        problems += [
            f"layout: {name} is {value!r}{did_you_mean(value, allowed)}; one of {', '.join(allowed)} is required"
            for name, allowed in FORMS.items()
            if (value := getattr(self, name)) not in allowed
        ]
        if not problems:
            width = self.tp * self.attention_dp
            if self.expert_tp is None and width % self.ep:
                problems.append(f"layout: ep is {self.ep}; a divisor of tp * attention_dp = {width} is required")
            if self.expert_tp is not None and self.ep * self.expert_tp != width:
                problems.append(
                    f"layout: ep * expert_tp is {self.ep * self.expert_tp}; tp * attention_dp = {width} is required: the "
                    "experts are split over the devices of attention"
                )
        raise_problems(problems)

    @property
    def expert_tp_degree(self) -> int:
        """Degree by which each expert's matrices are split."""
        return self.expert_tp or self.tp * self.attention_dp // self.ep

    @property
    def devices_per_replica(self) -> int:
        """Devices of one instance."""
        return self.tp * self.attention_dp * self.pp * self.cp * self.ws

    @property
    def num_devices(self) -> int:
        """Devices of all instances."""
        return self.devices_per_replica * self.replicas

    @property
    def attention_copies(self) -> int:
        """Groups of devices with requests of their own, over all replicas."""
        return self.attention_dp * self.replicas

    @property
    def forms(self) -> tuple[str, ...]:
        """Forms that differ from what engines do without an option, as words of the layout."""
        return tuple(
            f"{name}={value}" for name in FORM_DEGREES if (value := getattr(self, name)) != DEFAULTS[name]
        )  # fmt: skip

    def with_replicas(self, replicas: int) -> ServingLayout:
        """Return the layout with another number of instances."""
        return replace(self, replicas=replicas)

    def __str__(self) -> str:
        parts = [
            f"{name}={value}" for name, value in asdict(self).items() if name != "expert_tp" and value != DEFAULTS[name]
        ]
        if self.ep > 1 and self.expert_tp_degree > 1:
            parts.append(f"expert_tp={self.expert_tp_degree}")
        return " ".join(parts) or "tp=1"

    def __repr__(self) -> str:
        return f"ServingLayout.parse({str(self)!r})"


DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in fields(ServingLayout)}
LEAST: Mapping[str, int] = {name: 0 if name == "redundant_experts" else 1 for name in DEFAULTS}
# What engines call a degree.
ALIASES: Mapping[str, str] = {
    "dp": "attention_dp", "tensor_parallel_size": "tp", "data_parallel_size": "attention_dp", "pipeline_parallel_size": "pp",
    "moe_tp": "expert_tp", "etp": "expert_tp", "moe_ep": "ep", "expert_parallel_size": "ep", "adp": "attention_dp",
}  # fmt: skip
