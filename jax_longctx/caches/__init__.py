"""Storage shared by the methods: functional KV-cache pytrees."""

from jax_longctx.caches.append import (
    AppendCache,
    append,
    empty_append_cache,
    gather_slots,
    write_run,
)

__all__ = ["AppendCache", "append", "empty_append_cache", "gather_slots", "write_run"]
