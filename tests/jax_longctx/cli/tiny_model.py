"""A tiny Llama as Hugging Face lays it out, and as `convert` leaves it."""

import json

import tokenizers
from tokenizers import decoders, pre_tokenizers, trainers
from tokenizers import models as token_models
from typer.testing import CliRunner

from jax_longctx.cli.main import app
from tests.checkpoints_convert.tiny import random_state, write_checkpoint

TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] | trim }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n"
    "{% if think is defined %}<|turn|>{{ think }}{% endif %}{% endif %}"
)


def byte_level(text):
    backend = tokenizers.Tokenizer(token_models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<|begin|>", "<|end|>", "<|turn|>"]
    how = {"vocab_size": 300, "initial_alphabet": alphabet, "special_tokens": special}
    backend.train_from_iterator([text], trainers.BpeTrainer(show_progress=False, **how))
    return backend


def write_tokenizer(folder):
    """A byte-level BPE with a chat template, as Hugging Face lays it out."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = byte_level("The pass key is 12345. Remember it. " * 4)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def hf_config(vocab_size):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": vocab_size}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        **sizes,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }


def write_source(folder, **changes):
    config = {**hf_config(vocab_size=300), **changes}
    write_checkpoint(folder, config, random_state(config))
    write_tokenizer(folder)


def converted(tmp_path_factory, source=None):
    """The folder of a tiny random checkpoint with its tokenizer, as `convert` leaves it."""
    if source is None:
        source = tmp_path_factory.mktemp("source") / "hf"
        write_source(source)
    folder = tmp_path_factory.mktemp("converted") / "model"
    result = CliRunner().invoke(app, ["convert", str(source), str(folder)])
    assert result.exit_code == 0, result.output
    return folder
