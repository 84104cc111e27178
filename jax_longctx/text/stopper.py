"""Stop strings over streamed text.

Text arrives in pieces of any size. A piece is passed on as soon as it can no longer be the start of
a stop string; what is left waits. The text ends before the first stop string that appears in it,
wherever the borders between pieces fall. Work is linear in the text: only a tail shorter than the
longest stop string is ever looked at twice.
"""

from collections.abc import Iterable

from jax_longctx.errors import InputError

__all__ = ["StopStrings"]


class StopStrings:
    """Cuts a stream of text at the first of several strings.

    Where two stop strings could end the text, the one that starts first wins; at the same start
    they cut at the same place. Empty stop strings are refused, as they would end every text.
    """

    def __init__(self, stops: Iterable[str] = ()):
        self._stops = tuple(dict.fromkeys(stops))
        if "" in self._stops:
            raise InputError("a stop string is empty; give at least one character")
        self._held = ""
        self._stopped: str | None = None

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stopped

    def push(self, text: str) -> str:
        """What of the text so far is certain and new; "" once stopped."""
        if self._stopped is not None:
            return ""
        text = self._held + text
        keep = self._possible_start(text)
        # A stop string that starts after `keep` must wait: an earlier one may still complete.
        found = [(at, stop) for stop in self._stops if 0 <= (at := text.find(stop)) <= keep]
        if found:
            at, self._stopped = min(found, key=lambda hit: hit[0])
            self._held = ""
            return text[:at]
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """The text still held back, at the end of the stream."""
        held, self._held = self._held, ""
        if self._stopped is not None:
            return ""
        found = [(at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            at, self._stopped = min(found, key=lambda hit: hit[0])
            return held[:at]
        return held

    def _possible_start(self, text: str) -> int:
        """The first index from which the text's tail is an unfinished stop string."""
        longest = max(map(len, self._stops), default=1)
        for start in range(max(0, len(text) - longest + 1), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) and stop != tail for stop in self._stops):
                return start
        return len(text)
