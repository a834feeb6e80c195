"""A model's tokenizer alone, for what needs no weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError, first_line
from keel.base.imports import is_import_path
from keel.models.load import describe_source, load_model
from keel.models.tiny import tiny_tokenizer


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of the model called `name`; a GGUF file and a user's loader give it with the model only."""
    if name == "tiny":
        return tiny_tokenizer()
    if name.endswith(".gguf") or is_import_path(name):
        return load_model(name, probe=False, device="cpu").tokenizer
    from transformers import AutoTokenizer

    path = Path(name).expanduser()
    try:
        return AutoTokenizer.from_pretrained(str(path) if path.is_dir() else name, trust_remote_code=trust_remote_code)
    except Exception as error:  # what transformers raises here has no common base
        source = describe_source(name)
        raise KeelError(f"cannot load a tokenizer from {source}: {first_line(error).rstrip('.')}") from error


def vocabulary_digest(tokenizer: Any) -> str:
    """A digest of which text has which id: equal for tokenizers that read and write alike."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]
