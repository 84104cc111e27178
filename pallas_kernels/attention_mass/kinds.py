"""How attention mass is reduced, by name."""

from typing import Literal

# Over the query heads that share a kv head; "first" is the group's lowest head alone.
OverGroup = Literal["sum", "max", "first"]
# Over a head's queries, before its group.
OverQueries = Literal["sum", "max"]
