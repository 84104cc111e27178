"""Which tokens a partial cache holds, and which of them in order."""

import numpy as np


def in_order(cache, method):
    """Each row's and head's tokens that the step could read, the first to leave first."""
    order, size = cache.partial, cache.partial.chosen.shape[2] + 1
    limits = size
    if not method.evict_on_push:
        limits = size = order.k.shape[2]
    elif method.budget is None:
        limits = order.count + 1
    tokens = np.asarray(order.tokens(limits, size))
    written = np.asarray(order.count + order.pushed)
    lists = []
    for row, count, limit in zip(tokens, written, np.broadcast_to(limits, 4), strict=True):
        turn = [slot % limit for slot in range(max(count - limit, 0), count)]
        lists.append([[int(head[slot]) for slot in turn] for head in row])
    return lists


def leaving(method, step):
    """How many tokens may still leave a list before it is made anew; None: all of them."""
    if not method.evict_on_push:
        return 0
    never = method.schedule != "fixed" or method.ablation == "no_refresh"
    return None if never else method.stride - step % method.stride


def partly(lists, ordered):
    """The first tokens in order, the others in any."""
    return [(ids[:ordered], sorted(ids)) for ids in lists]
