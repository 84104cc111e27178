"""A pool of replicas: each opens the model on a mesh of its own and works through shares of items.

Ray Data spreads the shares over actors and starts a dead one anew. The share that it worked on
begins again, `RETRIES` times. What has not ended then is tried once more when all others have, in
smaller shares. So little is left of what ends each replica that works on it.
"""

import contextlib
import dataclasses
import functools
import importlib
import itertools
import logging
import os
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax_longctx.errors import LongctxError
from jax_longctx.files import file_errors
from jax_longctx.replicas.cluster import cluster, devices_of

# Shares for each replica, at least: the last ones end at about the same time.
SHARES = 8
# Rounds, and how often a share begins again in each.
ROUNDS, RETRIES = 2, 1
# How many of what is left an error names.
NAMED = 4
# An item, the share's number, and how many shares there are.
Share = tuple[Any, int, int]
# Works through a share; the results, and the item, can be pickled.
Work = Callable[[Share], Iterator[Any]]


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
        task = self._ray.remote(max_calls=1, **self._devices)(lambda open: what(open()))
        try:
            return self._ray.get(task.remote(self._opened))
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error

    def spread(
        self,
        make: Callable[[Any], Work],
        items: Sequence[Any],
        *,
        of: int,
        most: int,
        left: Callable[[], Iterator[str]],
    ) -> Iterator[Any]:
        """The results of all items, as they come, of a share that begins again twice perhaps.

        Args:
          make: from the model to what works through a share.
          of: shares of each item at first; `most` at last, about.
          left: names what has no result yet.

        Raises:
          LongctxError: a replica ended each time that it worked on what is left.
        """
        more = max(-(-most // of), 1)
        shares = [(item, number, of) for item in items for number in range(of)]
        for number in range(ROUNDS):
            open = dict(enumerate(shares))
            # A share that waits at a replica ends with it. In the last round none waits.
            waiting = int(number + 1 < ROUNDS)
            for place, found in self._round(make, shares, 1 + waiting):
                if not found:
                    del open[place]
                elif isinstance(found[0], Exception):
                    raise found[0]
                else:
                    yield found[0]
            shares = [
                (item, number + part * of, more * of)
                for item, number, _ in open.values()
                for part in range(more)
            ]
        if shares:
            names = [*itertools.islice(left(), NAMED + 1)]
            told = "; ".join(names[:NAMED]) + " and more" * (len(names) > NAMED)
            raise LongctxError(
                f"{told}: the replica ended each of the {ROUNDS * (RETRIES + 1)} times that it "
                "worked on this, as for want of memory; all else is done. Run again to go on, with "
                "fewer rows or more devices, or shorten it and begin anew"
            )

    def _round(
        self, make: Callable[[Any], Work], shares: Sequence[Share], each: int
    ) -> Iterator[Any]:
        """The number of a share with one result in a tuple, or with none at its end.

        A replica has `each` shares at a time and works on one. Shares whose replica ends each time
        have no end.
        """
        data: Any = importlib.import_module("ray.data")
        # It would print a traceback for each replica that ends.
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)
        context = data.DataContext.get_current()
        # Each result is a block of its own, which comes back at once.
        context.enable_progress_bars, context.target_max_block_size = False, 1
        context.max_errored_blocks = -1
        if not shares:
            return
        rows = [{"item": pickle.dumps(share)} for share in enumerate(shares)]
        size = min(self.count, len(rows))
        with warnings.catch_warnings():
            # Ray 2.60 deprecates `max_task_retries` here, and has no other place for it yet.
            warnings.simplefilter("ignore")
            found = data.from_items(rows, override_num_blocks=len(rows)).map_batches(
                _Replica,
                batch_size=1,
                compute=data.ActorPoolStrategy(size=size, max_tasks_in_flight_per_actor=each),
                max_restarts=-1,
                max_task_retries=RETRIES,
                fn_constructor_args=(self._opened, make),
                **self._devices,
            )
        for row in found.iter_rows():
            yield pickle.loads(row["item"])


class _Replica:
    """An actor of the pool."""

    def __init__(self, open: Callable[[], Any], make: Callable[[Any], Work]):
        self.work = make(open())

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        place, share = pickle.loads(batch["item"][0])

        def told(*found: Any) -> dict[str, Any]:
            return {"item": [pickle.dumps((place, found))]}

        try:
            yield from map(told, self.work(share))
        except LongctxError as error:
            yield told(error)
        except Exception:
            # A fault ends the command; only a replica that ends is another's work.
            yield told(RuntimeError(traceback.format_exc()))
        yield told()


def _opened(folder: str, open: Callable[[], Any]) -> Any:
    with file_errors(f"{folder} is not on this node", "run in a folder that all nodes see"):
        os.chdir(folder)
    return open()
