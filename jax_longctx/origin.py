"""What an output was made from: input, model, method and options, kept with the output.

An output whose origin is another one is neither continued nor called complete. Options that do not
change answers, such as mesh and offload, are no part of an origin.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jax_longctx.errors import LongctxError, OriginError
from jax_longctx.files import read_text
from jax_longctx.gone import current

# Most differences that an error names, and characters of a value.
NAMED, SHOWN = 3, 60
# Key of the origin in JSON results.
MADE_FROM = "made_from"
OVERWRITE = "choose another name, or give --overwrite to replace it"


def digest_of(value: Any) -> str:
    """A short hash of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def differences(known: Any, given: Any, name: str = "") -> Iterator[str]:
    """`NAME OLD, now it is NEW` for each value that differs; names of nested ones have dots."""
    if isinstance(known, Mapping) and isinstance(given, Mapping):
        for key in dict.fromkeys([*given, *known]):
            inner = f"{name}.{key}" if name else key
            yield from differences(known.get(key), given.get(key), inner)
    elif known != given:
        yield f"{name} {_shown(known)}, now it is {_shown(given)}"


def check_same(
    path: Path,
    known: Mapping[str, Any],
    given: Mapping[str, Any],
    other: str = OVERWRITE,
    *,
    free: tuple[str, ...] = (),
    kind: type[LongctxError] = OriginError,
) -> None:
    """Raises an error that names the differences of the `known` and the `given` origin.

    Args:
      path: what was made, for the error.
      other: what the user can do instead, for the error.
      free: facts that may differ.
      kind: of the error.
    """
    # As JSON reads it back: tuples are lists there.
    found = differences(current(known), json.loads(json.dumps(given)))
    found = [each for each in found if not each.startswith(free)]
    if found:
        more = f" (and {len(found) - NAMED} more)" if len(found) > NAMED else ""
        raise kind(
            f"{path} was made with {'; '.join(found[:NAMED])}{more}; run with the same, or {other}"
        )


def check_result(
    path: Path,
    given: Mapping[str, Any],
    kept_in: Path | None = None,
    *,
    free: tuple[str, ...] = (),
) -> dict[str, Any]:
    """What a JSON file with results holds, or the one where their origin is `kept_in`.

    Raises:
      OriginError: it holds no origin, or another one than the `given`.
    """
    try:
        found = json.loads(read_text(kept_in or path))
        known = dict(found[MADE_FROM])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        raise OriginError(
            f"{path} exists, and {kept_in or 'it'} does not say what it was made from: another "
            f"command or an earlier version wrote it; {OVERWRITE}"
        ) from None
    check_same(path, known, given, free=free)
    return found


def _shown(value: Any) -> str:
    """The value in short; a long one begins alike in both, so its hash follows."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 20]}... ({digest_of(value)})"
