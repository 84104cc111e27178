"""A tiny random model behind a real server in a thread, and the official client."""

import contextlib
import dataclasses
import functools
import threading

import httpx
import openai
import pytest

from jax_longctx.serving.doors import Access
from jax_longctx.serving.server import LongServer, ServeOptions, listen
from tests.jax_longctx.cli.conftest import tiny, tokenizer_folder
from tests.jax_longctx.serving.tiny import LENGTHS
from tests.patience import patience

__all__ = ["client", "serve", "server", "tiny", "tokenizer_folder"]


@dataclasses.dataclass
class Running:
    """A server that runs in a thread, where it listens, and errors of its scheduler's thread."""

    served: LongServer
    url: str
    faults: list
    thread: threading.Thread

    def client(self, key="none", **how):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **how)

    def http(self, **how):
        return httpx.Client(base_url=self.url, timeout=patience(60), **how)

    def stop(self):
        self.served.stop()
        self.thread.join(patience(60))
        assert not self.thread.is_alive()


@contextlib.contextmanager
def serving(model, folder, **options):
    """Serves the model; options are those of `ServeOptions`, and `compiling` of the server."""
    told = {"compiling": options.pop("compiling")} if "compiling" in options else {}
    how = {"name": "tiny", "lengths": LENGTHS, "rows": 4, "grace": 5.0, "context_bytes": 1 << 30}
    how |= {"contexts": folder, **options}
    faults, ready = [], threading.Event()
    served = LongServer(model, ServeOptions(**how), crashed=faults.append, **told)
    bound = listen("127.0.0.1", 0)
    run = functools.partial(served.run, bound, on_ready=ready.set)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(patience(400))
    assert not faults, faults
    running = Running(served, f"http://127.0.0.1:{bound.getsockname()[1]}", faults, thread)
    try:
        yield running
    finally:
        if thread.is_alive():
            running.stop()
    assert not faults


@pytest.fixture
def serve(tmp_path):
    """Starts servers that end with the test: `serve(model, **options)`."""
    with contextlib.ExitStack() as stack:

        def start(model, **options):
            folder = options.pop("contexts", tmp_path / "contexts")
            return stack.enter_context(serving(model, folder, **options))

        yield start


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("contexts")
    with serving(tiny, folder, access=Access(body=1 << 20)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with server.client() as made:
        yield made
