"""Text in, text out: tokenizers, incremental detokenisation, stop strings, prompt layouts."""

from jax_longctx.text.prompts import (
    PromptLayout,
    PromptText,
    chat_layout,
    plain_layout,
    turn_layout,
)
from jax_longctx.text.tokenizer import StopStrings, Tokenizer, check_vocabulary

__all__ = [
    "PromptLayout",
    "PromptText",
    "StopStrings",
    "Tokenizer",
    "chat_layout",
    "check_vocabulary",
    "plain_layout",
    "turn_layout",
]
