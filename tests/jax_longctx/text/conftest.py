"""Small tokenizers of the two kinds that Llama-family checkpoints use."""

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, processors

from tests.jax_longctx.cli import tiny_model

# RUF001: the full-width signs are the point.
TEXT = "The pass key is 12345. 你好，世界。 Größe naïve façade Ελλάδα 🙂👩‍👩‍👧 日本語テキスト\n" * 4  # noqa: RUF001


@pytest.fixture
def text():
    return TEXT


@pytest.fixture
def byte_level():
    """As Llama 3, Qwen and SmolLM have one: its characters span several tokens."""
    backend = tiny_model.byte_level(TEXT)
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    return backend


@pytest.fixture
def byte_fallback():
    """A BPE with byte fallback and a word-start mark (Llama 2, Mistral)."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", *"aehiksty", "▁t", "▁th", "▁the"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(spaces)
    joined = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*joined, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend
