"""Models of Hugging Face `transformers` read and written."""

from shardwise.train.huggingface.files import load_hf, save_hf

__all__ = ["load_hf", "save_hf"]
