"""Completions token by token, of any trainer: are their tokens those that were sampled, and by which weights?"""

from typing import TYPE_CHECKING

from keel.base.lazy import lazy_attributes

if TYPE_CHECKING:
    from keel.lab.traces.depth import check_depth
    from keel.lab.traces.drawn import check_drawn
    from keel.lab.traces.records import Trace, read_traces, write_traces
    from keel.lab.traces.tokens import check_tokens
else:
    __getattr__ = lazy_attributes(__name__, "depth drawn records tokens")

__all__ = ["Trace", "check_depth", "check_drawn", "check_tokens", "read_traces", "write_traces"]
