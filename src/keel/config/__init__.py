"""The configuration: every option, read from YAML and overrides, checked before any model loads."""

from keel.config.load import load_config, read_config
from keel.config.resolve import controller_params, kl_spec, loss_spec, mismatch_spec, resolved
from keel.config.schema import Config, TaskOptions

__all__ = [
    "Config",
    "TaskOptions",
    "controller_params",
    "kl_spec",
    "load_config",
    "loss_spec",
    "mismatch_spec",
    "read_config",
    "resolved",
]
