"""Models of `transformers` read and written with equal logits and weights, for files of several writers."""

from __future__ import annotations

import dataclasses
import json
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.interop.frameworks.huggingface_families import FAMILIES, read_config, require_same_model, write_config
from shardwise.interop.weights import load_hf, save_hf
from shardwise.interop.weights.huggingface_folder import SafetensorsFolder, open_hf
from shardwise.layout.layout import Layout
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.run.engine.model_builder import ModelWeights, initial_weights
from shardwise.search.plan import plan_layout
from shardwise.search.plan_file import dump_plan, load_plan
from shardwise.values.boxes import Box, interval_boxes
from shardwise.values.errors import InputError

SEQS, POSITIONS = 2, 12
SMALL: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24,
    "vocab_size": 31, "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-4, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
SIGMOID: dict[str, Any] = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "head_dim": 4, "q_lora_rank": 7, "kv_lora_rank": 5, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
    "v_head_dim": 3, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
}  # fmt: skip
LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0}
# Some pairs of a head turn as they are, some slower, some between: the ramp lies within the head.
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, "original_max_position_embeddings": 60, "beta_fast": 6.0,
}  # fmt: skip
HALVES = "deepseek_v3 with pairs half a head apart"  # it is written with pairs side by side
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama 3": ("llama", {"rope_parameters": LLAMA_3, "tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LINEAR}),
    "llama with yarn": ("llama", {"rope_parameters": YARN}),
    "qwen3 with yarn": ("qwen3", {"rope_parameters": YARN | {"truncate": False, "attention_factor": 1.3, "beta_slow": 0.5}}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 12}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    "glm4_moe": ("glm4_moe", {**SIGMOID, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.8, "use_qk_norm": True}),
    "deepseek_v3": ("deepseek_v3", {**SIGMOID, **LATENT, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5}),
    "deepseek_v3 without a latent of queries": ("deepseek_v3", {**SIGMOID, **LATENT, "n_group": 3, "topk_group": 2,
                                                               "q_lora_rank": None, "qk_rope_head_dim": 8,
                                                               "head_dim": 8}),
    HALVES: ("deepseek_v3", {**SIGMOID, **LATENT, "n_group": 3, "topk_group": 2, "rope_interleave": False}),
    "deepseek_v3 with yarn": (
        "deepseek_v3",
        {**SIGMOID, **LATENT, "n_group": 1, "topk_group": 1,
         "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.707, "beta_fast": 1.0}},
    ),
    "glm4_moe without groups": ("glm4_moe", {**SIGMOID, "norm_topk_prob": False, "attention_bias": True}),
    "glm4_moe that turns whole heads": ("glm4_moe", {**SIGMOID, "rope_parameters": {
        "rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1.0}}),
    "glm4_moe that turns a quarter, with yarn": ("glm4_moe", {**SIGMOID, "rope_parameters": YARN | {
        "partial_rotary_factor": 0.25}}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"sliding_window": 5, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 2.0,
                          "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 7, "sliding_window": 5, "query_pre_attn_scalar": 5}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {"sliding_window": 5, "head_dim": 4}),
    "phi3 that turns half of a head": ("phi3", {"head_dim": 4, "rope_parameters": {
        "rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 5,
                            "rope_parameters": YARN | {"truncate": False}}),
}  # fmt: skip
TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-13}  # of the largest logit


class Double(TorchFunctionMode):
    """Float64 wherever code asks for float32: models of `transformers` do so in norms, softmaxes and angles."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        return func(*args, **{k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()})


def fine(dtype: torch.dtype) -> AbstractContextManager[object]:
    """Arithmetic that is nowhere coarser than `dtype`."""
    return Double() if dtype == torch.float64 else nullcontext()


def transformers_model(name: str, dtype: torch.dtype, seed: int = 0) -> Any:
    """A model of `transformers` with random weights, none of them small."""
    kind, settings = CONFIGS[name]
    with warnings.catch_warnings(), fine(dtype):
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        config = transformers.AutoConfig.for_model(kind, **{**SMALL, **settings})
        config._attn_implementation = config._experts_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5 if parameter.dim() == 1 else 0.0, 0.4, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.4, generator=generator)
    return model


def ids() -> torch.Tensor:
    return torch.randint(3, SMALL["vocab_size"], (SEQS, POSITIONS), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = transformers_model(name, dtype)
    model.save_pretrained(tmp_path)
    ours = load_hf(tmp_path)
    assert {tensor.dtype for tensor in ours.tensors.values()} == {ours.dtype} == {dtype}
    with torch.no_grad(), fine(dtype):
        expected = model(ids()).logits
    actual = ours.logits(ids())
    assert actual.dtype == expected.dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCES[dtype] * expected.abs().max().item())


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_modules_of_prediction_that_transformers_leaves_out_are_left_out(name: str, tmp_path: Path) -> None:
    """The config that `save_pretrained` writes has one, and the files no weights of it."""
    model = transformers_model(name, torch.float64)
    model.config.num_nextn_predict_layers = 1
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    stored = open_hf(tmp_path)
    assert stored.architecture.num_predict_layers == 0
    require_same_model(tmp_path, stored.architecture, stored.architecture)
    planned = dataclasses.replace(stored.architecture, num_predict_layers=1)
    with pytest.raises(InputError, match=r"num_predict_layers = 0.*--set model\.num_predict_layers=0"):
        require_same_model(tmp_path, stored.architecture, planned)
    with torch.no_grad(), fine(torch.float64):
        expected = model(ids()).logits
    torch.testing.assert_close(
        load_hf(tmp_path).logits(ids()), expected, rtol=0, atol=1e-13 * expected.abs().max().item()
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_plan_carries_the_numerics_of_its_config(name: str, tmp_path: Path) -> None:
    """A model of a plan's file, as a run has it that begins with these weights, computes what theirs does."""
    model = transformers_model(name, torch.float64)
    model.save_pretrained(tmp_path)
    job = Job(global_batch_tokens=SEQS * POSITIONS, seq_len=POSITIONS, precision="fp32")
    dump_plan(plan_layout(load_model(str(tmp_path)), load_cluster("local:1"), job, Layout()), tmp_path / "plan.json")
    stored = open_hf(tmp_path)
    read = {name: stored.read(name, Box((0,) * len(shape), shape)) for name, shape in stored.shapes.items()}
    with torch.no_grad(), fine(torch.float64):
        expected = model(ids()).logits
    biases = {name: stored.bias(name) for name in stored.biases}
    actual = ModelWeights(load_plan(tmp_path / "plan.json").model, read, biases).logits(ids())
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13 * expected.abs().max().item())


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != HALVES])
def test_written_models_load_in_transformers(name: str, tmp_path: Path) -> None:
    """The same config as far as values go, the same weights to the bit, the same logits."""
    import transformers

    model = transformers_model(name, torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    ours = load_hf(tmp_path / "theirs")
    save_hf(ours, tmp_path / "ours", seq_len=64, model_type=CONFIGS[name][0])
    paths = [tmp_path / folder / "model.safetensors" for folder in ("theirs", "ours")]
    before, after = map(load_file, paths)
    assert set(before) == set(after)
    assert all(torch.equal(before[tensor], after[tensor]) for tensor in before)
    theirs_says, ours_says = (safe_open(path, framework="pt").metadata() for path in paths)
    assert ours_says == theirs_says == {"format": "pt"}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert type(again) is type(model)
    with torch.no_grad():
        torch.testing.assert_close(again(ids()).logits, model(ids()).logits, rtol=0, atol=1e-5)


def test_pairs_half_a_head_apart_are_written_side_by_side(tmp_path: Path) -> None:
    """As the authors' files have them; rows of other dims than those that turn stay where they are."""
    import transformers

    model = transformers_model(HALVES, torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    ours = load_hf(tmp_path / "theirs")
    save_hf(ours, tmp_path / "ours", seq_len=64, model_type="deepseek_v3")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["rope_interleave"] is True
    assert all(torch.equal(ours.tensors[name], tensor) for name, tensor in load_hf(tmp_path / "ours").tensors.items())
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "ours"))
    key = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"  # five rows of the latent, and four that turn
    assert torch.equal(after[key], before[key][[0, 1, 2, 3, 4, 5, 7, 6, 8]])
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    with torch.no_grad():
        torch.testing.assert_close(again(ids()).logits, model(ids()).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "llama with biases", "mixtral", "qwen2_moe", "gemma2", "deepseek_v3"])
