"""The slots that a token attends: the first ones, spans around the most named ones, the last."""

from pallas_kernels.voted_slots.api import takes_votes, voted_slots
from pallas_kernels.voted_slots.xla import Spans, most_voted, spans_around, upto

__all__ = ["Spans", "most_voted", "spans_around", "takes_votes", "upto", "voted_slots"]
