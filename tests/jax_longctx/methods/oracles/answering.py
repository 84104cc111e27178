"""A numpy decoder that compresses a text and goes on evicting as it answers, one row at a time.

A rule is a function of a head's keys [n, H] (rotated), of the rotated and the raw queries [t, G, H]
of its group so far, and of the position of the next token. It returns scores [n].
"""

import numpy as np

from tests.oracle import forward, probabilities, rope, weighted_values

THETA = 1e4


def r_kv(method):
    def scores(keys, rotated, raw, position):
        before, scored = keys[: len(keys) - method.local], np.full(len(keys), np.inf)
        observers, n = rotated[-method.local :], len(before)
        dots = np.einsum("tgh,sh->tgs", observers, before) * keys.shape[1] ** -0.5
        shares = softmax(dots.max(1))
        half = method.kernel // 2
        pooled = [shares[:, max(i - half, 0) : i + half + 1].max(1) for i in range(n)]
        unit = before / np.linalg.norm(before, axis=1, keepdims=True)
        cosines = unit @ unit.T
        np.fill_diagonal(cosines, 0.0)
        for row in cosines:
            alike = np.flatnonzero(row > method.similar)
            row[alike[-1:]] = 0.0
        importance, redundancy = np.mean(pooled, 1), softmax(cosines.mean(0))
        scored[:n] = method.lam * importance - (1 - method.lam) * redundancy
        return scored

    return scores


def triattention(method):
    def scores(keys, rotated, raw, position):
        half = keys.shape[1] // 2
        frequencies = THETA ** (-np.arange(half) / half)

        def numbers(x):
            return x[..., :half] + 1j * x[..., half:]

        q, k = numbers(raw), numbers(keys)
        centre, size = q.mean(0), np.abs(q).mean(0)
        ahead = position + 2 ** np.arange(17)
        turned = centre[:, None] * np.exp(1j * ahead[:, None] * frequencies)  # [G, 17, F]
        trig = np.einsum("gxf,sf->gxs", turned, k.conj()).real.mean(1)
        found = trig + (size - np.abs(centre)) @ np.abs(k).T
        among = found[:, method.sink : found.shape[1] - method.local]
        best = ((found - among.mean(1)[:, None]) / among.std(1)[:, None]).max(0)
        best[: method.sink] = best[len(best) - method.local :] = np.inf
        return best

    return scores


def softmax(x):
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


class Answering:
    """One row through the model; `tokens` are what each head of each layer has kept."""

    def __init__(self, config, params, rule, budget):
        self.config, self.params, self.rule, self.budget = config, params, rule, budget
        heads = range(config.num_kv_heads)
        none = np.zeros((0, config.head_dim))
        layers = range(config.num_layers)
        self.keys, self.values = ([[none for _ in heads] for _ in layers] for _ in range(2))
        self.tokens = [[np.zeros(0, int) for _ in heads] for _ in layers]
        self.queries, self.position = [None for _ in layers], 0

    def feed(self, tokens, leaving, before):
        """Logits [T, V]; all but the best `budget` tokens leave after it, or also before it."""
        layers = range(self.config.num_layers)
        for layer in layers if before else ():
            self._evict(layer)
        logits = forward(self.config, self.params, tokens, self._attend)
        self.position += len(tokens)
        for layer in layers if leaving else ():
            self._evict(layer)
        return logits

    def _attend(self, layer, q, k, v):
        at, group = self.position + np.arange(len(q)), q.shape[1] // k.shape[1]
        turned, new = rope(q, at, THETA), rope(k, at, THETA)
        both, before = np.stack([turned, q]), self.queries[layer]
        self.queries[layer] = both if before is None else np.concatenate([before, both], axis=1)
        out = []
        for head in range(k.shape[1]):
            for held, more in ((self.keys, new), (self.values, v)):
                held[layer][head] = np.concatenate([held[layer][head], more[:, head]])
            self.tokens[layer][head] = np.concatenate([self.tokens[layer][head], at])
            seen = self.tokens[layer][head] <= at[:, None]
            mine = turned[:, head * group : (head + 1) * group]
            p = probabilities(mine, self.keys[layer][head][:, None], seen)
            out.append(weighted_values(p, self.values[layer][head][:, None]))
        return np.concatenate(out, axis=1)

    def _evict(self, layer):
        group = self.config.num_heads // self.config.num_kv_heads
        for head, keys in enumerate(self.keys[layer]):
            if len(keys) <= self.budget:
                continue
            mine = self.queries[layer][:, :, head * group : (head + 1) * group]
            scores = self.rule(keys, *mine, self.position)
            stays = np.sort(np.argsort(-scores, kind="stable")[: self.budget])
            for held in (self.keys, self.values, self.tokens):
                held[layer][head] = held[layer][head][stays]
