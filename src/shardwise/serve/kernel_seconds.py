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
NETWORK_HOPS = 4.0  # a hop between nodes takes this many times one inside (NCCL's tuning model: 2 to 5)
HOPPER = ("h100", "h200", "h800")


def slower_of(first: Column, second: Column) -> Column:
    """Return the longer of two times that overlap: the norm of order 3, which is a quarter above either where they are equal."""
    return np.cbrt(first * first * first + second * second * second)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRates:
    """Rates of one chip under an engine's constants: all that seconds follow from.

    `formats` by group of weights; `link_bytes_per_s` of a device inside a domain of `domain` devices, `network_bytes_per_s`
    beyond.
    """

    chip: Chip
    constants: ServingConstants
    formats: Mapping[str, WeightFormat]
    cache_bytes: float
    domain: int
    link_bytes_per_s: float
    network_bytes_per_s: float

    @classmethod
    def of(cls, cluster: Cluster, formats: ServingFormats, constants: ServingConstants) -> ServingRates:
        """Return the rates of a cluster's chip and links."""
        domain, link, network = _links(cluster.topology, cluster.num_devices)
        narrow, bf16 = formats.weight_format, get_weight_format("bf16")
        by_group = {
            "attention": formats.attention_format, "recurrence": formats.attention_format, "mlp": narrow,
            "experts": formats.expert_format, "router": bf16, "vocabulary": bf16,
        }  # fmt: skip
        return cls(
            chip=cluster.chip, constants=constants, formats=by_group, cache_bytes=formats.cache_bytes, domain=domain,
            link_bytes_per_s=link, network_bytes_per_s=network,
        )  # fmt: skip

    @property
    def routing(self) -> Routing:
        """How tokens choose experts."""
        return Routing(self.constants.routing_skew, self.constants.expert_imbalance)

    def peak(self, product: str) -> float:
        """Return the FLOP/s of products in a format, or of the next wider one that the chip has."""
        peaks = self.chip.peak_flops_per_s
        wider = {"fp4": "fp8", "fp8": "bf16", "int8": "bf16", "bf16": "fp16"}
        while product not in peaks and product in wider:
            product = wider[product]
        return self.chip.peak(product)

    def product_seconds(self, group: str, products: Products, *, has_prompt: bool) -> Column:
        """Return the seconds of the products with a group of weights."""
        constants, weight_format = self.constants, self.formats[group]
        is_expert = group == "experts"
        share = constants.expert_share if is_expert else constants.weight_share
        read_s = products.elements * (weight_format.bytes_per_element / (self.chip.memory_bytes_per_s * share))
        flops_share = constants.decode_share
        if has_prompt:
            flops_share = constants.expert_prompt_share if is_expert else constants.prompt_share
        compute_s = products.flops * (1.0 / (self.peak(weight_format.product) * flops_share))
        return slower_of(read_s, compute_s) * self._format_factor(weight_format, is_expert=is_expert)

    def _format_factor(self, weight_format: WeightFormat, *, is_expert: bool) -> float:
        constants = self.constants
        if weight_format.product == "fp4":
            return constants.fp4_expert_factor if is_expert else constants.fp4_factor
        if not is_expert:
            return 1.0
        if weight_format.element_bytes == 0.5:
            return constants.int4_expert_factor
        return constants.fp8_expert_factor if weight_format.product == "fp8" else 1.0

    def attention_seconds(self, work: PassWork) -> Column:
        """Return the seconds of decoding sequences' attention, and of recurrent states."""
        rate = self.chip.memory_bytes_per_s
        read_s = work.cache_elements * (self.cache_bytes / (rate * self.constants.cache_share))
        compute_s = work.decode_flops * (1.0 / (self.peak("bf16") * self.constants.decode_attention_share))
        state_s = work.state_elements * (4.0 / (rate * self.constants.weight_share))  # states rest in fp32
        return slower_of(read_s, compute_s) + state_s

    def prompt_attention_seconds(self, work: PassWork) -> Column:
        """Return the seconds of a chunk's attention."""
        return work.prompt_flops * (1.0 / (self.peak("bf16") * self.constants.prompt_attention_share))

    def launch_seconds(self, work: PassWork) -> Column:
        """Return the seconds that launches take beyond what kernels move and compute."""
        constants, kernels = self.constants, work.kernels
        scale: dict[str, float] = {
            "latent": constants.latent_kernels, "indexer": constants.indexer_kernels,
            "recurrence": constants.recurrence_kernels, "experts": constants.expert_kernels,
        }  # fmt: skip
        is_fp4 = self.formats["experts"].product == "fp4"
        scale["experts"] *= constants.fp4_expert_kernels if is_fp4 else 1.0
        launches: Column = sum((count * scale.get(name, 1.0) for name, count in kernels.items()), start=0.0)
        if self.formats["mlp"].product != "bf16" or self.formats["experts"].product != "bf16":
            mixers = sum(kernels.get(name, 0.0) / per for name, per in MIXER_KERNELS.items())
            launches = launches + 2 * constants.cast_kernels * mixers
        factor = constants.hopper_launch_factor if self.chip.catalog_name in HOPPER else 1.0
        return launches * (constants.kernel_s * factor)

    def collective_seconds(self, collective: PassCollective) -> Column:
        """Return the seconds of a pass's collectives of one kind: latency by devices, and payload over the link."""
        is_inside = collective.degree <= self.domain
        rate = np.where(is_inside, self.link_bytes_per_s, self.network_bytes_per_s) * self.constants.link_share
        hops = np.where(is_inside, 1.0, NETWORK_HOPS)
        if collective.kind == "all_reduce":
            latency = 2.0 * self.constants.reduce_hop_s * np.log2(np.maximum(collective.degree, 1))
        else:
            latency = np.where(collective.degree > 1, self.constants.exchange_s, 0.0)
        return collective.count * latency * hops + collective.elements * ACTIVATION_BYTES / rate


MIXER_KERNELS: Mapping[str, int] = {"attention": 6, "latent": 10, "recurrence": 8}


def _links(topology: Topology, num_devices: int) -> tuple[int, float, float]:
    """Return the devices of a domain, and a device's egress inside it and beyond, in bytes/s."""
    if isinstance(topology, Switched):
        inner, *outer = topology.tiers
        network = outer[0].bytes_per_s * outer[0].fraction if outer else inner.bytes_per_s * inner.fraction
        return inner.size, inner.bytes_per_s * inner.fraction, network
    torus = topology.torus if isinstance(topology, Pods) else topology
    both_directions = 2.0 * torus.bytes_per_s  # a ring along one axis, in both directions
    return num_devices, both_directions, both_directions
