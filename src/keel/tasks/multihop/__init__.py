"""`multihop`: questions whose answer takes several documents, found with a retrieval tool."""

from keel.tasks.multihop.options import multihop
from keel.tasks.multihop.task import Multihop

__all__ = ["Multihop", "multihop"]
