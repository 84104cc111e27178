"""A tiny model and tiny tasks that both sides of the lm-evaluation-harness comparison write down.

Only numpy, safetensors and tokenizers: the goldens' Python and the tests' own build the same files.
"""

import json
import string
from pathlib import Path
from typing import Any

import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers, processors

if __package__:
    from tests.goldens.cases import SIZES
    from tests.goldens.weights import hf_shapes, random_state
else:
    # The script that makes the goldens lies beside this file.
    from cases import SIZES
    from weights import hf_shapes, random_state

__all__ = ["MAX_LENGTH", "RUNS", "SEED", "TASKS", "write_model", "write_tasks"]

SEED = 0
# Tokens of a rolling window: the longest text below has several.
MAX_LENGTH = 48

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] | trim }}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
SPECIAL = ["<|begin|>", "<|end|>", "<|turn|>"]
# What the texts below are written in; a space is "Ġ" and a line's end "Ċ".
ALPHABET = string.ascii_letters + string.digits + ".,:;?!'-_|<>" + "ĠĊ"
# Pairs that a tokenizer joins, also across a word's leading space, written "Ġ".
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("Ġ", "the"), ("i", "s"), ("Ġ", "is"), ("o", "n")]
CONFIG = {**SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
CONFIG |= {"intermediate_size": 48, "attention_bias": False, "mlp_bias": False}

CHOICES = [
    {"question": "the sun is", "choices": [" a star", " the moon", "isKJb"], "right": 0},
    {"question": "an hour has ", "choices": ["sixty minutes", "ten", "a"], "right": 0},
    {"question": "the one on the left is", "choices": [" the other", "n", " a"], "right": 2},
    # Nothing before the choices: they follow the beginning-of-text token.
    {"question": "", "choices": ["the end", "on and on", " a stone"], "right": 1},
]
TEXTS = [
    {"text": "the tide is on the turn"},
    {"text": "a stone is thrown; the other is on the thin ice and the path is long " * 3},
    {"text": ""},
]
ANSWERS = [
    {"question": "say on", "answer": "on"},
    {"question": "the other then is a longer prompt than this one", "answer": "the"},
    {"question": "a", "answer": "is"},
]

TASKS: dict[str, dict[str, Any]] = {
    "tiny_choice": {
        "rows": CHOICES,
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "right",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "tiny_rolling": {
        "rows": TEXTS,
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "tiny_answer": {
        "rows": ANSWERS,
        "output_type": "generate_until",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["7:the", "P:| v"], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "tiny_prefix": {
        "rows": ANSWERS,
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "gen_prefix": "I say",
        "generation_kwargs": {"max_gen_toks": 12, "do_sample": False, "until": ["<|turn|>"]},
        "metric_list": [{"metric": "exact_match"}],
    },
}
# Name -> how both sides call the harness beside the tasks.
RUNS: dict[str, dict[str, Any]] = {
    "plain": {"tasks": ["tiny_choice", "tiny_rolling", "tiny_answer"]},
    "fewshot": {"tasks": ["tiny_choice"], "num_fewshot": 2},
    "chat": {
        "tasks": ["tiny_choice", "tiny_answer", "tiny_prefix"],
        "apply_chat_template": True,
        "system_instruction": "be brief",
    },
}


def write_model(folder: Path, *, adds_bos: bool) -> Path:
    """A Hugging Face directory of a random Llama with a byte-level tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [*ALPHABET, *("".join(pair) for pair in MERGES)]
    vocabulary = {word: index for index, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    begin = backend.token_to_id(SPECIAL[0])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], begin)]
        )
    backend.save(str(folder / "tokenizer.json"))
    named = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "chat_template": TEMPLATE}
    named["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    ids = {"bos_token_id": begin, "eos_token_id": begin + 1}
    size = backend.get_vocab_size(with_added_tokens=True)
    config = {**CONFIG, **ids, "vocab_size": size, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    state = random_state(hf_shapes(config), SEED)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_tasks(folder: Path) -> Path:
    """Every task of `TASKS` as a harness task: a YAML file (JSON is YAML) and its rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, settings in TASKS.items():
        rows = folder / f"{name}.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in settings["rows"]))
        task = {key: value for key, value in settings.items() if key != "rows"}
        own = {"data_files": {"test": str(rows)}, "cache_dir": str(folder / "datasets")}
        files = {"dataset_path": "json", "dataset_kwargs": own}
        (folder / f"{name}.yaml").write_text(
            json.dumps({"task": name, "test_split": "test", **files, **task})
        )
    return folder
