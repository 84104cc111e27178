"""Tokenizers made from what a checkpoint has: GGUF metadata, or a sentencepiece model."""

from checkpoints_convert.vocabulary.gguf import gguf_tokenizer_files
from checkpoints_convert.vocabulary.sentencepiece import sentencepiece_files

__all__ = ["gguf_tokenizer_files", "sentencepiece_files"]
