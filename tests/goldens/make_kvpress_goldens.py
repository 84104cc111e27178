"""Makes what kvpress keeps of a text, for the rules that compress a text before the question.

    python3.11 tests/goldens/make_kvpress_goldens.py            writes data/kvpress.npz
    python3.11 tests/goldens/make_kvpress_goldens.py --check    makes and compares; 1: it differs

Needs torch, transformers and kvpress; our own packages are not imported.
"""

import argparse
import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from cases import KVPRESS
from kvpress import (
    AdaKVPress,
    CriticalAdaKVPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    KnormPress,
    KVzipPress,
    LagKVPress,
    PyramidKVPress,
    QFilterPress,
)
from kvpress.presses import kvzip_press
from make_goldens import DATA, model_of
from transformers import DynamicCache

LENGTH, SEED = 180, 1
# With `SINK` and `LAG` no two scores are equal at the border of what LagKV keeps.
BUDGETS, SINK, LAG = (60, 120), 4, 16
# And none of all heads'.
SHARED = (50, 100)
# LagKV's scores are ranks, which are equal where the first half of that budget ends.
TIED = ("lagkv", "critical", 50)
# What KVzip asks, and the part of the text that it repeats at once.
ASKS, CHUNK = [[391, 7], [12, 5, 9], [3]], 64
# The scores at the border are further apart than this, relative to their range.
MIN_GAP = 1e-5
PRESSES: dict[str, Any] = {
    "knorm": KnormPress(),
    "keydiff": KeyDiffPress(),
    "lagkv": LagKVPress(n_sink=SINK, lag_size=LAG),
    "expected-attention": ExpectedAttentionPress(n_sink=SINK),
    "q-filters": QFilterPress(),
}
# Of each layer and kv head; the published ones have the other sign.
FILTERS = np.random.default_rng(SEED).standard_normal((2, 2, 8), np.float32)
PRESSES["q-filters"].q_filters = torch.from_numpy(-FILTERS)
PRESSES["q-filters"].post_init_from_model = lambda _: None


def kept(model: Any, tokens: np.ndarray, press: Any, budget: int) -> np.ndarray:
    """Positions [layer, kv head, budget] that stay, ascending."""
    press.compression_ratio = 1 - (budget + 0.5) / len(tokens)
    layers, compress = [], press.compress

    def watched(module: Any, hidden: Any, keys: Any, values: Any, *rest: Any) -> Any:
        after = compress(module, hidden, keys, values, *rest)
        same = (after[0][0][:, :, None] == keys[0][:, None]).all(-1)  # [K, budget, S]
        assert (same.sum(-1) == 1).all()
        layers.append(same.to(torch.int8).argmax(-1).sort(-1).values.numpy())
        scores = press.score(module, hidden, keys, values, *rest).sort(-1, descending=True).values
        gap = scores[..., budget - 1] - scores[..., budget]
        if (gap < MIN_GAP * (scores[..., SINK] - scores[..., -1])).any():
            raise SystemExit(f"{press}: scores at the border are {gap.min():.1e} apart")
        return keys, values

    press.compress = watched
    with torch.no_grad(), press(model):
        model(torch.from_numpy(tokens)[None], use_cache=True)
    del press.compress
    return np.stack(layers).astype(np.int16)


def shared(model: Any, tokens: np.ndarray, press: Any, budget: int) -> np.ndarray:
    """Whether a position stays, [layer, kv head, position], where heads share their budgets."""
    press.compression_ratio = 1 - (budget + 0.5) / len(tokens)
    layers, compress = [], press.compress

    def watched(module: Any, hidden: Any, keys: Any, values: Any, *rest: Any) -> Any:
        compress(module, hidden, keys, values, *rest)
        stays = torch.ones(keys.shape[:3], dtype=torch.bool)
        stays[module.masked_key_indices] = False
        module.masked_key_indices = None
        layers.append(stays[0].numpy())
        scores = press.press.score(module, hidden, keys, values, *rest)[0]
        top = torch.topk(scores, int(0.2 * budget), dim=-1).indices
        flat = scores.scatter(-1, top, torch.inf).flatten().sort(descending=True).values
        border = flat[len(scores) * budget - 1] - flat[len(scores) * budget]
        if border < MIN_GAP * (scores.max() - scores.min()):
            raise SystemExit(f"{press}: scores at the border are {border:.1e} apart")
        return keys, values

    press.compress = watched
    with torch.no_grad(), press(model):
        model(torch.from_numpy(tokens)[None], use_cache=True)
    return np.stack(layers)


