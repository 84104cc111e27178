"""Docstring entries that name several parameters, `k, v: keys and values`, one entry a name.

Google's style, which griffe reads, has one name an entry. `split` repeats the text for each name,
so that griffe checks every name against the signature and the page lists it.
"""

import inspect
import re
from typing import Any

import griffe

_SEVERAL = re.compile(
    r"^( +)(\w+(?:, \w+)+):[ \n](.*?)(?=^(?!\1 +\S)|\Z)", re.MULTILINE | re.DOTALL
)


def split(text: str) -> str:
    """A docstring in which every entry names one parameter, attribute or result."""

    def apart(found: re.Match[str]) -> str:
        indent, names, rest = found.groups()
        lines = rest.rstrip("\n")
        end = rest[len(lines) :]
        return "\n".join(f"{indent}{name}: {lines}" for name in names.split(", ")) + end

    return _SEVERAL.sub(apart, text)


class SplitNames(griffe.Extension):
    """Applies `split` to every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = split(obj.docstring.value)


def attributes(kind: type) -> dict[str, str]:
    """The text of every entry below "Attributes:" in a class's docstring and its bases'."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        doc = griffe.Docstring(split(inspect.cleandoc(vars(base).get("__doc__") or "")))
        for section in doc.parse("google", warnings=False):
            if section.kind is griffe.DocstringSectionKind.attributes:
                found |= {each.name: " ".join(each.description.split()) for each in section.value}
    return found
