"""Panels as a figure of matplotlib that a notebook shows, and that its user may go on with."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from keel.lab.plots.charts import Panel
from keel.lab.plots.picture import LEGEND_SIZE, draw_curves

COLUMNS = 3
DPI = 90


class PanelFigure(Figure):
    """A figure that a notebook draws once, where it stands: pyplot, which would draw it a second time, has no part."""

    def _repr_png_(self) -> bytes:
        data = io.BytesIO()
        self.savefig(data, format="png")
        return data.getvalue()


def figure_of(panels: Sequence[Panel], title: str) -> PanelFigure:
    """The panels in rows of three, with notable events dotted."""
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = PanelFigure(figsize=(4.4 * columns, 0.4 + 2.8 * rows), dpi=DPI, layout="constrained")
    for index, panel in enumerate(panels, start=1):
        axis = figure.add_subplot(rows, columns, index)
        draw_curves(axis, panel, small=False)
        for step in panel.events:
            axis.axvline(step, color="#a65f00", ls=":", lw=0.9)
        axis.set_title(panel.title, fontsize=10)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if len(panel.series) > 1:
            axis.legend(fontsize=LEGEND_SIZE, frameon=False)
    figure.suptitle(title, fontsize=11)
    return figure
