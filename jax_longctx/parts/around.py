"""A method around another one: its own, but for what a subclass defines."""

import dataclasses

from jax_longctx.contract import Method


@dataclasses.dataclass(frozen=True)
class Around(Method):
    """Everything that a subclass does not define is that of `method`."""

    method: Method

    def __post_init__(self) -> None:
        # `info` is made of the others.
        kinds = type(self).__mro__[: type(self).__mro__.index(Method)]
        own = {*vars(self), "info"}.union(*map(vars, kinds))
        for name in dir(self.method):
            if name not in own and not name.startswith("_"):
                object.__setattr__(self, name, getattr(self.method, name))

    @property
    def cannot_read_blocks(self) -> str | None:
        return self.method.cannot_read_blocks

    def of_layer(self, layer: int, layers: int) -> "Around":
        return dataclasses.replace(self, method=self.method.of_layer(layer, layers))
