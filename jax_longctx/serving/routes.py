"""Which text a request is about, so that requests about one text go to one replica."""

import hashlib
import json
import re

# Of a request's scope: the digits that the id of its context begins with.
ROUTE = "jax_longctx.route"
# Prompts of which this many characters are the same belong together.
PREFIX = 4096


def route_of(path: str, kind: str, body: bytes) -> str | None:
    """Eight hexadecimal digits that requests about one text have in common; None: there is no text.

    Args:
      kind: the content type.
    """
    if named := re.search(r"/contexts/ctx_([0-9a-f]{8})", path):
        return named[1]
    if kind.startswith("multipart/"):
        # Each client has a boundary of its own.
        boundary = kind.partition("boundary=")[2].strip('"').encode("latin-1")
        return _digits(body.replace(boundary, b"") if boundary else body)
    try:
        asked = json.loads(body)
        if named := re.match("ctx_([0-9a-f]{8})", asked.get("context") or ""):
            return named[1]
        if path.endswith("/contexts"):
            return _digits(json.dumps([asked.get("text"), asked.get("file")]).encode())
        told = [x["content"] for x in asked.get("messages", ()) if x["role"] == "user"]
        begins = json.dumps([asked.get("prompt"), *told])[:PREFIX]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        # An engine says what is wrong with it.
        return None
    return _digits(begins.encode()) if len(begins) == PREFIX else None


def _digits(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:8]
