"""How plots are drawn: a chart as data, as SVG in a page, as a picture in a file."""
