"""A text that the server has prefilled, or will, and the ids that clients name it by."""

import dataclasses
import hashlib
import json
import math
from typing import Any

import numpy as np

from jax_longctx.serving.schema import RequestError
from jax_longctx.sources import Place
from jax_longctx.text import PromptText

Tokens = np.ndarray
# Of a text.
STATES = ("waiting", "reading", "ready", "saved")


@dataclasses.dataclass(eq=False)
class Text:
    """One text, prefilled or to be prefilled.

    Attributes:
      key: a hash of all that decides its prefill.
      tokens: int32 ids.
      total: tokens that were known when prefill began (see `Engine.prefill`).
      question: where the method needs it at prefill; such a text is never shared.
      scored: where log-probabilities of the text's tokens are wanted, the token behind them, whose
        is wanted too, and the number of best tokens; such a text is never shared.
      resident: bytes on each device, 0 while it is not in memory.
      coming: bytes that it will take there, while it is being read or loaded.
      saved: whether the disk has it.
      busy: whether it is being saved or loaded: it stays in the books, and its files stay.
      damaged: whether its files were damaged: it is saved again after prefill.
      prefilling: (tokens done, tokens in all) during prefill.
      keep: whether it stays in memory for later requests when nobody names it.
      used: when it was last used, of `time.monotonic`.
      tickets: requests that wait for it or are answered from it.
      rows: rows that are answered from it; it stays in memory for them.
      entries: the ids that name it.
    """

    key: str
    tokens: Tokens
    total: int
    question: list[int] | None = None
    scored: tuple[int, int] | None = None
    resident: int = 0
    coming: int = 0
    saved: bool = False
    busy: bool = False
    damaged: bool = False
    prefilling: tuple[int, int] | None = None
    keep: bool = False
    used: float = 0.0
    tickets: int = 0
    rows: int = 0
    entries: set[str] = dataclasses.field(default_factory=set)

    @property
    def state(self) -> str:
        """One of `STATES`."""
        if self.prefilling is not None:
            return "reading"
        return "ready" if self.resident else "saved" if self.saved else "waiting"

    @property
    def shared(self) -> bool:
        """Whether other requests may use it."""
        return self.question is None and self.scored is None

    @property
    def known(self) -> bool:
        """Whether it need not be read."""
        return bool(self.resident or self.saved)

    @property
    def begun(self) -> bool:
        """Whether it is known or being read."""
        return self.known or self.prefilling is not None


@dataclasses.dataclass
class Entry:
    """A text's name for clients.

    Attributes:
      chat: whether the text was laid out for the chat template.
      created, expires: seconds since the epoch; an entry does not expire while its text is read.
      ttl: seconds that it lives after its last use.
      save: whether the text is to be on the disk always.
      deleted: whether a client deleted it.
      prompt: the text as it was given, in its layout; None where an earlier server read it.
      place: where its characters stand.
      notes: what was left out of the documents that were sent.
    """

    id: str
    text: Text
    chat: bool
    created: float
    ttl: float
    expires: float
    save: bool
    deleted: bool = False
    prompt: PromptText | None = None
    place: Place | None = None
    notes: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """The entry as the server shows it."""
        text = self.text
        done, _ = text.prefilling or (0, 0)
        return {
            "id": self.id,
            "object": "context",
            "created": int(self.created),
            "expires_at": None if self.expires == math.inf else int(self.expires),
            "ttl": self.ttl,
            "chat": self.chat,
            "tokens": len(text.tokens),
            "tokens_read": len(text.tokens) if text.known else done,
            "state": text.state,
            "saved": text.saved,
            "bytes": text.resident,
            "notes": self.notes,
        }


def was_deleted(entry: Entry) -> RequestError:
    """The error of a request for a context that another request deleted meanwhile."""
    told = f"the context {entry.id!r} was deleted before this request was answered"
    return RequestError(told, status=410, code="context_deleted")


def key_of(row: Tokens, total: int, salt: bytes = b"") -> str:
    """A text's key: a hash of all that decides its prefill. `row` are int32 ids."""
    told = json.dumps([len(row), total]).encode() + row.tobytes() + salt
    return hashlib.sha256(told).hexdigest()[:32]
