"""The configuration: every option, read from YAML and overrides, checked before any model loads."""

from keel.config.checks import kl_pairing, kl_terms
from keel.config.load import load_config, read_config
from keel.config.schema import Config, TaskOptions
from keel.config.text import resolved

__all__ = [
    "Config",
    "TaskOptions",
    "kl_pairing",
    "kl_terms",
    "load_config",
    "read_config",
    "resolved",
]
