"""FLOPs of recurrent mixers, by PyTorch's counter over the modules of `transformers`.

The counter counts matrix products alone: convolutions, which are elementwise here, are taken off. The delta rule's triangular
systems count as products with their inverse, which `transformers` forms where it is exported. Differs: the Mamba-2 of
`transformers` makes scores for each head instead of each group (so the case has a group for each head), and brings states from
chunk to chunk by a product of (chunks + 1)² matrices, which kernels do elementwise; the test takes that product off.
"""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shardwise.model.architecture import Architecture
from shardwise.model.block_parts import HIDDEN
from shardwise.model.mixer_builder import add_recurrent_mixer
from shardwise.model.operations import SEGMENTS, Recurrence, SegmentState
from shardwise.model.parameters_and_flops import layer_training_flops, program_flops
from shardwise.model.program import Program, ProgramBuilder, Role
from shardwise.model.recurrent_mixers import RecurrentMixer
from shardwise.sharding import Spec
from shardwise.values import SymbolValues

SEQS, WIDTH = 2, 64
DELTA: dict[str, Any] = {"num_heads": 4, "num_groups": 2, "key_dim": 32, "head_dim": 16, "conv_width": 4, "chunk": 64}
MAMBA: dict[str, Any] = {"num_heads": 4, "num_groups": 4, "key_dim": 32, "head_dim": 16, "conv_width": 4, "chunk": 32}


def mixer_program(mixer: RecurrentMixer) -> Program:
    builder = ProgramBuilder()
    return builder.build([add_recurrent_mixer(builder, mixer.structure, builder.input("y", HIDDEN, Role.RESIDUAL), "")])


def mixer_flops(mixer: RecurrentMixer, seq_len: int, **degrees: int) -> float:
    values = SymbolValues({**mixer.dims, "B": SEQS, "T": seq_len, "D": WIDTH, **degrees})
    return float(program_flops(mixer_program(mixer)).evaluate(values))


def counted_flops(module: torch.nn.Module, seq_len: int) -> float:
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        module(torch.zeros(SEQS, seq_len, WIDTH))
    counts = counter.get_flop_counts()["Global"]
    return float(sum(flops for operation, flops in counts.items() if "convolution" not in str(operation)))


def test_gated_delta_net_equals_counted_products() -> None:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

    config = Qwen3NextConfig(
        hidden_size=WIDTH, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
        linear_value_head_dim=16, linear_conv_kernel_dim=4, num_hidden_layers=4,
    )  # fmt: skip
    module = qwen3_next.Qwen3NextGatedDeltaNet(config, 0)
    with mock.patch.object(qwen3_next, "is_torchdynamo_exporting", return_value=True):
        counted = counted_flops(module, 256)
    assert mixer_flops(RecurrentMixer(kind="gated_delta", **DELTA), 256) == pytest.approx(counted, rel=1e-6)


