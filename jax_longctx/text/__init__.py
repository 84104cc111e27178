"""Text in, text out: tokenizers, incremental detokenisation, stop strings, prompt layouts."""

from jax_longctx.text.chat import PromptLayout, chat_layout, plain_layout
from jax_longctx.text.tokenizer import StopStrings, Tokenizer, check_vocabulary

__all__ = [
    "PromptLayout",
    "StopStrings",
    "Tokenizer",
    "chat_layout",
    "check_vocabulary",
    "plain_layout",
]
