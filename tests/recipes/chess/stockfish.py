"""The tests of the real engine run where it is installed; .ci/run installs it and lets nothing be skipped."""

from __future__ import annotations

import pytest

from keel.base.errors import KeelError
from keel.recipes.chess.engine import INSTALL, find_engine


def _is_there() -> bool:
    try:
        find_engine()
    except KeelError:
        return False
    return True


needs_stockfish = pytest.mark.skipif(not _is_there(), reason=f"Stockfish is not installed: {INSTALL}")
