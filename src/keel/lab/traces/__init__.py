"""Token-level checks of completions from any trainer: retokenization, the sampler's KL, and stale weights."""

from typing import TYPE_CHECKING

from keel.base import lazy_attributes

if TYPE_CHECKING:
    from keel.lab.traces.sampler import check_depth, check_drawn
    from keel.lab.traces.tokens import Trace, check_tokens, read_traces, write_traces
else:
    __getattr__ = lazy_attributes(__name__, "sampler tokens")

__all__ = ["Trace", "check_depth", "check_drawn", "check_tokens", "read_traces", "write_traces"]
