"""Models of the catalogue as Megatron Bridge builds them of exported recipes.

    PYTHONPATH=src python benchmarks/export_check/megatron_bridge_models.py --packages FOLDER:FOLDER [MODEL...]

Each model's recipe is run and its configuration completed as `pretrain` does it. The provider builds its GPTModel on the meta
device, of layers that need no Transformer Engine: parameters, names and shapes of tensors, rotary angles, scales, norms and the
router are those of the catalogue's model. Where a provider's own layers need Transformer Engine, its fields are compared.
Prints a line for each; status 1 where one differs or Bridge refuses it. FOLDERs are as for megatron_bridge.py.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from megatron_bridge import VERSIONS
from megatron_core_models import config_problems, local_layers, model_problems, needs_transformer_engine, pretend_gpu
from model_verdicts import NOT_EXPORTED, ModelVerdict, chosen_models, describe_problems, model_arguments, print_verdicts
from stubs import stub

from shardwise.interop.frameworks.megatron.bridge_recipe import RECIPE_FILE, TARGET
from shardwise.interop.launches.launch import Launch, Machines
from shardwise.interop.launches.translate_launch import lost_fields, refusals, to_options
from shardwise.layout import Layout
from shardwise.model import Architecture, Job, load_model, num_params

WITHOUT_ENGINE = ("GPTModelProvider", "MLAModelProvider", "GemmaModelProvider")  # its layers have local forms
UNFUSED = ("bias_dropout_fusion", "persist_layer_norm", "gradient_accumulation_fusion", "apply_rope_fusion",
           "moe_grouped_gemm", "perform_initialization")  # fmt: skip


def completed_provider(launch: Launch) -> Any:
    """Return the provider of a launch's recipe, as `pretrain` completes it."""
    for backend in ("FLASH", "FUSED", "UNFUSED"):  # what the provider before it chose
        os.environ.pop(f"NVTE_{backend}_ATTN", None)
    recipe: dict[str, Any] = {"__name__": "recipe"}
    text = TARGET.write(to_options(TARGET, launch), launch)[RECIPE_FILE]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        exec(compile(text, RECIPE_FILE, "exec"), recipe)
        config = recipe["recipe"]()
        from megatron.bridge.training.config import runtime_config_update

        runtime_config_update(config)
    return config.model


def built_model(provider: Any) -> Any:
    """Return the provider's GPTModel on the meta device, of Megatron-Core's own layers."""
    import torch
    from megatron.bridge.models import gpt_provider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.process_groups_config import ProcessGroupCollection

    for fusion in UNFUSED:
        setattr(provider, fusion, False)
    provider.use_cpu_initialization = True
    layers = local_layers(provider)
    provider.transformer_layer_spec = lambda config: layers
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    gpt_provider.mtp_block_spec = lambda config, vp_stage=None: (
        get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False) if config.mtp_num_layers else None
    )
    offset, provider.layernorm_zero_centered_gamma = (
        provider.layernorm_zero_centered_gamma,
        False,
    )  # no norm of PyTorch's has it
    with torch.device("meta"), contextlib.redirect_stdout(io.StringIO()):
        model = provider.provide(pre_process=True, post_process=True)
    provider.layernorm_zero_centered_gamma = offset
    return model


def size_problems(model: Architecture, provider: Any) -> Iterator[str]:
    """Yield which sizes of a provider differ from a model's."""
    expected = {
        "num_layers": model.num_layers, "hidden_size": model.d_model, "num_attention_heads": model.num_heads,
        "num_query_groups": model.num_kv_heads, "kv_channels": model.head_dim, "vocab_size": model.vocab_size,
        "ffn_hidden_size": model.dense_d_ff or model.d_ff, "qk_layernorm": model.qk_norm,
        "share_embeddings_and_output_weights": model.tied_embeddings, "add_bias_linear": False, "add_qkv_bias": False,
        **({"num_moe_experts": model.num_experts, "moe_ffn_hidden_size": model.d_ff} if model.num_experts else {}),
    }  # fmt: skip
    for name, value in expected.items():
        if getattr(provider, name) != value:
            yield f"{name} is {getattr(provider, name)!r} for {value!r}"


def verdict(name: str) -> ModelVerdict:
    """Return the verdict on a model of the catalogue; one that the export refuses is none of Bridge's."""
    model = load_model(name)
    seq_len = model.max_positions or 1024
    job = Job(global_batch_tokens=8 * seq_len, seq_len=seq_len, precision="bf16_fp32_main_gradients")
    launch = Launch(model=model, job=job, layout=Layout(), machines=Machines(num_devices=1, devices_per_node=1))
    reasons = refusals(launch, TARGET)
    if reasons:
        return ModelVerdict(NOT_EXPORTED, f"not exported: {reasons[0]}")
    lost = {field for field, _ in lost_fields(TARGET, launch, to_options(TARGET, launch))}
    provider = completed_provider(launch)
    kind = type(provider).__name__
    if kind not in WITHOUT_ENGINE:
        return describe_problems(
            list(size_problems(model, provider)), f"{kind}: fields as here, as its layers need Transformer Engine"
        )
    if needs_transformer_engine(model):
        problems = list(config_problems(model, provider, lost))
        return describe_problems(problems, "constants as here; its layers need Transformer Engine")
    built = built_model(provider)
    if "EmbeddingScalingMixin" in (kind.__name__ for kind in type(built.embedding).__mro__):
        lost.add("numerics.embedding_scale")  # it has it, beside the configuration
    problems = list(model_problems(model, built, lost))
    return describe_problems(problems, f"{num_params(model):,} parameters, tensors and constants as here")


def main() -> int:
    parser = model_arguments(__doc__)
    parser.add_argument("--packages", required=True, metavar="FOLDER:FOLDER")
    options = parser.parse_args()
    sys.path[:1] = options.packages.split(":")  # in the place of this folder, whose files have the frameworks' names
    versions = dict(VERSIONS)
    engine = {"transformer_engine": versions.pop("transformer_engine")}
    warnings.simplefilter("ignore")
    stub(versions)
    pretend_gpu()
    stub(engine)  # Megatron-Core is imported without it, Bridge with it
    from megatron.core.transformer.moe import moe_utils

    for kernel in (
        "permute",
        "permute_with_probs",
        "unpermute",
        "sort_chunks_by_index",
        "sort_chunks_by_index_with_probs",
    ):
        setattr(moe_utils, f"fused_{kernel}", object())  # that there is one is all that is asked
    return print_verdicts((chosen_models(options), verdict))


if __name__ == "__main__":
    sys.exit(main())
