"""Weights of models in the files of other frameworks, written and read box by box; one tensor is in memory at a time.

`convert.convert` writes the weights of a run, a checkpoint or a framework's folder in another format.
`weight_formats.open_stored_model` opens a folder in any format as a `stored_model.StoredModel`. `load_hf` and `save_hf` read
and write folders of Hugging Face `transformers`. Tensor names come from the weight tables of `interop.frameworks`. Imports
PyTorch.
"""

from shardwise.interop.weights.huggingface_folder import checkpoint_to_hf, load_hf, save_hf

__all__ = ["checkpoint_to_hf", "load_hf", "save_hf"]
