"""Storage shared by the methods: functional KV-cache pytrees."""

from jax_longctx.caches.append_only import (
    AppendCache,
    Rewinding,
    Store,
    cache_of,
    compacted,
    empty_append_cache,
    where_rows,
    with_store,
    write_rows,
    write_run,
    written_after,
)
from jax_longctx.caches.branched import Branched
from jax_longctx.caches.budget import (
    BudgetCache,
    Joining,
    choose,
    drop_oldest,
    empty_budget_cache,
)
from jax_longctx.caches.digests import PageDigests, SelectiveCache, masked_max, masked_mean
from jax_longctx.caches.offloaded import Offloaded, Reads, empty_store
from jax_longctx.caches.paged import Near, merged
from jax_longctx.caches.reading import (
    Turned,
    gather_slots,
    gather_stored,
    local_run,
    local_slots,
    numbers,
    read_lines,
)
from jax_longctx.caches.scope import Listed, Scope, Votes, page_of_spans, pages_of_run
from jax_longctx.caches.window import WindowCache

__all__ = [
    "AppendCache",
    "Branched",
    "BudgetCache",
    "Joining",
    "Listed",
    "Near",
    "Offloaded",
    "PageDigests",
    "Reads",
    "Rewinding",
    "Scope",
    "SelectiveCache",
    "Store",
    "Turned",
    "Votes",
    "WindowCache",
    "cache_of",
    "choose",
    "compacted",
    "drop_oldest",
    "empty_append_cache",
    "empty_budget_cache",
    "empty_store",
    "gather_slots",
    "gather_stored",
    "local_run",
    "local_slots",
    "masked_max",
    "masked_mean",
    "merged",
    "numbers",
    "page_of_spans",
    "pages_of_run",
    "read_lines",
    "where_rows",
    "with_store",
    "write_rows",
    "write_run",
    "written_after",
]
