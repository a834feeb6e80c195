"""The options inside a peer's `training_args.bin`, read without running anything that is in it.

The file is a zip with a pickle. Unpickling normally calls whatever the file names; here every name becomes an inert
stand-in, so what comes out is the plain state of the outer object and nothing is imported or called.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any


class _Stub:
    """Stands in for every class and function of the file; keeps arguments and state, does nothing."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **fields: Any) -> _Stub:  # a pickle may make objects without calling __init__
        stub = super().__new__(cls)
        stub.args, stub.state = args, {}
        return stub

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None: ...

    def extend(self, values: Any) -> None: ...


class _StubUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Stub

    def persistent_load(self, pid: Any) -> Any:
        return None


def read_training_args(path: Path) -> dict[str, Any]:
    """Option → value (numbers, words, lists; enumerations by their value); empty where the file cannot be read."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            with archive.open(name) as file:
                outer = _StubUnpickler(file).load()
    except Exception:  # any file may lie there; a pickle can fail in any way
        return {}
    state = outer.state if isinstance(outer, _Stub) else outer
    return {str(key): _plain(value) for key, value in state.items()} if isinstance(state, dict) else {}


def _plain(value: Any) -> Any:
    if isinstance(value, _Stub):
        return value.args[0] if len(value.args) == 1 and isinstance(value.args[0], str | int | float) else None
    return value
