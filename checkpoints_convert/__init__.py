"""Checkpoints in and out: Hugging Face safetensors and GGUF -> ours, ours -> safetensors."""

from checkpoints_convert.config import read_config
from checkpoints_convert.exporting import export
from checkpoints_convert.importing import convert

__all__ = ["convert", "export", "read_config"]
