"""Star Attention in numpy, block by block and row by row."""

import numpy as np

from tests.oracle import forward, probabilities, rope, weighted_values


def read_blocks(method, config, params, row):
    """Rotated keys and values `[L][2][T, K, H]` of a text, each block read behind its anchor."""
    theta = config.rope.theta
    kept = [
        [np.zeros((0, config.num_kv_heads, config.head_dim)) for _ in range(2)]
        for _ in range(config.num_layers)
    ]

    def read(tokens, at, drop):
        """Tokens at positions, causal in their order; all but the first `drop` are kept."""

        def attend(layer, q, k, v):
            k = rope(k, at, theta)
            order = np.arange(len(q))
            p = probabilities(rope(q, at, theta), k, order[:, None] >= order)
            for own, new in enumerate((k, v)):
                kept[layer][own] = np.concatenate([kept[layer][own], new[drop:]])
            return weighted_values(p, v)

        forward(config, params, tokens, attend)

    size, a = method.block, method.anchor_size
    for start in range(0, len(row), size):
        block = row[start : start + size]
        at = start + np.arange(len(block))
        if start == 0 or a == 0:
            read(block, at, 0)
            continue
        anchor = method.anchor_tokens(row, start, config.vocab_size)
        before = {"first": np.arange(a), "previous": start - size + np.arange(a)}
        read(
            [*anchor, *block],
            np.concatenate([before[getattr(method, "positions", "first")], at]),
            a,
        )
    return kept


def tail_logits(config, params, kept, tail, hidden=None):
    """Logits `[len(tail), V]` of question and answer over what was kept and themselves.

    `hidden[r]` are slots of the text that token r of the tail does not see.
    """
    theta, length = config.rope.theta, len(kept[0][0])

    def attend(layer, q, k, v):
        at = length + np.arange(len(q))
        keys = np.concatenate([kept[layer][0], rope(k, at, theta)])
        values = np.concatenate([kept[layer][1], v])
        visible = at[:, None] >= np.arange(len(keys))
        for r, slots in enumerate(hidden or []):
            visible[r, slots] = False
        return weighted_values(probabilities(rope(q, at, theta), keys, visible), values)

    return forward(config, params, tail, attend)
