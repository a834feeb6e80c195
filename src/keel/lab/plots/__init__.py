"""Plots: charts as data, as SVG in a page, and as image files."""
