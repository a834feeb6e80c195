"""`multihop`: questions whose answer takes several documents, found with a retrieval tool."""

from keel.envs.multihop.options import multihop
from keel.envs.multihop.task import Multihop

__all__ = ["Multihop", "multihop"]
