"""Models: load one, wrap it with LoRA, and tell its weights from others."""

from keel.models.fingerprint import fingerprint
from keel.models.load import LoadedModel, load_model
from keel.models.lora import LoraSettings

__all__ = ["LoadedModel", "LoraSettings", "fingerprint", "load_model"]