def test_any_box_and_interval_of_a_parameter_is_read_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interval costs its own elements, and a box at most those between its first and its last in each dim of the file: where a
    tensor has several weights, what lies between them too."""
    transformers_model(name, torch.float32).save_pretrained(tmp_path)
    whole, stored = load_hf(tmp_path).tensors, open_hf(tmp_path)
    assert stored.shapes == {parameter: tuple(values.shape) for parameter, values in whole.items()}
    count = [0]
    read = SafetensorsFolder.read

    def counted(self: SafetensorsFolder, file: str, tensor: str, box: Box) -> torch.Tensor:
        values = read(self, file, tensor, box)
        count[0] += values.numel()
        return values

    monkeypatch.setattr(SafetensorsFolder, "read", counted)
    rng = np.random.default_rng(0)
    for parameter, values in whole.items():
        for _ in range(5):
            start, stop = np.sort(rng.integers(0, values.numel() + 1, 2)).tolist()
            if start < stop:
                count[0] = 0
                interval = stored.read_flat(parameter, interval_boxes(stored.shapes[parameter], start, stop))
                assert torch.equal(interval, values.flatten()[start:stop]), parameter
                shared = parameter.rpartition(".")[2] in SHARING
                assert count[0] == stop - start or (shared and count[0] < 2 * values.numel()), parameter
            corners = np.sort(rng.integers(0, np.add(values.shape, 1), (2, values.ndim)), axis=0)
            box = Box(tuple(corners[0].tolist()), tuple(np.maximum(corners[1] - corners[0], 0).tolist()))
            if box.volume:
                assert torch.equal(stored.read(parameter, box), values[box.slices]), (parameter, box)


SHARING = ("w_q_plain", "w_q_rotary", "w_kv_down", "w_k_rotary", "w_k_up", "w_v_up")  # two of them in a tensor

PREDICTING = {
    name: CONFIGS[name] for name in ("llama", "qwen3", "mixtral", "qwen2_moe", "gemma2", "olmo2", "deepseek_v3")
}


def make_predicting_model(name: str) -> ModelWeights:
    """A model of a family with two modules of multi-token prediction and random weights."""
    kind, settings = PREDICTING[name]
    activation = {FAMILIES[kind].activation: "gelu_pytorch_tanh" if kind.startswith("gemma") else "silu"}
    config = {"model_type": kind, **SMALL, **activation, **settings, "num_nextn_predict_layers": 2}
    weights = initial_weights(read_config(config)[0], 3)
    assert weights.architecture.num_predict_layers == 2
    generator = torch.Generator().manual_seed(4)
    return ModelWeights(
        weights.architecture, {n: torch.randn(t.shape, generator=generator) * 0.4 for n, t in weights.tensors.items()}
    )


@pytest.mark.parametrize("name", PREDICTING)
def test_multi_token_prediction_is_written_and_read(name: str, tmp_path: Path) -> None:
    """The same weights to the bit; transformers reads the model that predicts the next token."""
    import transformers

    weights = make_predicting_model(name)
    save_hf(weights, tmp_path, seq_len=64, model_type=PREDICTING[name][0])
    again = load_hf(tmp_path)
    assert dataclasses.replace(again.architecture, name=weights.architecture.name) == weights.architecture
    assert again.tensors.keys() == weights.tensors.keys()
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in weights.tensors.items())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    with torch.no_grad():
        torch.testing.assert_close(weights.logits(ids()), theirs(ids()).logits, rtol=0, atol=1e-4)


def test_modules_are_stored_as_those_of_deepseek_v3(tmp_path: Path) -> None:
    """Behind the three layers, with copies of what they borrow; files without these are read too."""
    weights = make_predicting_model("llama")
    save_hf(weights, tmp_path, seq_len=64)
    stored, ours = load_file(tmp_path / "model.safetensors"), weights.tensors
    module_names = {f"{norm}.weight" for norm in ("enorm", "hnorm", "shared_head.norm")} | {"eh_proj.weight"}
    borrowed = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    layers = [
        {n.removeprefix(f"model.layers.{k}.") for n in stored if n.startswith(f"model.layers.{k}.")} for k in range(6)
    ]
    assert layers == [layers[0]] * 3 + [layers[0] | module_names | borrowed.keys()] * 2 + [set()]
    for number in (0, 1):
        for copy, of in borrowed.items():
            assert torch.equal(stored.pop(f"model.layers.{3 + number}.{copy}"), stored[of])
        assert torch.equal(
            stored[f"model.layers.{3 + number}.enorm.weight"], ours[f"predict.{number}.embedding_norm_weight"]
        )
        assert torch.equal(
            stored[f"model.layers.{3 + number}.eh_proj.weight"], ours[f"predict.{number}.pair_projection"]
        )
        down = stored[f"model.layers.{3 + number}.mlp.down_proj.weight"]
        assert torch.equal(down, ours[f"predict.{number}.block_w_down"].t())
    save_file(stored, tmp_path / "model.safetensors")
    assert all(torch.equal(tensor, ours[name]) for name, tensor in load_hf(tmp_path).tensors.items())
    stored.pop("model.layers.4.hnorm.weight")
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"lacks 1 tensors: model.layers.4.hnorm.weight"):
        load_hf(tmp_path)


def test_every_family_has_a_case() -> None:
    assert {kind for kind, _ in CONFIGS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_family_is_found_for_every_model(name: str) -> None:
    """Perhaps another than it came from, but one that has the same weights and constants."""
    kind, settings = CONFIGS[name]
    activation = {FAMILIES[kind].activation: "gelu_pytorch_tanh" if kind.startswith("gemma") else "silu"}
    rotary = {"rope_theta": 300.0, "rope_local_base_freq": 100.0}
    architecture, _ = read_config({"model_type": kind, **rotary, **SMALL, **activation, **settings})
    written, _ = write_config(architecture, 64)
    again, _ = read_config(written)
    assert dataclasses.replace(again, source=architecture.source) == architecture


def test_weights_in_several_files_are_read(tmp_path: Path) -> None:
    model = transformers_model("mixtral", torch.float32)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    ours = load_hf(tmp_path / "theirs")
    save_hf(ours, tmp_path / "ours", seq_len=64, bytes_per_file=20_000)
    files = sorted((tmp_path / "ours").glob("*.safetensors"))
    assert len(files) > 2
    assert all(sum(tensor.nbytes for tensor in load_file(file).values()) <= 20_000 for file in files)
    again = load_hf(tmp_path / "ours")
    assert ours.tensors.keys() == again.tensors.keys()
    assert all(torch.equal(tensor, again.tensors[name]) for name, tensor in ours.tensors.items())


def test_weights_may_be_read_in_another_dtype(tmp_path: Path) -> None:
    transformers_model("llama", torch.float32).save_pretrained(tmp_path)
    ours = load_hf(tmp_path, torch.bfloat16)
    assert {tensor.dtype for tensor in ours.tensors.values()} == {ours.dtype} == {torch.bfloat16}
    assert ours.logits(ids()).dtype == torch.float32


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "another family": ({"model_type": "gpt_neox"}, "model_type 'gpt_neox' cannot be read"),
    "other angles": (
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}},
        "sets rotary angles of type 'longrope', which is not known here",
    ),
    "no factor": (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0}},
        "rotary embeddings have factor = None; a number above 0 is required",
    ),
    "another activation": ({"hidden_act": "gelu"}, r"sets the activation 'gelu' \(modelled: silu or swish\)"),
    "quantised": ({"quantization_config": {"quant_method": "mxfp4"}}, r"quantised .*mxfp4.*dequantize=True"),
    "more layers": ({"num_hidden_layers": 4}, r"lacks 9 tensors: .*layers.3"),
    "fewer layers": ({"num_hidden_layers": 2}, r"has, besides what its config says, 9 tensors"),
    "another width": ({"intermediate_size": 32}, r"has shape \(24, 16\); its config says \(32, 16\)"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_contradicting_configs_are_refused(change: str, tmp_path: Path) -> None:
    transformers_model("llama", torch.float32).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **CHANGES[change][0]}))
    with pytest.raises(InputError, match=CHANGES[change][1]):
        load_hf(tmp_path)


def test_layers_in_another_order_are_a_pattern() -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    config = {"model_type": "gemma2", **SMALL, "num_hidden_layers": 4, "sliding_window": 5, "layer_types": kinds}
    model = read_config(config)[0]
    assert [model.attention_window(layer) for layer in range(4)] == [None, 5, 5, None]


def test_windows_on_some_layers_of_a_family_with_one_kind_are_refused() -> None:
    kinds = ["sliding_attention", "full_attention"]
    config = {"model_type": "mistral", **SMALL, "num_hidden_layers": 2, "sliding_window": 5, "layer_types": kinds}
    with pytest.raises(InputError, match="this family has one kind of layer"):
        read_config(config)


def test_a_copy_of_a_tied_embedding_is_passed_over(tmp_path: Path) -> None:
    model = transformers_model("llama 3", torch.float32)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    save_file({**stored, "lm_head.weight": stored["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors")
    with torch.no_grad():
        expected = model(ids()).logits
    torch.testing.assert_close(load_hf(tmp_path).logits(ids()), expected, rtol=1e-4, atol=1e-4)


OLDER: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "no base": ("llama", {}, {"rope_parameters": {"rope_theta": 1e4}}),
    "a base": ("mistral", {"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "scaled": (
        "llama",
        {"rope_theta": 500.0, "rope_scaling": {key: value for key, value in LLAMA_3.items() if key != "rope_theta"}},
        {"rope_parameters": LLAMA_3},
    ),
    "linear": (
        "llama",
        {"rope_theta": 300.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": LINEAR},
    ),
    "two bases": (
        "gemma3_text",
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
}


@pytest.mark.parametrize("case", OLDER)
def test_older_config_keys_are_read(case: str) -> None:
    kind, older, newer = OLDER[case]
    config = {"model_type": kind, **SMALL, "sliding_window": 5}
    assert read_config({**config, **older})[0].numerics == read_config({**config, **newer})[0].numerics


@pytest.mark.parametrize(
    ("family", "settings", "problem"),
    [
        (
            "deepseek_v3",
            {"rms_norm_eps": 1e-5},
            "has rms_norm_eps = 1e-05; 1e-06, which this family's code has in places, is required",
        ),
        (
            "glm4_moe",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.4}},
            "rotary angles on a part = 0.4 of a width of 8; an even number of its dims is required",
        ),
        (
            "glm4_moe",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.5}},
            "rotary angles on a part = 1.5 of a width of 8",
        ),
        (
            "llama",
            {"partial_rotary_factor": 0.5},
            "sets rotary angles on 0.5 of a head's width, which is not known here",
        ),
    ],
    ids=str,
)
def test_values_that_a_family_lacks_are_refused(family: str, settings: dict[str, Any], problem: str) -> None:
    """DeepSeek-V3's norms of latents do not read the epsilon; only some families turn a part of a head."""
    kind, usual = CONFIGS[family]
    config = {"model_type": kind, **SMALL, "hidden_act": "silu", **usual, **settings}
    with pytest.raises(InputError, match=problem):
        read_config({key: value for key, value in config.items() if value is not None})


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*config.json"):
        load_hf(tmp_path)
    transformers_model("llama", torch.float32).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(InputError, match=r"cannot read .*model.safetensors"):
        load_hf(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"cannot read .*model.safetensors"):
        load_hf(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"lacks 30 tensors.*\n.*1 tensors: a"):
        load_hf(tmp_path)


