"""A pool of replicas: each opens the model on a mesh of its own and works through items.

Ray Data spreads the items over actors and starts a dead one anew. The item that it worked on begins
again, and what came back of it does not come twice.
"""

import contextlib
import dataclasses
import functools
import importlib
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax_longctx.errors import LongctxError
from jax_longctx.files import file_errors
from jax_longctx.replicas.cluster import cluster, devices_of

# Items for each replica, at least: the last ones end at about the same time.
SHARES = 8
# Works through an item; the results, and the item, can be pickled.
Work = Callable[[Any], Iterator[Any]]


@dataclasses.dataclass
class Replicas:
    """Replicas of a model, for the block of `started`.

    Attributes:
      count: of replicas.
      open: loads the model, in a replica, in the folder of this process. It can be pickled.
      mesh: of each replica, as in `RunSpec`.
      address: as of `cluster`.
    """

    count: int
    open: Callable[[], Any]
    mesh: str | None = None
    address: str | None = None

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        """Starts Ray, or joins a cluster. Raises InputError as `cluster`."""
        with cluster(self.address, self.count) as self._ray:
            self._opened = functools.partial(_opened, os.getcwd(), self.open)
            self._devices = devices_of(self._ray, self.mesh)
            yield

    def ask[T](self, what: Callable[[Any], T]) -> T:
        """What a replica that ends then says of the model. Raises the LongctxError of `what`."""
        # A worker that stays would keep its devices.
        task = self._ray.remote(max_calls=1, **self._devices)(_asked)
        return _raised(self._ray.get(task.remote(self._opened, what)))

    def spread(self, make: Callable[[Any], Work], items: Sequence[Any]) -> Iterator[Any]:
        """The results of all items, as they come.

        Args:
          make: from the model to what works through an item.
        """
        data: Any = importlib.import_module("ray.data")
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        context = data.DataContext.get_current()
        # Each result is a block of its own, which comes back at once.
        context.enable_progress_bars, context.target_max_block_size = False, 1
        if not items:
            return
        rows = [{"item": pickle.dumps(item)} for item in items]
        pool = data.ActorPoolStrategy(size=self.count, max_tasks_in_flight_per_actor=1)
        found = data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            _Replica,
            batch_size=1,
            compute=pool,
            fn_constructor_args=(self._opened, make),
            **self._devices,
        )
        for row in found.iter_rows():
            yield _raised(pickle.loads(row["item"]))


class _Replica:
    """An actor of the pool."""

    def __init__(self, open: Callable[[], Any], make: Callable[[Any], Work]):
        self.work = make(open())

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for item in batch["item"]:
            try:
                for found in self.work(pickle.loads(item)):
                    yield {"item": [pickle.dumps(found)]}
            except LongctxError as error:
                yield {"item": [pickle.dumps(error)]}


def _opened(folder: str, open: Callable[[], Any]) -> Any:
    with file_errors(f"{folder} is not on this node", "run in a folder that all nodes see"):
        os.chdir(folder)
    return open()


def _asked(open: Callable[[], Any], what: Callable[[Any], Any]) -> Any:
    try:
        return what(open())
    except LongctxError as error:
        return error


def _raised(value: Any) -> Any:
    if isinstance(value, LongctxError):
        raise value
    return value
