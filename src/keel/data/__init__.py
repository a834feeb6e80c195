"""Making data: files of rows that a kill does not spoil and a second start continues."""

from keel.data.shards import Made, make_shards

__all__ = ["Made", "make_shards"]
