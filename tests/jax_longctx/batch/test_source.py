import contextlib
import http.server
import threading

import pyarrow.parquet
import pytest

from jax_longctx.batch.source import PIECE, lines_from
from jax_longctx.errors import InputError

LINES = b"".join(b'{"prompt": "%d"}\n' % n for n in range(200_000))


class Store(http.server.BaseHTTPRequestHandler):
    """Answers as S3 does for one object, `LINES`."""

    asked: list[str]

    def do_HEAD(self):
        found = self.path.startswith("/bucket/in.jsonl")
        first, last = 0, len(LINES) - 1
        if self.command == "GET":
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            self.asked.append(self.headers["Range"])
        body = LINES[first : last + 1] if found else b""
        self.send_response(404 if not found else 206 if self.command == "GET" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_GET = do_HEAD

    def log_message(self, format, *args):
        """Nothing is printed."""


@contextlib.contextmanager
def store(monkeypatch):
    """The address of a bucket, and what was asked of it."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    handler = type("Handler", (Store,), {"asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        try:
            yield handler.asked
        finally:
            server.shutdown()


def test_lines_of_a_store_come_in_large_pieces(monkeypatch):
    with store(monkeypatch) as asked:
        found = [*lines_from("s3://bucket/in.jsonl", 0)]
        assert b"".join(raw for _, raw in found) == LINES
        assert len(asked) <= len(LINES) // PIECE + 2
        place, raw = found[100_000]
        assert next(lines_from("s3://bucket/in.jsonl", place)) == (place, raw)
        with pytest.raises(InputError, match=r"Path does not exist.*give JSON lines, or Parquet"):
            next(lines_from("s3://bucket/none.jsonl", 0))


def test_wrong_credentials_are_an_error_of_the_address(monkeypatch, tmp_path):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(InputError, match=r"Cannot open credentials.*address that your credentials"):
        next(lines_from("gs://bucket/in.jsonl", 0))


def test_dates_that_python_has_not_are_an_error_of_the_file(tmp_path):
    days = pyarrow.array([2**30], pyarrow.int32()).cast(pyarrow.date32())
    pyarrow.parquet.write_table(pyarrow.table({"id": days}), tmp_path / "in.parquet")
    with pytest.raises(InputError, match=r"cannot be read: days=1073741824.*or Parquet as"):
        next(lines_from(tmp_path / "in.parquet", 0))
