"""Keel inside verl: the trainer mode `keel_sync`. verl's plugin loader registers it, so no import is needed.

verl loads its plugins in every process, so only `trainer` and `loss` import verl.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from keel.base.errors import KeelError

MODE = "keel_sync"


class ReadsKeel:
    """A trainer that reads the section `keel`."""


def refuse_unread(trainer: Any) -> None:
    """Make the constructor of a verl class check the configuration first."""
    build = trainer.__init__

    @wraps(build)
    def checked(self: Any, config: Any, *args: Any, **named: Any) -> None:
        if not isinstance(self, ReadsKeel):
            check_unread(config)
        build(self, config, *args, **named)

    trainer.__init__ = checked


def check_unread(config: Any) -> None:
    """Refuse options that verl's own trainer would ignore."""
    legacy, mode = not config.trainer.use_v1, config.trainer.v1.trainer_mode
    if config.get("keel") is None and not (legacy and mode == MODE):
        return
    chosen = "trainer.use_v1=False" if legacy else f"trainer.v1.trainer_mode={mode}"
    wanted = f"trainer.use_v1=True trainer.v1.trainer_mode={MODE}" if legacy else f"trainer.v1.trainer_mode={MODE}"
    unread = "the section keel" if config.get("keel") is not None else f"trainer.v1.trainer_mode={MODE}"
    raise KeelError(f"{chosen} does not read {unread}, so Keel would have no effect: set {wanted}, or leave it out")
