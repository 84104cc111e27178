"""Text in, text out: tokenizers, incremental detokenisation, stop strings, prompt layouts."""

from jax_longctx.text.prompt import PromptLayout, chat_layout, plain_layout
from jax_longctx.text.stopper import StopStrings
from jax_longctx.text.tokenizer import StreamDecoder, Tokenizer, check_vocabulary

__all__ = [
    "PromptLayout",
    "StopStrings",
    "StreamDecoder",
    "Tokenizer",
    "chat_layout",
    "check_vocabulary",
    "plain_layout",
]
