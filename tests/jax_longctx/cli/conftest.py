"""A tiny random model with a real tokenizer, and the command line run over it."""

import json

import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers, trainers
from tokenizers import models as token_models
from typer.testing import CliRunner

import jax_longctx
from jax_longctx.cli.main import app

TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] | trim }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def write_tokenizer(folder):
    """A byte-level BPE with a chat template, as Hugging Face lays it out."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = tokenizers.Tokenizer(token_models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|begin|>", "<|end|>", "<|turn|>"],
        show_progress=False,
    )
    backend.train_from_iterator(["The pass key is 12345. Remember it. " * 4], trainer)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def hf_config(vocab_size):
    """`config.json` of a Llama of two small layers."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocab_size,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tokenizer_folder):
    """The tiny model as `jax_longctx.load` would return it."""
    from jax_longctx.api import LongContext
    from jax_longctx.models.llama import init_params
    from jax_longctx.text import Tokenizer

    tokenizer = Tokenizer.load(tokenizer_folder)
    config = jax_longctx.ModelConfig.from_hf(hf_config(tokenizer.vocab_size))
    mesh = jax_longctx.make_mesh()
    params = init_params(config, mesh, seed=1)
    method = jax_longctx.make_method(next(iter(jax_longctx.METHODS)))
    return LongContext(jax_longctx.Engine(config, params, method, mesh, chunk=64), tokenizer)


@pytest.fixture
def loads(tiny, monkeypatch):
    """`jax_longctx.load` returns the tiny model; its arguments are listed here."""
    calls = []

    def load(checkpoint, **options):
        calls.append((checkpoint, options))
        return tiny

    monkeypatch.setattr(jax_longctx, "load", load, raising=False)
    return calls


@pytest.fixture
def run():
    """Runs the command line in this process."""

    def invoke(*args, stdin=None):
        return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)

    return invoke


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("The pass key is 12345. Remember it. " * 5)
    return path
