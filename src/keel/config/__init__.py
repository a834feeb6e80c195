"""The configuration: every option, read from YAML and overrides, checked before any model loads."""

from keel.config.load import load_config, read_config
from keel.config.resolve import kl_pairing, resolved
from keel.config.schema import Config, TaskOptions

__all__ = [
    "Config",
    "TaskOptions",
    "kl_pairing",
    "load_config",
    "read_config",
    "resolved",
]
