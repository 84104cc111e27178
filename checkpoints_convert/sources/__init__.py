"""Where a checkpoint comes from: a Hugging Face directory, a hub id, or a GGUF file."""

from checkpoints_convert.sources.base import Source, SourceTensor, read_array
from checkpoints_convert.sources.files import HashedFile
from checkpoints_convert.sources.opening import open_source

__all__ = ["HashedFile", "Source", "SourceTensor", "open_source", "read_array"]
