"""Models of Hugging Face `transformers` read and written."""

from shardwise.train.huggingface.checkpoint import checkpoint_to_hf
from shardwise.train.huggingface.files import load_hf, save_hf

__all__ = ["checkpoint_to_hf", "load_hf", "save_hf"]
