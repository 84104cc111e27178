"""Which browsers' pages and which names of this machine the server answers.

A browser sends a page's requests to any address, this machine's too, and says from which page they
come (`Origin`). A page whose name is made to point here (DNS rebinding) looks like one of this
server's own, and is known by the name that it asked for (`Host`).
"""

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from jax_longctx.serving.schema import RequestError

LOOPBACK = "localhost"


class Doors:
    """Answers 403 where a request names another host, or comes from a foreign page.

    Args:
      hosts: names besides loopback that `Host` may have; None: any.
      origins: pages of other origins that may ask, as browsers name them; "*": all pages.
    """

    def __init__(
        self, app: ASGIApp, *, hosts: frozenset[str] | None, origins: frozenset[str]
    ) -> None:
        self._app, self._hosts, self._origins = app, hosts, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        why = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        if why is None:
            await self._app(scope, receive, send)
            return
        error = RequestError(why, status=403, code="forbidden")
        await JSONResponse(error.body(), error.status)(scope, receive, send)

    def _refusal(self, headers: Headers) -> str | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._hosts is not None:
            name = _name(f"//{host}")
            # Browsers always name one.
            if host and name not in self._hosts and not _is_loopback(name):
                return (
                    f"this server is not {name!r:.80}; ask it as {LOOPBACK}, or start it with "
                    f"an API key or --no-key"
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
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.rstrip(".").rpartition(".")[2] == LOOPBACK
