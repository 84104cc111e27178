"""Text in, text out: tokenizers, incremental detokenisation, stop strings, prompt layouts."""

from jax_longctx.text.tokenizer import (
    PromptLayout,
    PromptText,
    StopStrings,
    Tokenizer,
    chat_layout,
    check_vocabulary,
    plain_layout,
)

__all__ = [
    "PromptLayout",
    "PromptText",
    "StopStrings",
    "Tokenizer",
    "chat_layout",
    "check_vocabulary",
    "plain_layout",
]
