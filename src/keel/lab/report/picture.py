"""A picture in a file: what every `--plot` shares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError

KINDS = (".png", ".svg", ".pdf")


@contextmanager
def picture(path: Path) -> Iterator[Any]:
    """matplotlib.pyplot without a screen; the current figure is written to `path` and closed at the end."""
    check_picture(path)
    try:
        import matplotlib
    except ImportError:
        raise KeelError("--plot needs matplotlib: pip install 'keel-rl[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    try:
        yield plt
        plt.gcf().savefig(path, dpi=130)
    except OSError as error:
        raise KeelError(f"cannot write the plot to {path}: {error.strerror}: choose a writable folder") from None
    finally:
        plt.close()


def check_picture(path: Path) -> None:
    """Refuse a name that no picture can have; for commands that work long before they draw."""
    if path.suffix not in KINDS:
        raise KeelError(f"cannot write the plot to {str(path)!r}: end its name in {', '.join(KINDS)}")
    if not path.parent.is_dir():
        raise KeelError(f"cannot write the plot to {path}: there is no folder {path.parent}: choose a writable folder")
