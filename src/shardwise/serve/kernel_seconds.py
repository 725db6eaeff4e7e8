"""Seconds of the parts of a pass on one chip: products by the format of their weights, attention, launches, collectives.

Each part takes the longer of what it moves over the memory's rate and what it computes over the peak, rounded where the two are
close (`slower_of`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardwise.hardware import Cluster
from shardwise.hardware.chips import Chip
from shardwise.hardware.network.pods import Pods
from shardwise.hardware.network.switches import Switched
from shardwise.hardware.network.topology import Topology
from shardwise.serve.formats import ServingFormats, WeightFormat, get_weight_format
from shardwise.serve.pass_work import Column, PassCollective, PassWork, Products, Routing
from shardwise.serve.serving_constants import ServingConstants

ACTIVATION_BYTES = 2.0  # of one element of hidden states, on links and in memory
STATE_BYTES = 4.0  # states of recurrences rest in fp32
NETWORK_HOPS = 4.0  # a hop between nodes takes this many times one inside (NCCL's tuning model: 2 to 5)
HOPPER = ("h100", "h200", "h800")
AMPERE = ("a100-40gb", "a100-80gb", "a100-80gb-pcie")
# Formats of weights that chips with fp4 units multiply with activations of 8 bits, where others multiply them in bf16. Source:
# TensorRT-LLM, quantization, W4A8_MXFP4_MXFP8 on Blackwell.
BLOCK_SCALED: Mapping[str, str] = {"mxfp4": "fp8"}
WIDER: Mapping[str, str] = {
    "fp4": "fp8",
    "fp8": "bf16",
    "int8": "bf16",
    "bf16": "fp16",
}  # where a chip has no such products


def slower_of(first: Column, second: Column) -> Column:
    """Return the longer of two times that overlap: the norm of order 3, which is a quarter above either where they are equal."""
    longer: Column = np.cbrt(first * first * first + second * second * second)
    return longer


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRates:
    """Format of one group of weights on a chip: bytes of an element, FLOP/s of products with it, and which factors it takes."""

    element_bytes: Column
    peak: Column
    is_fp4: Column
    is_int4: Column
    is_fp8: Column

    @classmethod
    def of(cls, chip: Chip, weight_format: WeightFormat) -> GroupRates:
        """Return the rates of a format on a chip."""
        product = weight_format.product
        if weight_format.name in BLOCK_SCALED and "fp4" in chip.peak_flops_per_s:
            product = BLOCK_SCALED[weight_format.name]
        return cls(
            element_bytes=weight_format.bytes_per_element, peak=format_peak(chip, product), is_fp4=float(product == "fp4"),
            is_int4=float(product == "bf16" and weight_format.element_bytes == 0.5), is_fp8=float(product == "fp8"),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRates:
    """Rates of chips and formats, numbers or a column each, under an engine's constants: all that seconds follow from.

    `groups` by group of weights; `link_bytes_per_s` of a device inside a domain of `domain` devices, `network_bytes_per_s`
    beyond. `is_hopper`, `is_ampere` and `is_narrow` (weights below 16 bits are multiplied in their format) are 0 or 1.
    """

    constants: ServingConstants
    groups: Mapping[str, GroupRates]
    memory_bytes_per_s: Column
    half_peak: Column
    cache_bytes: Column
    domain: Column
    link_bytes_per_s: Column
    network_bytes_per_s: Column
    is_hopper: Column
    is_ampere: Column
    is_narrow: Column

    @classmethod
    def of(cls, cluster: Cluster, formats: ServingFormats, constants: ServingConstants) -> ServingRates:
        """Return the rates of a cluster's chip and links."""
        chip = cluster.chip
        domain, link, network = _links(cluster.topology, cluster.num_devices)
        narrow, bf16 = formats.weight_format, get_weight_format("bf16")
        by_group = {
            "attention": formats.attention_format, "recurrence": formats.attention_format, "mlp": narrow,
            "experts": formats.expert_format, "router": bf16, "vocabulary": bf16, "norm": bf16, "prediction": bf16,
            "streams": bf16,
        }  # fmt: skip
        return cls(
            constants=constants, groups={group: GroupRates.of(chip, part) for group, part in by_group.items()},
            memory_bytes_per_s=chip.memory_bytes_per_s, half_peak=format_peak(chip, "bf16"), cache_bytes=formats.cache_bytes,
            domain=domain, link_bytes_per_s=link, network_bytes_per_s=network,
            is_hopper=float(chip.catalog_name in HOPPER), is_ampere=float(chip.catalog_name in AMPERE),
            is_narrow=float("bf16" not in (narrow.product, formats.expert_format.product)),
        )  # fmt: skip

    @property
    def routing(self) -> Routing:
        """Choice of experts by tokens."""
        return Routing(self.constants.routing_skew, self.constants.expert_imbalance)

    def product_seconds(self, group: str, products: Products, *, has_prompt: bool) -> Column:
        """Return the seconds of the products with a group of weights."""
        constants, rates = self.constants, self.groups[group]
        is_expert = group == "experts"
        share = constants.expert_share if is_expert else constants.weight_share
        flops_share = constants.decode_share
        if has_prompt:
            flops_share = constants.expert_prompt_share if is_expert else constants.prompt_share
        read_s = products.elements * (rates.element_bytes / (self.memory_bytes_per_s * share))
        compute_s = products.flops / (rates.peak * flops_share)
        factor = 1.0 + (constants.fp4_factor - 1.0) * rates.is_fp4
        if is_expert:
            factor = (
                1.0
                + (constants.fp4_expert_factor - 1.0) * rates.is_fp4
                + (constants.int4_expert_factor - 1.0) * rates.is_int4
                + (constants.fp8_expert_factor - 1.0) * rates.is_fp8
            )
        return slower_of(read_s, compute_s) * factor

    def attention_seconds(self, work: PassWork) -> Column:
        """Return the seconds of decoding sequences' attention, and of recurrent states."""
        rate = self.memory_bytes_per_s
        read_s = work.cache_elements * (self.cache_bytes / (rate * self.constants.cache_share))
        compute_s = work.decode_flops / (self.half_peak * self.constants.decode_attention_share)
        return slower_of(read_s, compute_s) + work.state_elements * (STATE_BYTES / (rate * self.constants.weight_share))

    def prompt_attention_seconds(self, work: PassWork) -> Column:
        """Return the seconds of a chunk's attention."""
        return work.prompt_flops / (self.half_peak * self.constants.prompt_attention_share)

    def activation_seconds(self, work: PassWork) -> Column:
        """Return the seconds of kernels that only move activations: norms, gates, casts."""
        return work.activation_elements * (ACTIVATION_BYTES / (self.memory_bytes_per_s * self.constants.weight_share))

    def launch_seconds(self, work: PassWork) -> Column:
        """Return the seconds that launches take beyond what kernels move and compute."""
        factor = 1.0 + (self.constants.hopper_launch_factor - 1.0) * self.is_hopper
        return self.num_launches(work.kernels) * (self.constants.kernel_s * factor)

    def eager_seconds(self, kernels: Mapping[str, Column]) -> Column:
        """Return the seconds in which the host launches the kernels of a pass one by one."""
        seconds: Column = self.num_launches(kernels) * self.constants.eager_launch_s * self.host_factor
        return seconds

    @property
    def host_factor(self) -> Column:
        """Seconds of a chip's hosts over those of Hopper's and Blackwell's."""
        return 1.0 + (self.constants.ampere_host_factor - 1.0) * self.is_ampere

    def num_launches(self, kernels: Mapping[str, Column]) -> Column:
        """Return the launches of a pass: kernels by class, by how many of an engine's each stands for."""
        constants = self.constants
        fp4 = 1.0 + (constants.fp4_expert_kernels - 1.0) * self.groups["experts"].is_fp4
        launches: Column = kernels.get("layer", 0.0) + kernels.get("casts", 0.0) * (
            constants.cast_kernels * self.is_narrow
        )
        launches = launches + kernels.get("experts", 0.0) * (constants.expert_kernels * fp4)
        launches = launches + kernels.get("indexer", 0.0) * constants.indexer_kernels
        return launches + kernels.get("recurrence", 0.0) * constants.recurrence_kernels

    def collective_seconds(self, collective: PassCollective) -> Column:
        """Return the seconds of a pass's collectives of one kind: latency by devices, and payload over the link."""
        is_inside = collective.degree <= self.domain
        nominal: Column = np.where(is_inside, self.link_bytes_per_s, self.network_bytes_per_s)
        rate = nominal * self.constants.link_share
        hops = 1.0 + (NETWORK_HOPS - 1.0) * (collective.degree > self.domain)
        if collective.kind == "all_reduce":
            latency: Column = 2.0 * self.constants.reduce_hop_s * np.log2(np.maximum(collective.degree, 1))
        else:
            latency = (collective.degree > 1) * self.constants.exchange_s
        return collective.count * latency * hops + collective.elements * ACTIVATION_BYTES / rate


def format_peak(chip: Chip, product: str) -> float:
    """Return the FLOP/s of products in a format, or in the next wider one that the chip has."""
    while product not in chip.peak_flops_per_s and product in WIDER:
        product = WIDER[product]
    return chip.peak(product)


def _links(topology: Topology, num_devices: int) -> tuple[int, float, float]:
    """Return the devices of a domain, and a device's egress inside it and beyond, in bytes/s."""
    if isinstance(topology, Switched):
        inner, *outer = topology.tiers
        network = outer[0].bytes_per_s * outer[0].fraction if outer else inner.bytes_per_s * inner.fraction
        return inner.size, inner.bytes_per_s * inner.fraction, network
    torus = topology.torus if isinstance(topology, Pods) else topology
    both_directions = 2.0 * torus.bytes_per_s  # a ring along one axis, in both directions
    return num_devices, both_directions, both_directions