def test_mamba2_equals_counted_products() -> None:
    from transformers import BambaConfig
    from transformers.models.bamba.modeling_bamba import BambaMixer

    config = BambaConfig(
        hidden_size=WIDTH, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=4, mamba_d_state=32, mamba_expand=1, mamba_d_conv=4,
        mamba_chunk_size=32,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = BambaMixer(config, 0).eval()
    seq_len = 256
    counted = counted_flops(module, seq_len)
    between_chunks = 2.0 * SEQS * (seq_len / 32 + 1) ** 2 * 4 * 16 * 32
    mixer = RecurrentMixer(kind="mamba2", norm="after_gate", conv_bias=True, **MAMBA)
    assert mixer_flops(mixer, seq_len) == pytest.approx(counted - between_chunks, rel=1e-6)


class LightningModule(torch.nn.Module):
    """A module of MiniMax, which takes arguments that it does not read."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x, None, None)


def test_lightning_attention_equals_counted_products() -> None:
    from transformers import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    config = MiniMaxConfig(
        hidden_size=WIDTH, num_attention_heads=4, head_dim=16, block_size=32, num_hidden_layers=2,
        layer_types=["linear_attention"] * 2,
    )  # fmt: skip
    counted = counted_flops(LightningModule(MiniMaxLightningAttention(config, 0)), 256)
    mixer = RecurrentMixer(kind="lightning", num_heads=4, num_groups=4, key_dim=16, head_dim=16, conv_width=1, chunk=32)
    assert mixer_flops(mixer, 256) == pytest.approx(counted, rel=1e-6)


def test_matrix_memory_equals_counted_products() -> None:
    """The sums that outputs are divided by have no products: those of the module, of one column, are taken off."""
    from transformers import xLSTMConfig
    from transformers.models.xlstm.modeling_xlstm import xLSTMLayer

    config = xLSTMConfig(hidden_size=WIDTH, num_heads=4, num_hidden_layers=1, mode="train", chunk_size=32)
    counted = counted_flops(xLSTMLayer(config), 256)
    mixer = RecurrentMixer(kind="mlstm", num_heads=4, num_groups=4, key_dim=8, head_dim=16, conv_width=1, chunk=32)
    sums = 2.0 * SEQS * 256 * 4 * 8  # queries by a state of one column
    assert mixer_flops(mixer, 256) == pytest.approx(counted - sums, rel=0.01)


class RecurrentBlock(torch.nn.Module):
    """A recurrent block of RecurrentGemma, which takes the positions of its tokens."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x, torch.arange(x.shape[1])[None], None, use_cache=False)


def test_gated_linear_recurrence_equals_counted_products() -> None:
    """Two projections in, one out, and two gates of each block of channels; the recurrence itself has no products."""
    from transformers import RecurrentGemmaConfig
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock

    config = RecurrentGemmaConfig(hidden_size=WIDTH, num_attention_heads=4, lru_width=96)
    counted = counted_flops(RecurrentBlock(RecurrentGemmaRecurrentBlock(config, 0)), 32)
    mixer = RecurrentMixer(
        kind="rg_lru", num_heads=4, key_dim=24, head_dim=24, conv_width=4, conv_bias=True, projection_bias=True
    )
    assert mixer_flops(mixer, 32) == pytest.approx(counted, rel=1e-6)


def test_differential_attention_makes_both_scores_once() -> None:
    """Ye et al. 2024, 2.1: two maps of scores, each times values of twice the width, over the causal half."""
    model = Architecture(
        name="differential", num_layers=1, d_model=WIDTH, d_ff=8, num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=16,
        vocab_size=8, differential=True,
    )  # fmt: skip
    _, scores = layer_training_flops(model, 256)
    forward = 2 * 2.0 * 4 * 256**2 * (8 + 16) / 2
    assert scores == pytest.approx(3 * forward)


def test_scores_are_made_once_for_heads_that_share_keys() -> None:
    """Dao and Gu 2024, listing 1, with one group: C B^T once, not for each head."""
    apart, shared = (
        mixer_flops(RecurrentMixer(kind="mamba2", **{**MAMBA, "num_groups": groups}), 256) for groups in (4, 1)
    )
    projections = 2.0 * SEQS * 256 * WIDTH * 2 * 3 * 32  # keys and queries of three groups fewer
    assert apart - shared == pytest.approx(projections + 2.0 * SEQS * 256 * 32 * 3 * 32)


@pytest.mark.parametrize("kind", ["gated_delta", "mamba2"])
def test_states_of_segments_cost_nothing_in_one_part(kind: Any) -> None:
    mixer = RecurrentMixer(kind=kind, **DELTA)
    single_part, two_parts = (mixer_flops(mixer, 256, cp=cp) for cp in (1, 2))
    assert single_part == mixer_flops(mixer, 256) < two_parts


def test_flops_are_split_over_heads_and_segments() -> None:
    """Each of 8 devices has an eighth of a recurrence, and its own segment's state of every head that it has."""
    mixer = RecurrentMixer(kind="gated_delta", **DELTA)
    program = mixer_program(mixer)
    values = SymbolValues({**mixer.dims, "B": SEQS, "T": 1024, "D": WIDTH, "cp": 4, "tp_kv": 2, "tp_rep": 1, "dp": 1})
    dims = {name: tensor.dims for name, tensor in program.tensors.items()}
    split = {"T": ("cp",), "L": ("tp_kv", "tp_rep")}
    for operation in program.operations:
        if isinstance(operation, Recurrence | SegmentState):
            specs = [
                Spec.of(dims[name], {d: axes for d, axes in split.items() if d in dims[name]})
                for name in operation.inputs
            ]
            placed = operation.propagate_sharding(specs, dims, lambda name: False)
            whole = operation.propagate_sharding([Spec.of(s.dims) for s in specs], dims, lambda name: False)
            flops = operation.flops(placed).evaluate(values)
            num_segments = 4 if isinstance(operation, SegmentState) else 1
            assert flops * 8 * num_segments == operation.flops(whole).evaluate(values)
            assert all(SEGMENTS not in s.dims or not s.axes_of(SEGMENTS) for s in placed.inputs)
