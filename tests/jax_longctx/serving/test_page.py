"""The page at `/` in Chromium, the files that it is made of, and the description of all routes."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import httpx
import openapi_spec_validator
import pytest
from playwright.sync_api import expect, sync_playwright
from starlette.routing import Route

import jax_longctx.serving
from jax_longctx.cli.serve import Listening
from jax_longctx.errors import InputError
from jax_longctx.serving.doors import Access
from tests.jax_longctx.serving.test_abuse import check_idle, slow
from tests.jax_longctx.serving.test_saving import held
from tests.jax_longctx.serving.tiny import BOOK, chat, model_of, read
from tests.jax_longctx.text.test_documents import packed as documents
from tests.patience import patience

__all__ = ["slow"]

FILES = Path(jax_longctx.serving.__file__).parent / "page"
HOSTILE = "<img src=x onerror=alert(1)>.txt"
CHROMIUM = shutil.which("chromium")
browsed = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")


def test_the_description_is_valid_and_has_every_route(server):
    found = httpx.get(f"{server.url}/openapi.json", timeout=patience(60)).json()
    openapi_spec_validator.validate(found)
    routes = [each for each in server.served.app.routes if isinstance(each, Route)]
    ways = {
        (each.path.replace(":path}", "}"), method) for each in routes for method in each.methods
    }
    told = {(path, way.upper()) for path, ways in found["paths"].items() for way in ways}
    # Starlette answers HEAD where it answers GET.
    assert told == {(path, method) for path, method in ways if method != "HEAD"}
    assert all(way["summary"] for ways in found["paths"].values() for way in ways.values())
    chat = found["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "context", "stream"} <= chat.keys()


def test_the_page_is_open_and_loads_nothing_from_elsewhere(serve, tiny):
    beside = "http://127.0.0.1:1"
    access = Access(keys=[hashlib.sha256(b"key").digest()], beside=[beside])
    with serve(tiny, access=access).http() as http:
        page = http.get("/")
        names = re.findall(r'(?:src|href)="(?!#|data:)(.*?)"', page.text)
        assert beside in page.text and {"page/style.css", "page/page.js"} < {*names}
        imported = re.compile(r'^(?:import|export) .*from "\./(.*)";', re.M)
        for name in FILES.iterdir():
            if name.name != "index.html":
                file = http.get(f"/page/{name.name}")
                assert file.text == name.read_text()
                assert all((FILES / each).is_file() for each in imported.findall(file.text))
            assert not re.search(r"https?://|innerHTML|insertAdjacent", name.read_text())
        policy = page.headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", "script-src 'self'", "trusted-types 'none'"} < {*policy}
        assert f"connect-src 'self' {beside}" in policy
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert (
            http.get("/page/page.py").status_code
            == http.get("/page/..%2fapp.py").status_code
            == 404
        )
        assert http.get("/v1/contexts/x/text").status_code == 401
    assert sum(len(each.read_text().splitlines()) for each in FILES.iterdir()) < 1200


@pytest.mark.parametrize(
    "url", ["127.0.0.1:1", "http://a b", "http://a;b", "http://a/v1", "file://a"]
)
def test_an_address_beside_that_is_none_is_refused(url):
    with pytest.raises(InputError, match="no address"):
        Listening(beside=["http://a:1/", url])


@pytest.mark.parametrize("how", [{}, {"chat": False}])
def test_a_contexts_text_is_the_one_that_was_given(server, tiny, how):
    with server.http() as http:
        for text in (BOOK, "ends in <|end|> and two\n\n", "  spaces, \u00e9\U0001f600"):
            name = read(http, text=text, **how)["id"]
            assert http.get(f"/v1/contexts/{name}/text").json()["text"] == text
        assert http.get("/v1/contexts/ctx_x/text").status_code == 404


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM)
        yield opened
        opened.close()


@pytest.fixture
def visit(browser):
    """Opens a server's page; afterwards nothing may have gone wrong, or elsewhere."""
    opened, wrong = [], []
    # Chromium's own line for a request that is refused, which the page tells of.
    refused = "Failed to load resource: the server responded with a status of 401"

    def logged(said):
        if said.type == "error" and not said.text.startswith(refused):
            wrong.append(said.text)

    def start(running, *beside):
        page = browser.new_page()
        page.set_default_timeout(1000 * patience(20))
        expect.set_options(timeout=1000 * patience(20))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", logged)
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        allowed = tuple(each.url for each in (running, *beside))
        page.on(
            "request",
            lambda sent: sent.url.startswith((*allowed, "data:")) or wrong.append(sent.url),
        )
        page.goto(running.url)
        expect(page.locator("#servers .memory").first).not_to_be_empty()
        opened.append(page)
        return page

    yield start
    for page in opened:
        page.close()
    assert not wrong


