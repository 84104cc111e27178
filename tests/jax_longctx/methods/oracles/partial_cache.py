"""SnapKV and RefreshKV in numpy, for one row: everything materialised, lists of token ids.

Written from the specification (eviction.md, sections 5 and 10). Each layer keeps all keys and
values; for each kv head a list of ids says what decode may read, the first to leave first.
"""

import numpy as np

from tests.oracle import forward, probabilities, rope, weighted_values

THETA = 1e4


def group_scores(p, kv_heads, over):
    """`[K, n]` from window probabilities `[N, W, n]`."""
    heads = p.sum(1)
    if over == "layer":
        return np.repeat(heads.mean(0)[None], kv_heads, 0)
    grouped = heads.reshape(kv_heads, -1, heads.shape[-1])
    return {"mean": grouped.mean(1), "max": grouped.max(1), "first": grouped[:, 0]}[over]


def pool(row, kernel, kind):
    half = kernel // 2
    windows = [row[max(i - half, 0) : i + half + 1] for i in range(len(row))]
    return [max(w) if kind == "max" else w.sum() / kernel for w in windows]


def choose(p, kv_heads, *, budget, kernel, kind, over, forced):
    """Lists of ids, one a kv head: the worst first, the last `forced` tokens at the end."""
    length = p.shape[-1]
    if length <= forced:
        return [list(range(length)) for _ in range(kv_heads)]
    lists = []
    for row in group_scores(p, kv_heads, over):
        scores = pool(row[: length - forced], kernel, kind)
        best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: budget - forced]
        lists.append(best[::-1] + list(range(length - forced, length)))
    return lists


class PartialDecoder:
    """One prompt read in full, then decoded token by token over the lists."""

    def __init__(self, config, params, prompt, *, window=1, evict=True, **how):
        self.config, self.params, self.evict, self.budget = config, params, evict, how["budget"]
        heads = config.num_kv_heads
        self.how = {"forced": window, **how}
        layers = range(config.num_layers)
        self.keys, self.values, self.lists = ([None for _ in layers] for _ in range(3))
        self.reference, self.full_steps = [None] * config.num_layers, [0] * config.num_layers
        # Ids that the newest step read, for each layer and kv head.
        self.read = [[] for _ in layers]
        self.steps = 0

        def attend(layer, q, k, v):
            at = np.arange(len(q))
            turned, keys = rope(q, at, THETA), rope(k, at, THETA)
            self.keys[layer], self.values[layer] = keys, v
            p = probabilities(turned, keys, at[:, None] >= at[None, :], self.sinks(layer))
            self.lists[layer] = choose(p[:, -window:], heads, **self.how)
            self.reference[layer] = turned[-1].mean(0)
            return weighted_values(p, v)

        self.logits = forward(config, params, prompt, attend)[-1]

    def sinks(self, layer):
        """The logits of a model's learned sinks, one a head; None without."""
        return self.params["layers"][str(layer)]["attn"].get("sinks")

    def step(self, token, is_full=lambda step, cosine: False, ablation="none"):
        """Logits after `token`; `is_full(step, cosine)` for each layer."""
        self.steps += 1

        def attend(layer, q, k, v):
            at = np.array([len(self.keys[layer])])
            turned = rope(q, at, THETA)
            keys = np.concatenate([self.keys[layer], rope(k, at, THETA)])
            values = np.concatenate([self.values[layer], v])
            self.keys[layer], self.values[layer] = keys, values
            mean, old = turned[0].mean(0), self.reference[layer]
            cosine = mean @ old / np.linalg.norm(mean) / np.linalg.norm(old)
            every = list(range(len(keys)))
            reads = [[*ids, len(keys) - 1] for ids in self.lists[layer]]
            pushed = [ids[-self.budget :] if self.evict else ids for ids in reads]
            if is_full(self.steps, cosine):
                self.full_steps[layer] += 1
                self.reference[layer] = mean
                p = probabilities(turned, keys, np.ones((1, len(keys)), bool), self.sinks(layer))
                reads = [every for _ in reads]
                if ablation != "no_refresh":
                    pushed = choose(p, self.config.num_kv_heads, **self.how)
                if ablation == "no_full":
                    reads = pushed
            self.lists[layer], self.read[layer] = pushed, [sorted(ids) for ids in reads]
            return attend_lists(turned, keys, values, reads, self.sinks(layer))

        self.logits = forward(self.config, self.params, [token], attend)[-1]
        return self.logits


def attend_lists(q, keys, values, lists, sinks=None):
    """`[1, N, H]` of one query over each kv head's own ids."""
    group = q.shape[1] // keys.shape[1]
    outs = []
    for head, ids in enumerate(lists):
        mine = slice(head * group, (head + 1) * group)
        seen, own = np.ones((1, len(ids)), bool), None if sinks is None else sinks[mine]
        p = probabilities(q[:, mine], keys[ids, head : head + 1], seen, own)
        outs.append(weighted_values(p, values[ids, head : head + 1]))
    return np.concatenate(outs, 1)
