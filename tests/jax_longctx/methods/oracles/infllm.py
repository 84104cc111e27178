"""InfLLM in numpy, from its closed form: every distance, mask and score materialised."""

import dataclasses

import numpy as np

from tests.oracle import forward, rope, weighted_values

# Units of equal tokens have equal scores, but for float64's rounding.
DIGITS = 9


@dataclasses.dataclass(frozen=True)
class Rules:
    """n_init, n_local, block_size, topk, repr_topk, chunk, and a factor of the logits."""

    i0: int
    w: int
    bs: int
    kb: int
    r: int
    x: int
    temperature: float = 1.0

    def units(self, read):
        return max(0, (read - self.w - self.i0) // self.bs)


@dataclasses.dataclass
class Layer:
    """Raw keys and values, what every token received by head [N, L], each unit's [N, H]."""

    k: np.ndarray
    v: np.ndarray
    received: np.ndarray
    units: list[np.ndarray]


@dataclasses.dataclass
class Trace:
    """Of each call: logits [T, V], each layer's chosen units by head, tokens seen by any query.

    Also what each chosen unit received from all heads and queries of the call, by layer.
    """

    logits: list[np.ndarray]
    chosen: list[list[list[set[int]]]]
    seen: list[int]
    layers: list[Layer]
    paid: list[list[dict[int, float]]]


def calls_of(rules, context, question, answer):
    """How many tokens each forward call reads."""
    calls = []
    for size in (context, question - 1):
        calls += [min(rules.x, size - done) for done in range(0, size, rules.x)]
    return calls + [1] * (1 + answer)


def choose(rules, layer, q_far):
    """The units that every head attends, from queries [T, N, H] at the far distance."""
    heads = q_far.shape[1]
    if not layer.units:
        return [set()] * heads
    by_head = np.einsum("tnh,unh->nu", q_far, np.stack(layer.units)) / len(q_far)
    by_head = np.repeat(by_head.sum(0, keepdims=True), heads, axis=0)
    by_head = np.round(by_head, DIGITS)
    return [set(np.argsort(-scores, kind="stable")[: rules.kb].tolist()) for scores in by_head]


def represent(rules, layer, unit):
    """The mean of the keys that received most, by query head."""
    begin = rules.i0 + unit * rules.bs
    heads = len(layer.received)
    group = heads // layer.k.shape[1]
    rows = []
    for head in range(heads):
        received = layer.received[head, begin : begin + rules.bs]
        best = np.argsort(-received, kind="stable")[: rules.r]
        rows.append(layer.k[begin + best, head // group].mean(0))
    return np.stack(rows)


def attend(rules, layer, theta, q, begin):
    """Output [T, N, H], the chosen units, how many keys the last query saw, what units received."""
    size, heads, dim = q.shape
    group = heads // layer.k.shape[1]
    at, tokens = begin + np.arange(size), np.arange(len(layer.k))
    back = at[:, None] - tokens
    units = len(layer.units)
    q_far = rope(q, np.full(size, rules.w - 1), theta)
    q_near = rope(q, at, theta)
    chosen = choose(rules, layer, q_far)
    keys = np.repeat(layer.k, group, axis=1)
    near_keys = np.repeat(rope(layer.k, tokens, theta), group, axis=1)
    scale = dim**-0.5 * rules.temperature
    near = np.einsum("tnh,snh->nts", q_near, near_keys) * scale
    away = np.einsum("tnh,snh->nts", q_far, keys) * scale
    unit = (tokens - rules.i0) // rules.bs
    outside = (unit < 0) | (unit >= units)
    kept = np.stack([outside | np.isin(unit, list(picked)) for picked in chosen])
    left = back >= rules.w
    both = np.concatenate(
        [
            np.where((back >= 0) & (back < rules.w), near, -np.inf),
            np.where(left & kept[:, None], away, -np.inf),
        ],
        axis=-1,
    )
    p = np.exp(both - both.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    layer.received += p[..., : len(tokens)].sum(1)
    doubled = np.concatenate([layer.v, layer.v])
    far_mass = p[..., len(tokens) :].sum((0, 1))
    paid = {u: float(far_mass[unit == u].sum()) for u in set().union(*chosen)}
    return weighted_values(p, doubled), chosen, int((both[0, -1] > -np.inf).sum()), paid


def attend_all(layer, theta, q):
    """Full attention of the newest token at true positions."""
    group, tokens = q.shape[1] // layer.k.shape[1], np.arange(len(layer.k))
    keys = np.repeat(rope(layer.k, tokens, theta), group, axis=1)
    logits = np.einsum("tnh,snh->nts", rope(q, tokens[-1:], theta), keys) * q.shape[2] ** -0.5
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return weighted_values(p / p.sum(-1, keepdims=True), layer.v)


def follow(rules, config, params, tokens, calls, dense=0):
    """Reads `tokens` in those calls, of which the last `dense` attend everything."""
    shape = (0, config.num_kv_heads, config.head_dim)
    layers = [
        Layer(np.zeros(shape), np.zeros(shape), np.zeros((config.num_heads, 0)), [])
        for _ in range(config.num_layers)
    ]
    trace = Trace([], [], [], layers, [])

    def step(index, q, k, v):
        layer = layers[index]
        begin = len(layer.k)
        layer.k, layer.v = np.concatenate([layer.k, k]), np.concatenate([layer.v, v])
        layer.received = np.pad(layer.received, ((0, 0), (0, len(k))))
        if len(trace.chosen) > len(calls) - dense:
            return attend_all(layer, config.rope.theta, q)
        out, chosen, seen, paid = attend(rules, layer, config.rope.theta, q, begin)
        trace.paid[-1].append(paid)
        trace.chosen[-1].append(chosen)
        trace.seen.append(seen)
        for unit in range(len(layer.units), rules.units(len(layer.k))):
            layer.units.append(represent(rules, layer, unit))
        return out

    done = 0
    for call in calls:
        trace.chosen.append([])
        trace.paid.append([])
        trace.logits.append(forward(config, params, tokens[done : done + call], step))
        done += call
    for layer in layers:  # what a token has received is final once it is packed
        for unit, row in enumerate(layer.units):
            np.testing.assert_array_equal(row, represent(rules, layer, unit))
    return trace