def test_a_width_that_transformers_refuses_is_written_for_a_family_that_takes_it() -> None:
    """LlamaConfig refuses widths that are no multiple of the number of heads, MistralConfig does not (transformers 5.23)."""
    import transformers

    architecture, _ = read_config({"model_type": "llama", **SMALL})
    config, family = write_config(dataclasses.replace(architecture, d_model=18), 64)
    assert family.model_class == "MistralForCausalLM"
    assert transformers.AutoConfig.for_model(**config).hidden_size == 18
    with pytest.raises(Exception, match="not a multiple"):
        transformers.AutoConfig.for_model(**{**config, "model_type": "llama"})


def test_models_that_no_family_has_are_not_written(tmp_path: Path) -> None:
    architecture, _ = read_config({"model_type": "llama", **SMALL})
    with pytest.raises(InputError, match="these are the families of transformers that are written"):
        save_hf(initial_weights(dataclasses.replace(architecture, parallel=True), 0), tmp_path, seq_len=64)
    with pytest.raises(InputError, match="found model_type 'bert'"):
        save_hf(initial_weights(architecture, 0), tmp_path, seq_len=64, model_type="bert")
    with pytest.raises(InputError, match="none of mixtral has what it has"):
        save_hf(initial_weights(architecture, 0), tmp_path, seq_len=64, model_type="mixtral")
