"""A numpy decoder whose layers forget, one row of text at a time, every probability materialised.

`Evicting` follows the two protocols; a rule says how slots are ranked. The slots of a
layer are lists of what each kv head kept.
"""

import dataclasses

import numpy as np

from tests.oracle import forward, probabilities, rope, weighted_values

THETA = 1e4


@dataclasses.dataclass
class Kept:
    """What one layer holds: lists over the kv heads, `[n, H]`, `[n]` and `[n, M]` each."""

    k: list[np.ndarray]
    v: list[np.ndarray]
    token: list[np.ndarray]
    sums: list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class View:
    """A rule's view of one segment in one layer.

    `p` are probabilities `[N, T, n + T]`; `token` as of `Kept`, new tokens included; `leave` slots
    are to go out of those marked in `may`; `staying` is how many slots there are apart from a
    probe's own.
    """

    p: np.ndarray
    n: int
    token: list[np.ndarray]
    leave: int
    may: np.ndarray
    staying: int
    role: str
    heads: int

    def group(self, head):
        """Probabilities of the query heads of one kv head, `[G, T, n + T]`."""
        size = len(self.p) // self.heads
        return self.p[head * size : (head + 1) * size]

    @property
    def queries(self):
        """How many queries of this segment could see each slot."""
        rows = self.p.shape[1]
        return np.array([rows] * self.n + [rows - i for i in range(rows)], float)


class StreamingRule:
    """By age, which needs no statistics; `method` has a rule's settings."""

    # Statistics of a slot, and how many of them the library keeps too.
    sums = compared = 0

    def __init__(self, method):
        self.method = method

    def update(self, view, sums, head):
        return sums

    def score(self, view, sums, head):
        token = view.token[head]
        return np.where(token < self.method.sink, np.inf, token)


class H2ORule(StreamingRule):
    sums = compared = 1

    def update(self, view, sums, head):
        columns = view.group(head).sum(1)
        mass = columns.mean(0) if self.method.over_group == "mean" else columns.max(0)
        return sums + mass[:, None]

    def score(self, view, sums, head):
        score = sums[:, 0].copy()
        own = self.method.protocol == "own"
        end = len(score) if own else view.n
        recent = min(self.method.recent, end) if own else 0
        score[end - recent : end] = np.inf
        return score


class TOVARule(StreamingRule):
    def score(self, view, sums, head):
        return view.p[:, -1].mean(0)


class RoCoRule(StreamingRule):
    sums = compared = 3

    def update(self, view, sums, head):
        p = view.group(head).mean(0)
        return sums + np.stack([p.sum(0), (p**2).sum(0), view.queries], 1)

    def score(self, view, sums, head):
        if not view.leave:
            return np.zeros(len(sums))
        how, decoding = self.method, view.role == "decode"
        sink = 0 if decoding else how.sink
        window = int((how.decode_recent_ratio if decoding else how.recent_ratio) * how.budget)
        size = max(how.budget - window - sink, view.leave)
        mean = sums[:, 0] / sums[:, 2]
        std = np.sqrt(np.maximum(sums[:, 1] / sums[:, 2] - mean**2, 0))
        free = [s for s in range(sink, view.staying - how.protected_last) if view.may[s]]
        scope = sorted(free, key=lambda s: (std[s], -s))[:size]
        score = np.full(len(sums), np.inf)
        score[scope] = mean[scope]
        return score


class Evicting:
    """One row through the model; `feed` it segment by segment and look at `layers`."""

    def __init__(self, config, params, rule):
        self.config, self.params, self.rule, self.method = config, params, rule, rule.method
        k = np.zeros((0, config.head_dim))
        empty = (k, k, np.zeros(0, int), np.zeros((0, rule.sums)))
        self.layers = [
            Kept(*([part] * config.num_kv_heads for part in empty))
            for _ in range(config.num_layers)
        ]
        self.position = 0

    def feed(self, tokens, role):
        """Logits `[T, V]` of the tokens."""

        def attend(layer, q, k, v):
            sinks = self.params["layers"][str(layer)]["attn"].get("sinks")
            return self._attend(self.layers[layer], (q, k, v), role, sinks)

        logits = forward(self.config, self.params, tokens, attend)
        self.position += 0 if role == "probe" else len(tokens)
        return logits

    def _attend(self, kept, new, role, sinks):
        q, k, v = new
        rows, n, heads = len(q), len(kept.token[0]), k.shape[1]
        group = q.shape[1] // heads
        shifted = self.method.positions == "shifted"
        at = (n if shifted else self.position) + np.arange(rows)
        seen = np.arange(n + rows)[None] <= n + np.arange(rows)[:, None]
        token = [np.concatenate([t, self.position + np.arange(rows)]) for t in kept.token]
        p, out = [], []
        for head in range(heads):
            mine = slice(head * group, (head + 1) * group)
            keys = np.concatenate([kept.k[head], k[:, head]])[:, None]
            values = np.concatenate([kept.v[head], v[:, head]])[:, None]
            where = np.concatenate([np.arange(n) if shifted else kept.token[head], at])
            turned = rope(q[:, mine], at, THETA), rope(keys, where, THETA)
            weights = probabilities(*turned, seen, None if sinks is None else sinks[mine])
            p.append(weights)
            out.append(weighted_values(weights, values))
        self._evict(kept, np.concatenate(p), k, v, token, n, role)
        return np.concatenate(out, axis=1)

    def _evict(self, kept, p, k, v, token, n, role):
        rows, heads, budget = len(k), k.shape[1], self.method.budget
        new = np.arange(n + rows) >= n
        if self.method.protocol == "own":
            may, leave = np.ones(n + rows, bool), max(n + rows - budget, 0)
        else:
            may = ~new
            leave = max(n - (budget - self.method.chunk), 0) if role in ("context", "probe") else 0
        staying = n if role == "probe" else n + rows
        looks = self.method.protocol == "own" or role in ("context", "probe")
        view = View(p, n, token, leave, may, staying, role, heads)
        for head in range(heads):
            sums = np.concatenate([kept.sums[head], np.zeros((rows, self.rule.sums))])
            stays = np.arange(n + rows) < staying
            if looks:
                sums = self.rule.update(view, sums, head)
                score = self.rule.score(view, sums, head)
                # The lowest leave, and of equals the newest.
                worst = sorted(np.flatnonzero(may), key=lambda s, score=score: (score[s], -s))
                stays[worst[:leave]] = False
            kept.k[head] = np.concatenate([kept.k[head], k[:, head]])[stays]
            kept.v[head] = np.concatenate([kept.v[head], v[:, head]])[stays]
            kept.token[head] = token[head][stays]
            kept.sums[head] = sums[stays]
