"""The page at `/`: the files of the folder `page`, which load nothing from elsewhere.

Its Content-Security-Policy lets the page ask this server alone, and those that `--beside` names.
Documents and answers stay text: with Trusted Types the browser makes no HTML of a string.
"""

import html
from collections.abc import Sequence
from importlib import resources

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jax_longctx.serving.openapi import Way, describe
from jax_longctx.serving.schema import RequestError

KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src data:",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)


class Web:
    """What people see of the server in a browser.

    Args:
      beside: addresses of servers whose answers the page may show beside this one's.
      others: all other routes, for the description.

    Attributes:
      ways: all routes.
    """

    def __init__(self, beside: Sequence[str], others: Sequence[Way]):
        folder = resources.files("jax_longctx.serving") / "page"
        self._files = {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}
        named = html.escape(" ".join(beside)).encode()
        self._files["index.html"] = self._files["index.html"].replace(b"{beside}", named)
        policy = "; ".join([*POLICY, " ".join(["connect-src 'self'", *beside])])
        self._headers = {"content-security-policy": policy, "cache-control": "no-cache"}
        self._headers |= {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
        own = [("/", self.page), ("/page/{name}", self.file), ("/openapi.json", self.description)]
        self.ways: list[Way] = [*others, *(("GET", path, handler) for path, handler in own)]
        self._described = describe(self.ways)

    async def page(self, request: Request) -> Response:
        """GET /: the page for people."""
        return self._file("index.html")

    async def file(self, request: Request) -> Response:
        """GET /page/{name}: a file of the page."""
        return self._file(request.path_params["name"])

    async def description(self, request: Request) -> Response:
        """GET /openapi.json: all routes, as an OpenAPI document."""
        return JSONResponse(self._described)

    def _file(self, name: str) -> Response:
        kind = KINDS.get(name.rpartition(".")[2])
        if kind is None or name not in self._files:
            told = f"the page has no file {name!r:.80}"
            raise RequestError(told, status=404, code="unknown_url")
        return Response(self._files[name], media_type=kind, headers=self._headers)