class Words:
    """A tokenizer of the texts that KVzip asks alone."""

    chat_template = None

    @classmethod
    def from_pretrained(cls, name: str) -> "Words":
        return cls()

    def encode(self, text: str, **_: Any) -> torch.Tensor:
        first, later, end = ASKS
        words = {"": [], "\n": end}.get(text, later if "part" in text else first)
        return torch.tensor([words], dtype=torch.long)


def repeated(model: Any, tokens: np.ndarray) -> np.ndarray:
    """KVzip's scores [layer, kv head, position]."""
    kvzip_press.AutoTokenizer = Words
    press, found = KVzipPress(0.5, n_sink=SINK, chunk_size=CHUNK), []
    press.compress_post = lambda _: found.append(press.score_val[:, 0].numpy())
    with torch.no_grad(), press(model):
        model(torch.from_numpy(tokens)[None], past_key_values=DynamicCache())
    return found[0]


def pyramid(length: int, budget: int, layers: int) -> list[int]:
    """What PyramidKV keeps in each layer."""
    press = PyramidKVPress(1 - budget / length, window_size=1)
    of = SimpleNamespace(num_hidden_layers=layers)
    places = (SimpleNamespace(config=of, layer_idx=layer) for layer in range(layers))
    return [press.get_layer_budget(place, length) for place in places]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    model, settings, _ = model_of("kvpress", KVPRESS, SEED)
    # Equal tokens have keys of equal norms in the first layer.
    tokens = np.random.default_rng(SEED).permutation(settings.vocab_size)[:LENGTH]
    made = {
        f"{name}.{budget}": kept(model, tokens, press, budget)
        for name, press in PRESSES.items()
        for budget in BUDGETS
    }
    # What these presses ask for.
    model.set_attn_implementation("sdpa")
    model.config.head_dim = settings.hidden_size // settings.num_attention_heads
    made |= {
        f"{name}.{way}.{budget}": shared(model, tokens, of(press), budget)
        for name, press in PRESSES.items()
        for way, of in (("ada", AdaKVPress), ("critical", CriticalAdaKVPress))
        for budget in SHARED
        if (name, way, budget) != TIED
    }
    model.set_attn_implementation("eager")
    made |= {"tokens": tokens, "asks": np.array(json.dumps(ASKS)), "filters": FILTERS}
    made["pyramid"] = np.array(pyramid(4000, 1000, layers=28))
    scores = repeated(model, tokens)
    scores[..., :SINK] = np.inf
    ranked = np.argsort(-scores, axis=-1, kind="stable")
    for budget in BUDGETS:
        made[f"kvzip.{budget}"] = np.sort(ranked[..., :budget], axis=-1).astype(np.int16)
        border = np.take_along_axis(scores, ranked[..., budget - 1 : budget + 1], axis=-1)
        if (border[..., 0] - border[..., 1] < MIN_GAP * border[..., 0]).any():
            raise SystemExit(f"kvzip: scores at the border of {budget} are too near")
    if not check:
        np.savez_compressed(DATA / "kvpress.npz", **made)
        return 0
    stored = np.load(DATA / "kvpress.npz")
    bad = [name for name in made if not np.array_equal(made[name], stored[name])]
    print("differs: " + ", ".join(bad) if bad else "as stored")
    return bool(bad) or set(stored) != set(made)


if __name__ == "__main__":
    sys.exit(main())
