"""Text in, text out: tokenizers, incremental detokenisation, stop strings, prompt layouts."""

from jax_longctx.text.tokenizer import (
    PromptLayout,
    StopStrings,
    Tokenizer,
    chat_layout,
    check_vocabulary,
    plain_layout,
)

__all__ = [
    "PromptLayout",
    "StopStrings",
    "Tokenizer",
    "chat_layout",
    "check_vocabulary",
    "plain_layout",
]
