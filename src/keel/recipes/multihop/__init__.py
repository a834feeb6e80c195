"""`multihop`: questions whose answer needs several documents, found with a retrieval tool."""

from keel.recipes.multihop.options import multihop
from keel.recipes.multihop.task import Multihop

__all__ = ["Multihop", "multihop"]