def upload(page, text=BOOK, name="book.txt"):
    page.locator("#files").set_input_files(
        {"name": name, "mimeType": "text/plain", "buffer": text.encode()}
    )


def drop(page, text, name):
    """Drops two files from outside the browser."""
    script = """([text, ...names]) => {
      const held = new DataTransfer();
      for (const name of names) held.items.add(new File([text], name, {type: "text/plain"}));
      dispatchEvent(new DragEvent("drop", {dataTransfer: held, cancelable: true}));
    }"""
    page.evaluate(script, [text, name, "two.txt"])


def uploaded(page, text=BOOK, name="book.txt", how=upload):
    how(page, text, name)
    row = page.locator("#contexts li").filter(has_text=name)
    expect(row.get_by_role("radio")).to_be_checked()
    return row


def ask(page, question="What is the pass key?", tokens=8):
    page.get_by_label("Longest answer").fill(str(tokens))
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Question about").fill(question)
    page.get_by_label("Question about").press("Enter")


@pytest.mark.slow
@browsed
def test_page_upload_of_a_hostile_name_and_text(server, visit):
    page = visit(server)
    row = uploaded(page, f"<b>{BOOK}</b>", HOSTILE, drop)
    expect(row.locator(".name")).to_have_text(f"{HOSTILE}, two.txt")
    expect(row).to_contain_text(re.compile(r"[\d,]+ tokens · .* in memory · .* to live"))
    expect(page.locator("#about")).to_have_text(f"{HOSTILE}, two.txt")
    page.get_by_role("button", name="Show the text").click()
    expect(page.locator("#pages")).to_contain_text(f"Document: {HOSTILE}")
    expect(page.locator("#pages")).to_contain_text(f"<b>{BOOK}</b>")
    assert page.locator("main img, main b").count() == 0
    archive = documents({"a.txt": "Text", "b.png": b"\0\xff"})
    given = {"name": "a.zip", "mimeType": "application/zip", "buffer": archive}
    page.locator("#files").set_input_files(given)
    row = page.locator("#contexts li").filter(has_text="a.zip")
    expect(row).to_contain_text("left out of a.zip: 1 that are no text (a.zip/b.png)")


@pytest.mark.slow
@browsed
def test_page_shows_progress_and_cancels_reading(server, visit, monkeypatch):
    page = visit(server)
    with held(monkeypatch, server.served.executor, "read_on") as reader:
        upload(page, BOOK + "Then more.", "slow.txt")
        assert reader.begun.wait(patience(20))
        bar = page.get_by_role("progressbar", name="Reading slow.txt with full")
        expect(bar).to_be_visible()
        page.get_by_role("button", name="Cancel reading slow.txt").click()
        expect(bar).to_have_count(0)
    expect(page.locator("#said")).to_have_text("Reading of slow.txt was cancelled")
    assert page.locator("#contexts li").filter(has_text="slow.txt").count() == 0
    # What is told of an undisturbed reading.
    page.evaluate(
        """() => { window.told = new Set();
        new MutationObserver(() => document.querySelectorAll("progress").forEach((bar) =>
          bar.hasAttribute("value") && told.add(`${bar.value}/${bar.max}`)))
        .observe(document.body, {subtree: true, childList: true, attributes: true}); }"""
    )
    uploaded(page, BOOK + "And more.", "quick.txt")
    told = [[*map(int, each.split("/"))] for each in page.evaluate("() => [...told]")]
    assert len(told) > 1 and told == sorted(told) and told[-1][0] == told[-1][1]
    check_idle(server)


