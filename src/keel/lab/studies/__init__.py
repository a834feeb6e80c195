"""Studies: a grid of runs over several seeds, its statistics, tables and report."""

from keel.lab.studies.grid import Axis, Measurements, Point, Study, parse_axis, read_study

__all__ = ["Axis", "Measurements", "Point", "Study", "parse_axis", "read_study"]
