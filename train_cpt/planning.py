"""A run's training step, compiled for devices that need not exist."""

import dataclasses
import math
import time
from typing import Any

from jax_longctx.models.config import ModelConfig
from jax_longctx.planning.collectives import count_collectives
from jax_longctx.planning.compiled import devices_of, no_persistent_cache
from jax_longctx.planning.targets import Target
from jax_longctx.settings import parse_mesh
from jax_longctx.sharding import make_mesh
from train_cpt.attention import check_attention
from train_cpt.run import RunConfig, setup_of
from train_cpt.step import step_program


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The compiler's figures of a step, on each device.

    Attributes:
      state: bytes of weights, moments and texts.
      temporaries: bytes beside them while the step runs.
      available: bytes of the device's memory.
      collectives, moved: their number, and bytes of their results; one in a loop counts once for
        each turn.
      seconds: of compilation.
    """

    state: int
    temporaries: int
    available: int
    collectives: int
    moved: int
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether the step has enough memory."""
        return self.state + self.temporaries <= self.available


def plan_step(config: RunConfig, model: ModelConfig, target: Target) -> StepPlan:
    """The step of a run for a model of these shapes.

    Raises:
      InputError, ConfigError: this machine cannot compile for the target, or model, mesh and texts
        do not fit together.
    """
    sizes: dict[str, Any] = dict(parse_mesh(config.run.mesh))
    mesh = make_mesh(**sizes, devices=devices_of(target, math.prod(sizes.values())))
    setup, loop = setup_of(config, model, mesh), config.loop
    check_attention(model, mesh, config.pattern, config.data.length)
    begun = time.perf_counter()
    with no_persistent_cache():
        program = step_program(setup, (loop.micro_batches, loop.rows, config.data.length))
    memory, (collectives, moved) = program.memory_analysis(), count_collectives(program.as_text())
    return StepPlan(
        state=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
        available=target.chip.memory,
        collectives=collectives,
        moved=moved,
        seconds=time.perf_counter() - begun,
    )
