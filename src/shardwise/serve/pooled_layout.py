"""Layout of a deployment whose prefill and decode run on instances of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.serve.serving_layout import ServingLayout
from shardwise.values import InputError, did_you_mean, raise_problems

POOLS = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledLayout:
    """Layouts of two pools: instances that compute inputs, and instances that decode with the caches that they are sent.

    The replicas of each are its instances. Source: Zhong et al. 2024, "DistServe: Disaggregating Prefill and Decoding for
    Goodput-optimized Large Language Model Serving".

    >>> layout = PooledLayout.parse("prefill: tp=4 replicas=2; decode: attention_dp=8 ep=8")
    >>> layout.prefill.num_devices, layout.decode.num_devices, layout.num_devices
    (8, 8, 16)
    >>> str(layout)
    'prefill: tp=4 replicas=2; decode: attention_dp=8 ep=8'
    """

    prefill: ServingLayout
    decode: ServingLayout

    @classmethod
    def parse(cls, text: str, label: str = "layout") -> PooledLayout:
        """Return the layout of "prefill: LAYOUT; decode: LAYOUT", in either order; `str` of a layout is such a text.

        Raises `InputError`, which begins with `label`, for a pool that is missing, unknown or named twice, and as
        `ServingLayout.parse` does.
        """
        texts: dict[str, str] = {}
        problems = []
        for part in filter(None, (part.strip() for part in text.split(";"))):
            name, _, layout_text = (piece.strip() for piece in part.partition(":"))
            if name not in POOLS:
                problems.append(
                    f"{label}: found pool {name!r}{did_you_mean(name, POOLS)}; prefill or decode is required"
                )
            elif name in texts:
                problems.append(f"{label}: the {name} pool is given twice")
            texts[name] = layout_text
        problems += [
            f'{label}: the {name} pool is missing; "prefill: LAYOUT; decode: LAYOUT" is required, such as '
            '"prefill: tp=4 replicas=2; decode: tp=8"'
            for name in POOLS
            if name not in texts
        ]
        raise_problems(problems)
        return cls(**{name: ServingLayout.parse(texts[name], f"{label}: {name}") for name in POOLS})

    @property
    def pools(self) -> Mapping[str, ServingLayout]:
        """Layouts of the pools by name."""
        return {name: getattr(self, name) for name in POOLS}

    @property
    def num_devices(self) -> int:
        """Devices of both pools."""
        return self.prefill.num_devices + self.decode.num_devices

    def __str__(self) -> str:
        return f"prefill: {self.prefill}; decode: {self.decode}"

    def __repr__(self) -> str:
        return f"PooledLayout.parse({str(self)!r})"


def parse_any_layout(text: str, label: str = "layout") -> ServingLayout | PooledLayout:
    """Return the layout of a text: of pools where it names one, else of instances that do both.

    Raises `InputError`, which begins with `label`, as the two do.

    >>> parse_any_layout("tp=8"), parse_any_layout("prefill: tp=4; decode: tp=8").num_devices
    (ServingLayout.parse('tp=8'), 12)
    """
    names_pool = re.search(r"[:;]", text)
    if not names_pool and text.strip(" ,"):
        return ServingLayout.parse(text, label)
    if not text.strip(" ;"):
        raise InputError(f"{label}: found {text!r}; KEY=VALUE words are required, or two pools")
    return PooledLayout.parse(text, label)
