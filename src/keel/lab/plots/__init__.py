"""Every plot once: what is drawn as data, then as SVG in a page or as a picture in a file."""
