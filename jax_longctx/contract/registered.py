"""How a method is known: `@method` names it, and its kind says what it does to inference."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, dataclass_transform

from jax_longctx.errors import ConfigError

Phase = Literal["none", "prefill", "decode", "both"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodInfo:
    """What a method does to inference; printed by `jax-longctx methods`.

    Attributes:
      summary: one line for a user.
      source: paper and section.
      phase: which phase it changes.
      query_aware: whether what is kept or read depends on the question.
      keeps_all: whether every key of the context stays in memory.
      needs_question: whether the question must be known at prefill (one prefill a question).
      append_only: whether `fork` is a rewind that shares the context's buffers; if not it copies.
      looks_ahead: whether tokens that are read together choose together what they attend, so that
        what is predicted at one of them has the help of later ones. A lone token chooses alone.
      shrinks: whether `finish` makes a new, smaller cache once the question has been read; the
        context's own is then left as it is, and freed when no other question will follow.
    """

    summary: str
    source: str
    phase: Phase
    query_aware: bool
    keeps_all: bool
    needs_question: bool
    append_only: bool
    looks_ahead: bool = False
    shrinks: bool = False


class Registered:
    """Name and metadata of a method. A kind overrides what is true of all methods of that kind.

    Each of `MethodInfo`'s fields is an attribute or a property here, so that a part that changes
    one (a protocol, an allocation) says so itself.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    source: ClassVar[str] = ""
    phase: Phase = "both"
    query_aware: bool = False
    keeps_all: bool = False
    needs_question: bool = False
    append_only: bool = False
    looks_ahead: bool = False
    shrinks: bool = False

    @property
    def info(self) -> MethodInfo:
        """The metadata under these settings."""
        names = (field.name for field in dataclasses.fields(MethodInfo))
        return MethodInfo(**{name: getattr(self, name) for name in names})

    def at_least(self, least: int, *names: str) -> None:
        """Raises ConfigError unless each of these settings is None or at least so large."""
        for name in names:
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(
                    f"{type(self).__name__}: {name} must be at least {least}, got {value}"
                )


# Methods by name, as their modules are imported.
REGISTERED: dict[str, type[Any]] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def method[T](*, source: str, name: str | None = None) -> Callable[[type[T]], type[T]]:
    """Makes a class a frozen dataclass of hyper-parameters, and registers it.

    Its name is that of its file, with hyphens, unless `name` says otherwise. The first sentence of
    its docstring is the summary.

    Args:
      source: paper and section.
    """

    def register(kind: type[T]) -> type[T]:
        made: Any = dataclasses.dataclass(frozen=True, kw_only=True)(kind)
        made.name = name or kind.__module__.rpartition(".")[2].replace("_", "-")
        made.source = source
        if "__doc__" in vars(kind) and kind.__doc__:
            made.summary = " ".join(kind.__doc__.split("\n\n")[0].split()).removesuffix(".")
        REGISTERED[made.name] = made
        return made

    return register
