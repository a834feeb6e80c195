"""Models: load one, wrap it with LoRA, and tell its weights from others."""

from typing import TYPE_CHECKING

from keel.base.moved import refuse_renamed
from keel.models.fingerprint import fingerprint
from keel.models.load import LoadedModel, load_model
from keel.models.options import LoraOptions, ModelOptions

if not TYPE_CHECKING:  # type checkers see the names that are there
    __getattr__ = refuse_renamed(__name__, {"LoraSettings": "keel.models.LoraOptions"})

__all__ = ["LoadedModel", "LoraOptions", "ModelOptions", "fingerprint", "load_model"]
