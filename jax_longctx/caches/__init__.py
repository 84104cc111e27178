"""Storage shared by the methods: functional KV-cache pytrees."""

from jax_longctx.caches.append_only import (
    AppendCache,
    append,
    empty_append_cache,
    gather_slots,
    write_run,
)

__all__ = ["AppendCache", "append", "empty_append_cache", "gather_slots", "write_run"]
