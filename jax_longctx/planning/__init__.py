"""Whether a model, a method and a context fit a target, and how long they take."""

from jax_longctx.planning.plan import Plan, PlanRequest, make_plan, propose_mesh
from jax_longctx.planning.targets import Target, parse_target

__all__ = ["Plan", "PlanRequest", "Target", "make_plan", "parse_target", "propose_mesh"]
