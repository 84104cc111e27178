"""Storage shared by the methods: functional KV-cache pytrees."""

from jax_longctx.caches.append_only import (
    AppendCache,
    Rewinding,
    empty_append_cache,
    gather_slots,
    gather_stored,
    lines_of,
    local_run,
    local_slots,
    read_lines,
    where_rows,
    with_store,
    write_rows,
    write_run,
)
from jax_longctx.caches.branched import Branched, attend_branched, parting
from jax_longctx.caches.budget import BudgetCache, choose, drop_oldest, empty_budget_cache
from jax_longctx.caches.offloaded import (
    Offloaded,
    Reads,
    Store,
    empty_store,
    pages_of_run,
    read_keys,
    read_slots,
)

__all__ = [
    "AppendCache",
    "Branched",
    "BudgetCache",
    "Offloaded",
    "Reads",
    "Rewinding",
    "Store",
    "attend_branched",
    "choose",
    "drop_oldest",
    "empty_append_cache",
    "empty_budget_cache",
    "empty_store",
    "gather_slots",
    "gather_stored",
    "lines_of",
    "local_run",
    "local_slots",
    "pages_of_run",
    "parting",
    "read_keys",
    "read_lines",
    "read_slots",
    "where_rows",
    "with_store",
    "write_rows",
    "write_run",
]
