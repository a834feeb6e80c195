"""Models: load one, wrap it with LoRA, and tell its weights from others."""

from keel.models.fingerprint import fingerprint
from keel.models.load import LoadedModel, load_model
from keel.models.options import LoraOptions, ModelOptions

__all__ = ["LoadedModel", "LoraOptions", "ModelOptions", "fingerprint", "load_model"]
