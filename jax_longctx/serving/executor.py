"""What the server makes the engine do: read texts, decode rows, save and load contexts.

The scheduler gives its orders by name with JSON arguments, so that several processes of one mesh
can follow them: the leader broadcasts each order before it carries it out, and the others carry out
the same (`Team`). Contexts have keys, running rows have places.
"""

import contextlib
import dataclasses
from collections.abc import Generator
from typing import Any

import jax

from jax_longctx.api import LongContext
from jax_longctx.engine import Context, Progress
from jax_longctx.engine.capacity import available_bytes, bytes_per_device
from jax_longctx.engine.context_io import load_context, made_by_engine, save_context
from jax_longctx.engine.distributed import share
from jax_longctx.engine.running import Chosen, Request, RunningBatch
from jax_longctx.errors import LongctxError
from jax_longctx.settings import Sampling


class Executor:
    """The contexts in memory and the rows that decode; one thread calls it.

    Args:
      places: most rows that decode together.
      length: most tokens of text, question and answer.
      reserve: most tokens of a question and its answer.

    Attributes:
      made_by: model, weights and method, as saved contexts state them.
      free_bytes: of each device beside weights and rows, or None where that is unknown.

    Raises:
      CapacityError: the rows' caches do not fit.
    """

    def __init__(self, model: LongContext, *, places: int, length: int, reserve: int):
        self.model, self.engine = model, model.engine
        slots = self.engine.slots_for(length)
        self.batch = RunningBatch(self.engine, places=places, slots=slots, reserve=reserve)
        self.reserve = self.batch.reserve
        # Both ask all processes.
        self.made_by = made_by_engine(self.engine)
        self.free_bytes = available_bytes(self.engine.mesh)
        self.contexts: dict[str, Context] = {}
        self._reading: dict[str, Generator[Progress, None, Context]] = {}

    def read(self, key: str, tokens: list[int], total: int, question: list[int] | None) -> None:
        """Begins to read a text; `read_on` reads it, piece by piece."""
        self._reading[key] = self.engine.reading(
            [tokens],
            reserve=self.reserve,
            total=[total],
            questions=None if question is None else [question],
        )

    def read_on(self, key: str) -> tuple[int, int] | None:
        """Reads the next piece: tokens read and to read; None once the context is there.

        Raises:
          CapacityError, InputError: as `Engine.prefill`; the reading is given up.
        """
        try:
            now = next(self._reading[key])
        except StopIteration as ended:
            del self._reading[key]
            self.contexts[key] = ended.value
            return None
        except LongctxError:
            del self._reading[key]
            raise
        return now.done, now.total

    def forget(self, key: str) -> None:
        """Gives up a context, or its reading."""
        reading = self._reading.pop(key, None)
        if reading is not None:
            reading.close()
        self.contexts.pop(key, None)

    def save(self, key: str, path: str) -> None:
        """Writes a context to a new folder.

        Raises:
          CheckpointError, InputError: as `save_context`.
        """
        save_context(self.engine, self.contexts[key], path)

    def load(self, key: str, path: str) -> None:
        """Reads a saved context into memory.

        Raises:
          CheckpointError: as `load_context`.
        """
        self.contexts[key] = load_context(self.engine, path)

    def join(self, key: str, request: dict[str, Any]) -> tuple[int, Chosen]:
        """Feeds a question to a context; its answer's row joins those that decode.

        Returns the row's place and its first token.

        Raises:
          CapacityError, InputError: as `RunningBatch.join`.
        """
        return self.batch.join(self.contexts[key], as_request(request))

    def step(self, most: int) -> dict[int, list[Chosen]]:
        """Decodes at most `most` tokens of every row."""
        return self.batch.step(most)

    def leave(self, place: int) -> None:
        """Takes a row out before its end."""
        self.batch.leave(place)

    def nothing(self) -> None:
        """Does nothing: an order that shows that the leader lives."""

    @property
    def broken(self) -> set[int]:
        """Places whose rows the latest order ended because their logits are not finite."""
        return {place for place, why in self.batch.ended.items() if why == "not finite"}

    @property
    def free(self) -> int:
        """Places without a row."""
        return self.batch.free

    def resident_bytes(self, key: str) -> int:
        """Bytes on each device that a context holds."""
        return bytes_per_device(self.engine.mesh, self.contexts[key].usable_caches())

    def needed_bytes(self, tokens: int) -> int:
        """Bytes on each device that a text of so many tokens will hold."""
        return self.engine.new_cache_bytes(tokens + self.reserve, self.reserve)


def request_values(request: Request) -> dict[str, Any]:
    """The request as JSON values (see `as_request`)."""
    return dataclasses.asdict(request)


def as_request(values: dict[str, Any]) -> Request:
    """The request of these JSON values."""
    sampling = dict(values["sampling"])
    if isinstance(sampling["seed"], list | tuple):
        sampling["seed"] = tuple(sampling["seed"])
    return Request(**{**values, "sampling": Sampling(**sampling)})


class Team:
    """The executors of all processes of the mesh: an order goes to each of them.

    One process carries out its own orders. Of several the leader calls `do`, and the others stay in
    `follow` until the leader calls `dismiss`.
    """

    def __init__(self, executor: Executor):
        self.executor = executor
        self.several = jax.process_count() > 1

    def do(self, order: str, **arguments: Any) -> Any:
        """Carries out an order everywhere; what it returns or raises here.

        The others raise the same errors of the library, because they do the same.
        """
        if self.several:
            share({"do": order, "with": arguments})
        return getattr(self.executor, order)(**arguments)

    def dismiss(self) -> None:
        """Ends `follow` in the other processes."""
        if self.several:
            share(None)

    def follow(self) -> None:
        """Carries out the leader's orders until it dismisses this process."""
        while (order := share(None)) is not None:
            # The leader reports what is wrong with a request.
            with contextlib.suppress(LongctxError):
                getattr(self.executor, order["do"])(**order["with"])
