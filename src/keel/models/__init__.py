"""Models: loading, LoRA and fingerprints of weights."""

from typing import TYPE_CHECKING

from keel.base import lazy_attributes

if TYPE_CHECKING:
    from keel.models.fingerprint import fingerprint
    from keel.models.load import load_model
    from keel.models.options import LoadedModel, LoraOptions, ModelOptions
else:
    __getattr__ = lazy_attributes(__name__, "options fingerprint load")

__all__ = ["LoadedModel", "LoraOptions", "ModelOptions", "fingerprint", "load_model"]
