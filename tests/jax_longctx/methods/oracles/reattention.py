"""ReAttention in numpy, from its definition: sets, sorted lists, every score materialised."""

import dataclasses
from collections import Counter

import numpy as np

from tests.oracle import forward, probabilities, rope, weighted_values

# Equal tokens have equal scores, but for float64's rounding.
DIGITS = 9


@dataclasses.dataclass(frozen=True)
class Rules:
    """g, w, m, k, k', c of the paper."""

    g: int
    w: int
    m: int
    k: int
    kept: int
    c: int


@dataclasses.dataclass
class Trace:
    """Of each call: logits [T, V] and every layer's attended indices; at the end the raw keys."""

    logits: list[np.ndarray]
    indices: list[list[np.ndarray]]
    keys: list[np.ndarray]


def calls_of(rules, context, question, answer):
    """How many tokens each forward call reads."""
    calls = [min(rules.g + rules.w, context)]
    for rest in (context - calls[0], question - 1):
        calls += [min(rules.c, rest - done) for done in range(0, rest, rules.c)]
    return [call for call in calls if call] + [1] * (1 + answer)


def votes_kept(named, kept):
    """The most named, ties to the smaller, ascending."""
    votes = Counter(index for index in named if index >= 0)
    return sorted(sorted(votes, key=lambda index: (-votes[index], index))[:kept])


def named_keys(rules, q, middle):
    """Every (query, head)'s best indices of the middle [M, K, H]."""
    heads = q.shape[1]
    kv_heads = middle.shape[1]
    named: list[int] = []
    for head in range(heads):
        kv = head // (heads // kv_heads)
        scores = np.round(q[:, head] @ middle[:, kv].T, DIGITS)
        for row in scores:
            named += sorted(range(len(row)), key=lambda j: (-row[j], j))[: rules.k]
    return named


def chosen(rules, q, keys):
    """Indices that raw queries [T, N, H], the newest tokens of raw `keys` [L, K, H], attend."""
    length = len(keys)
    if length <= rules.g + rules.w:
        return np.arange(length)
    local = rules.w
    middle = keys[rules.g : length - local]
    union: set[int] = set()
    if rules.k:
        for centre in votes_kept(named_keys(rules, q, middle), rules.kept):
            span = range(centre - rules.m // 2, centre + rules.m - rules.m // 2)
            union |= {index for index in span if 0 <= index < len(middle)}
    parts = [range(rules.g), (rules.g + j for j in sorted(union)), range(length - local, length)]
    return np.array([index for part in parts for index in part])


def follow(rules, config, params, tokens, calls):
    """Reads `tokens` in those calls."""
    store: list[list[np.ndarray]] = [[] for _ in range(config.num_layers)]
    values: list[list[np.ndarray]] = [[] for _ in range(config.num_layers)]
    trace = Trace([], [], [])
    theta = config.rope.theta

    def attend(layer, q, k, v):
        store[layer].append(k)
        values[layer].append(v)
        keys, size = np.concatenate(store[layer]), len(q)
        indices = chosen(rules, q, keys)
        trace.indices[-1].append(indices)
        at = np.arange(len(indices))
        seen = np.arange(len(at)) <= np.arange(len(at) - size, len(at))[:, None]
        p = probabilities(rope(q, at[-size:], theta), rope(keys[indices], at, theta), seen)
        return weighted_values(p, np.concatenate(values[layer])[indices])

    done = 0
    for call in calls:
        trace.indices.append([])
        trace.logits.append(forward(config, params, tokens[done : done + call], attend))
        done += call
    trace.keys = [np.concatenate(keys) for keys in store]
    return trace