@pytest.mark.slow
@browsed
def test_page_asks_and_marks_where_it_was_read(server, client, visit):
    page = visit(server)
    uploaded(page)
    ask(page)
    answer = page.get_by_role("region", name="Answer under full")
    expect(answer.locator(".figures")).to_contain_text("8 tokens · cut at the longest answer")
    expect(answer.locator(".figures")).to_contain_text("the text takes")
    expect(answer.locator(".sources q").first).not_to_be_empty()
    expect(page.locator("#pages mark.first")).to_be_in_viewport()
    expect(page.locator("#text-note")).to_be_empty()
    name = page.locator("#contexts li:has(:checked)").get_attribute("data-id")
    how = {"temperature": 0, "max_tokens": 8}
    assert (
        answer.locator(".answer").text_content()
        == chat(client, "What is the pass key?", name, **how).choices[0].message.content
    )
    # An answer with markup, and sources, of which one is not in the text.
    markup = "<img src=x onerror=alert(1)>"
    key = {"start": 16, "end": 21, "text": "12345", "score": 0.5, "document": markup, "page": 3}
    lost = {**key, "text": "nowhere", "document": None, "page": None}
    chunks = [
        {"delta": {"content": markup}},
        {"delta": {}, "finish_reason": "stop", "sources": [key, lost]},
    ]
    lines = [f"data: {json.dumps({'choices': [each]})}\n\n" for each in chunks]
    page.route(
        "**/chat/completions",
        lambda route: route.fulfill(body="".join([*lines, "data: [DONE]\n\n"])),
    )
    ask(page, markup)
    answer = page.locator("article").first
    expect(answer.locator(".answer")).to_have_text(markup)
    expect(page.locator("#text-note")).to_contain_text("1 of 2 passages")
    expect(page.locator("mark")).to_have_text("12345")
    expect(page.locator("mark")).to_be_in_viewport()
    assert page.evaluate("() => scrollY") == 0
    answer.get_by_role("button", name=f"{markup}, page 3").press("Enter")
    expect(page.locator("#pages")).to_be_focused()
    assert page.locator("#pages").text_content() == BOOK and page.locator("main img").count() == 0


@pytest.mark.slow
@browsed
def test_page_cancels_an_answer(slow, visit):
    running = slow()
    page = visit(running)
    uploaded(page)
    ask(page, tokens=64)
    expect(page.locator(".answer")).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(page.locator(".figures")).to_have_text("Cancelled.")
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_enabled()
    check_idle(running)
    assert 0 < len(running.blocks) < 60


@pytest.mark.slow
@browsed
def test_page_asks_two_methods_side_by_side_with_keys(serve, tiny, visit, tmp_path):
    keys = [hashlib.sha256(b"key").digest()]
    other = serve(
        model_of(tiny, "snapkv"), access=Access(origins=["*"], keys=keys), contexts=tmp_path / "b"
    )
    running = serve(tiny, access=Access(beside=[other.url]))
    page = visit(running, other)
    expect(page.get_by_role("alert")).to_contain_text("no valid API key")
    page.get_by_label(f"API key of {other.url}").fill("key")
    page.get_by_role("button", name="Use").click()
    expect(page.locator("#servers")).to_contain_text("snapkv")
    page.get_by_text("Or paste a text").click()
    page.get_by_role("textbox", name="Text", exact=True).fill(BOOK.replace(" ", "\n"))
    page.get_by_role("button", name="Read").click()
    expect(page.get_by_role("radio")).to_be_checked()
    # It is read by the other when that one is asked.
    page.get_by_label("snapkv of").check()
    ask(page)
    for method in ("full", "snapkv"):
        column = page.get_by_role("region", name=f"Answer under {method}")
        expect(column.locator(".figures")).to_contain_text("8 tokens")
    how = {"headers": {"authorization": "Bearer key"}, "timeout": patience(60)}
    for url in (running.url, other.url):
        (listed,) = httpx.get(f"{url}/v1/contexts", **how).json()["data"]
        text = httpx.get(f"{url}/v1/contexts/{listed['id']}/text", **how)
        assert text.json()["text"] == BOOK.replace(" ", "\n")
    assert page.evaluate("() => localStorage.length") == 0


@pytest.mark.slow
@browsed
def test_page_deletes_when_pressed_twice(server, visit):
    page = visit(server)
    row = uploaded(page, BOOK + "Delete me.", "gone.txt")
    name = row.get_attribute("data-id")
    row.get_by_role("button", name="Delete gone.txt").click()
    with server.http() as http:
        assert http.get(f"/v1/contexts/{name}").status_code == 200
        row.get_by_role("button").click()
        expect(row).to_have_count(0)
        assert http.get(f"/v1/contexts/{name}").status_code == 404
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_disabled()
