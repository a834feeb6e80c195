"""The configuration: every option, read from YAML and overrides, checked before any model loads."""

from typing import TYPE_CHECKING

from keel.base.moved import refuse_renamed
from keel.config.load import load_config, read_config
from keel.config.resolve import kl_pairing, resolved
from keel.config.schema import Config, TaskOptions

if not TYPE_CHECKING:  # type checkers see the names that are there
    __getattr__ = refuse_renamed(
        __name__,
        {
            "controller_params": "keel.kl.controller_of",
            "kl_spec": "config.kl itself",
            "loss_spec": "config.loss itself",
            "mismatch_spec": "config.loss.mismatch itself",
        },
    )

__all__ = [
    "Config",
    "TaskOptions",
    "kl_pairing",
    "load_config",
    "read_config",
    "resolved",
]
