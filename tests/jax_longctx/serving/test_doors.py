import asyncio
import contextlib
import functools
import hashlib
import http.server
import json
import re
import shutil
import subprocess
import threading
from unittest.mock import AsyncMock

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from typer.testing import CliRunner

from jax_longctx.cli.main import app
from jax_longctx.serving.doors import Access, Doors
from tests.jax_longctx.serving.tiny import BOOK
from tests.patience import patience

PAGE = "https://page.example"


def asked(url, **headers):
    body = {"text": BOOK}
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(
        f"{url}/v1/contexts", json=body, headers=headers, timeout=patience(60)
    ).status_code


def test_hosts_and_pages_that_may_ask(server, serve, tiny):
    own = server.url.removeprefix("http://")
    for headers, status in [
        ({}, 201),
        ({"host": "localhost"}, 201),
        ({"host": "127.0.0.9:80"}, 201),
        ({"host": "[::1]:8000"}, 201),
        ({"origin": f"http://{own}"}, 201),
        ({"host": "attacker.example"}, 403),
        ({"host": "localhost.attacker.example"}, 403),
        ({"host": "xlocalhost"}, 403),
        ({"host": "10.0.0.1"}, 403),
        ({"host": "[::1"}, 403),
        ({"host": ""}, 201),
        ({"host": "x.localhost"}, 201),
        ({"origin": PAGE}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://["}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),
        # What a page may send without asking first.
        ({"content_type": "text/plain"}, 415),
        ({"content_type": "application/x-www-form-urlencoded"}, 415),
        ({"content_type": "application/json; charset=utf-8"}, 201),
    ]:
        assert asked(server.url, **headers) == status, headers
    named = serve(tiny, access=Access(hosts=["box.local"], origins=[PAGE]))
    for headers, status in [
        ({"host": "Box.local:80"}, 201),
        ({"host": "other.local"}, 403),
        ({"origin": PAGE}, 201),
        ({"origin": f"{PAGE}.attacker.example"}, 403),
    ]:
        assert asked(named.url, **headers) == status, headers
    preflight = {"origin": PAGE, "access-control-request-method": "DELETE"}
    preflight["access-control-request-headers"] = "authorization"
    # A page on the internet asks a server of a private network.
    preflight["access-control-request-private-network"] = "true"
    how = {"headers": preflight, "timeout": patience(60)}
    answer = httpx.options(f"{named.url}/v1/contexts/x", **how)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["access-control-allow-private-network"] == "true"
    assert httpx.options(f"{server.url}/v1/contexts/x", **how).status_code == 403
    page = httpx.get(f"{named.url}/metrics", timeout=patience(60)).text
    assert 'longctx_requests_total{route="other",status="403"} 2.0' in page


def test_a_server_beyond_this_machine_has_keys_or_says_so(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    for host in ("0.0.0.0", "::", "10.1.2.3"):
        result = CliRunner().invoke(app, ["serve", "-c", str(tmp_path), "--host", host])
        assert result.exit_code == 2 and "give --api-key-file, or --no-key" in result.stderr
        result = CliRunner().invoke(app, ["serve", "-c", str(tmp_path), "--host", host, "--no-key"])
        assert "manifest.json" in result.stderr and "--no-key" not in result.stderr


@pytest.mark.parametrize(
    ("reached", "status"),
    [
        (("127.0.0.1", 80), 403),
        (("::1", 80), 403),
        (("::ffff:127.0.0.1", 80), 403),
        (None, 403),
        (("10.1.2.3", 80), 200),
        (("/run/longctx.sock", None), 200),
    ],
)
def test_who_reaches_a_server_beyond_loopback_asks_by_any_name(server, reached, status):
    """As a server in Python listens whose `Access` names no hosts, or an application mounts it."""
    outer = Starlette(routes=[Mount("/model", server.served.app)])

    async def connected(scope, receive, send):
        await outer({**scope, "server": reached}, receive, send)

    async def ask():
        transport = httpx.ASGITransport(connected)
        async with httpx.AsyncClient(transport=transport, base_url="http://box.example") as http:
            return await http.get("/model/v1/models"), await http.get("/model/health")

    models, health = asyncio.run(ask())
    assert (models.status_code, health.status_code) == (status, status)
    if status == 403:
        assert "Access.hosts" in models.json()["error"]["message"]


def test_a_mounted_server_shows_whether_it_lives_without_a_key(serve, tiny):
    keyed = serve(tiny, access=Access(keys=[hashlib.sha256(b"key").digest()]))
    outer = Starlette(routes=[Mount("/model", keyed.served.app)])

    async def ask():
        transport = httpx.ASGITransport(outer)
        async with httpx.AsyncClient(transport=transport, base_url="http://box") as http:
            return [await http.get(f"/model/{path}") for path in ("health", "ready", "v1/models")]

    assert [answer.status_code for answer in asyncio.run(ask())] == [200, 200, 401]


def test_other_kinds_of_connections_are_handed_on():
    inner = AsyncMock()
    asyncio.run(Doors(inner, access=Access())({"type": "lifespan"}, None, None))
    inner.assert_awaited_once_with({"type": "lifespan"}, None, None)


# Reads the contexts and posts one, as a page may with and without asking first.
SCRIPT = """<script>
const url = "URL", tried = {};
const attempt = async (name, options) => {
  try { tried[name] = (await fetch(url + "/v1/contexts", options)).status; }
  catch (error) { tried[name] = "blocked"; }
};
addEventListener("load", async () => {
  const post = {method: "POST", body: JSON.stringify({text: "from a page"})};
  await attempt("read", {});
  await attempt("plain", {...post, mode: "no-cors", headers: {"content-type": "text/plain"}});
  await attempt("json", {...post, headers: {"content-type": "application/json"}});
  document.body.textContent = "tried " + JSON.stringify(tried) + " end";
});
</script><body>waiting</body>"""


@contextlib.contextmanager
def page(folder, url):
    (folder / "index.html").write_text(SCRIPT.replace("URL", url))

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            """Nothing."""

    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{site.server_address[1]}"
        site.shutdown()


def opened(folder, address):
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000"]
    command = ["chromium", *flags, f"--user-data-dir={folder / 'profile'}", "--dump-dom", address]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=patience(120)).stdout
    return json.loads(re.search(r"tried (\{.*?\}) end", shown)[1].replace("&quot;", '"'))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium")
def test_a_page_of_another_origin_cannot_read_or_post_in_chromium(serve, tiny, tmp_path):
    closed = serve(tiny)
    with page(tmp_path, closed.url) as address:
        found = opened(tmp_path, address)
    # The answer to a request without asking first is hidden from the page.
    assert found == {"read": "blocked", "plain": 0, "json": "blocked"}
    assert httpx.get(f"{closed.url}/v1/contexts", timeout=patience(60)).json()["data"] == []
    with page(tmp_path, "http://127.0.0.1:1") as address:
        # The page's port is known before the server that lets it in.
        allowing = serve(tiny, access=Access(origins=[address]), contexts=tmp_path / "other")
        (tmp_path / "index.html").write_text(SCRIPT.replace("URL", allowing.url))
        found = opened(tmp_path, address)
    assert found["read"] == 200 and found["json"] == 201
    assert len(httpx.get(f"{allowing.url}/v1/contexts", timeout=patience(60)).json()["data"]) == 1
