"""Storage shared by the methods: functional KV-cache pytrees."""

from jax_longctx.caches.append_only import (
    AppendCache,
    Rewinding,
    append,
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
from jax_longctx.caches.branched import Branched, Store, append_to, attend_branched, parting
from jax_longctx.caches.budget import BudgetCache, choose, drop_oldest, empty_budget_cache

__all__ = [
    "AppendCache",
    "Branched",
    "BudgetCache",
    "Rewinding",
    "Store",
    "append",
    "append_to",
    "attend_branched",
    "choose",
    "drop_oldest",
    "empty_append_cache",
    "empty_budget_cache",
    "gather_slots",
    "gather_stored",
    "lines_of",
    "local_run",
    "local_slots",
    "parting",
    "read_lines",
    "where_rows",
    "with_store",
    "write_rows",
    "write_run",
]
