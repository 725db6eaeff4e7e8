"""GPU kernels accept the shapes that the engine passes: run on tensors without data, whose shapes PyTorch checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.model.architecture import Architecture
from shardwise.model.numerics import Numerics
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.engine.model_builder import UnitTensors, build_torch_model
from shardwise.run.kernels import device_dispatch
from shardwise.run.kernels.attention_backends import LSE_PADDING
from shardwise.step.rank_program import parameter_shapes, single_device_instance

SMALL: dict[str, Any] = {
    "name": "small", "num_layers": 2, "d_model": 16, "d_ff": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
    "vocab_size": 32,
}  # fmt: skip
EXPERTS = {"num_experts": 5, "experts_per_token": 2}
STRUCTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "windows": {"sliding_window": 600, "global_every": 2},
    "tied and biased": {"tied_embeddings": True, "bias": ("qkv", "attention_out", "mlp"), "qk_norm": True, "post_norms": True},
    "gpt-2": {"mlp": "gelu", "norm": "layer", "norm_bias": True, "positions": "learned", "max_positions": 2000},
    "latent": {"num_kv_heads": 4, "kv_lora_rank": 8, "rope_head_dim": 2, "v_head_dim": 4, "q_lora_rank": 8},
    "sinks": {"sinks": True, "sliding_window": 600},
    "caps": {"numerics": Numerics(attention_cap=2.0, logit_cap=3.0)},
    "experts": {**EXPERTS, "shared_expert_width": 8, "shared_gate": True},
    "biased experts": {**EXPERTS, "mlp": "clamped_swiglu", "bias": ("router", "experts")},
    "adapters": {"lora_rank": 2, "lora_targets": ("qkv", "attention_out", "mlp")},
    "multi-token prediction": {**EXPERTS, "num_predict_layers": 2},
}  # fmt: skip


class GradientReceiver:
    """The gradients of a unit's weights, each of which is a new tensor."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}

    def target(self, weight: str) -> tuple[Tensor | None, bool]:
        return None, False

    def deliver(self, weight: str, gradient: Tensor | None) -> None:
        assert gradient is not None
        self.gradients[weight] = gradient


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_shapes_and_dtypes_of_forward_and_backward_match(
    structure: str, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_dispatch, "on_gpu", lambda x: True)
    architecture = Architecture(**{**SMALL, **STRUCTURES[structure]})
    instance, device, dtype = single_device_instance(architecture), torch.device("meta"), torch.bfloat16
    tensors = {
        name: torch.empty(shape, dtype=dtype, device=device) for name, shape in parameter_shapes(architecture).items()
    }
    used, receivers = instance.parameters_by_unit, dict[str, GradientReceiver]()

    def ends(path: str) -> UnitTensors:
        receivers[path] = GradientReceiver()
        return UnitTensors(
            {weight: tensors[parameter.name] for weight, parameter in used[path].items()}, receivers[path]
        )

    model = build_torch_model(instance, dtype, ends, device)
    ids = torch.zeros(2, 1300, dtype=torch.long, device=device)
    on_way = model.forward(MicroBatch(ids, ids, ids if documents else None), ids.numel(), trains=True)
    assert (on_way.loss.shape, on_way.loss.dtype) == ((), torch.float32)
    model.backward(on_way)
    for path, receiver in receivers.items():
        expected = {weight: tensors[parameter.name] for weight, parameter in used[path].items() if parameter.trained}
        assert receiver.gradients.keys() == expected.keys()
        for weight, gradient in receiver.gradients.items():
            assert (gradient.shape, gradient.dtype, gradient.device) == (expected[weight].shape, dtype, device), weight


def test_log_sum_exps_are_padded_as_the_kernel_of_gpus_pads_them() -> None:
    q = torch.empty(1, 2, 45, 8, device="meta")
    _, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, None, True)
    assert lse.shape[-1] % LSE_PADDING == 0
    assert lse.shape[-1] == 64
