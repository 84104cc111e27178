"""A run's checkpoints: the newest ones, and the one with the best dev loss.

Orbax writes them while training goes on, each whole or not at all: weights, moments and step count
(`state`), and the position in the data and which step had the best dev loss so far (`position`).
Both carry checksums (see `jax_longctx.models.storage`).
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jax_longctx.errors import CheckpointError
from jax_longctx.models.storage import load_arrays, read_sealed, seal
from train_cpt.step import Setup, TrainState, abstract_state

__all__ = ["Best", "Checkpoints"]

FORMAT = 1
POSITION = "position.json"


@dataclasses.dataclass(frozen=True)
class Best:
    """The step with the lowest dev loss so far, and that loss; step 0 before any evaluation."""

    step: int = 0
    dev_loss: float = float("inf")


@dataclasses.dataclass
class _NewestAndBest:
    """Orbax's rule of what stays: the newest `keep`, and the best."""

    keep: int
    best: Best = dataclasses.field(default_factory=Best)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        newest = len(checkpoints) - self.keep
        return [
            number >= newest or info.step == self.best.step
            for number, info in enumerate(checkpoints)
        ]


class Checkpoints:
    """The checkpoints of one run; a context manager that waits for what is being written.

    Args:
      folder: theirs, made if it is not there.
      keep: how many of the newest stay.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder, self._rule = folder, _NewestAndBest(keep)
        options = ocp.CheckpointManagerOptions(create=True, preservation_policy=self._rule)
        handlers: dict[str, Any] = {
            # Zarr 3 has checksums. Weights are close to noise, which does not compress.
            "state": ocp.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False),
            "position": ocp.JsonCheckpointHandler(POSITION),
        }
        self._manager = ocp.CheckpointManager(
            folder.absolute(), options=options, item_handlers=handlers
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    @property
    def newest(self) -> int:
        """The step of the newest whole checkpoint; 0 where there is none."""
        return self._manager.latest_step() or 0

    @property
    def best(self) -> Best:
        return self._rule.best

    def save(self, step: int, state: TrainState, data: Any) -> None:
        """Begins to save; what the next step overwrites has been copied when this returns."""
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(_by_path(state)),
                position=ocp.args.JsonSave(
                    seal(FORMAT, {"data": data.get_state(), "best": _best_as_json(self.best)})
                ),
            ),
            force=True,
        )

    def offer(self, step: int, dev_loss: float) -> bool:
        """Whether this step is the best so far, which then stays once it is saved."""
        if dev_loss < self.best.dev_loss:
            self._rule.best = Best(step, dev_loss)
            return True
        return False

    def wait(self) -> None:
        """Until what is being saved is whole."""
        self._manager.wait_until_finished()

    def restore(self, step: int, setup: Setup, data: Any = None) -> TrainState:
        """The state of a step; `data` is set to its position, and the best step to what it was.

        Raises:
          CheckpointError: it is damaged.
        """
        folder = self.folder / str(step)
        remedy = f"remove {folder} to go on from the checkpoint before"
        try:
            position = read_sealed(folder / "position" / POSITION, FORMAT, remedy)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{error.filename} is missing (earlier versions wrote none); {remedy}"
            ) from None
        target = abstract_state(setup)
        arrays = load_arrays(folder, _by_path(target), remedy)
        if data is not None:
            self._rule.best = Best(**position["best"]) if position["best"] else Best()
            data.set_state(position["data"])
        return jax.tree.unflatten(jax.tree.structure(target), arrays.values())


def _best_as_json(best: Best) -> dict[str, Any]:
    # JSON has no infinity.
    return dataclasses.asdict(best) if best.step else {}


def _by_path(state: TrainState) -> dict[str, Any]:
    """The state's arrays by names that its structure gives them, in the order of its leaves."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree.leaves_with_path(state)
    }
