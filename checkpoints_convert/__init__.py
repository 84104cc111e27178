"""Checkpoints in and out: Hugging Face safetensors and GGUF -> Orbax, Orbax -> safetensors."""

from checkpoints_convert.exporting import export
from checkpoints_convert.importing import convert
from checkpoints_convert.sources.config import read_config

__all__ = ["convert", "export", "read_config"]
