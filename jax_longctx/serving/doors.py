"""Who may ask: API keys, pages of browsers, names of this machine.

A browser sends a page's requests to any address, this machine's too, and says from which page they
come (`Origin`). A page whose name is made to point here (DNS rebinding) looks like one of this
server's own, and is known by the name that it asked for (`Host`).
"""

import dataclasses
import hashlib
import hmac
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from jax_longctx.serving.schema import RequestError

LOOPBACK = "localhost"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Access:
    """Who may ask, and how much.

    Attributes:
      keys: SHA-256 digests of the API keys; none: everyone may ask.
      hosts: names, in lower case, besides loopback that a request's `Host` may have where there
        are no keys and the connection is to a loopback address; None: any.
      origins: of pages that browsers may ask from; "*": of all. None else may.
      beside: addresses of servers whose answers the page at `/` may show beside this one's.
      files_under: the folder that `file` of a context may name a file of, or None.
      body: most bytes of a request.
      bodies: most bytes of all requests that are being received or tokenised.
      body_seconds: for a request's body to arrive.
      seconds: for a request to be answered, from its headers on.
    """

    keys: Sequence[bytes] = ()
    hosts: Sequence[str] | None = ()
    origins: Sequence[str] = ()
    beside: Sequence[str] = ()
    files_under: Path | None = None
    body: int = 64 * 2**20
    bodies: int = 256 * 2**20
    body_seconds: float = 120.0
    seconds: float = 600.0

    def check_key(self, headers: Headers) -> None:
        """Raises RequestError unless the request has one of the keys, if there are any."""
        if not self.keys:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = hashlib.sha256(key.strip().encode("latin-1")).digest()
        # All keys are compared, each in constant time.
        found = [hmac.compare_digest(given, each) for each in self.keys]
        if scheme.lower() != "bearer" or not any(found):
            raise RequestError(
                "no valid API key; send it as 'Authorization: Bearer KEY'",
                status=401,
                code="invalid_api_key",
            )


class Doors:
    """Answers 403 where a request names another host, or comes from a foreign page.

    Args:
      access: its `hosts` and `origins` are checked here.
    """

    def __init__(self, app: ASGIApp, *, access: Access) -> None:
        self._app, self._origins = app, frozenset(access.origins)
        # Who has a key is no page that was led here.
        self._hosts = None if access.keys else access.hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        why = self._refusal(scope) if scope["type"] == "http" else None
        if why is None:
            await self._app(scope, receive, send)
            return
        error = RequestError(why, status=403, code="forbidden")
        await JSONResponse(error.body(), error.status)(scope, receive, send)

    def _refusal(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        name, reached = _name(f"//{host}"), scope.get("server")
        # Who connects to another address of this machine may ask by any name. Browsers always name
        # one.
        local = reached is None or _is_loopback(reached[0])
        if self._hosts is not None and local and host:
            if name not in self._hosts and not _is_loopback(name):
                return (
                    f"this server is not {name!r:.80}; ask it as {LOOPBACK}, or start it with "
                    f"an API key or --no-key (from Python: Access.hosts)"
                )
        if origin is None or not self._origins.isdisjoint({origin, "*"}):
            return None
        if host and origin.lower().partition("://")[2] == host.lower():
            return None
        return f"pages of {origin!r:.80} may not ask; start the server with --allow-origin"


def _name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_loopback(name: str) -> bool:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name.rstrip(".").rpartition(".")[2] == LOOPBACK
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
