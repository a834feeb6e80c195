"""Detect damage in a saved folder, by a sha256 of every file and of the record that lists them.

The record is `trainer/state.json` in a checkpoint, `warmstart.json` in an SFT warm start and `checksums.json` in a
model of `keel sft`. It is written last. It is a single file that includes its own checksum, so that it can be replaced
atomically.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError

TRAINER = "trainer"
STATE = f"{TRAINER}/state.json"
WARMSTART, MANIFEST = "warmstart.json", "checksums.json"
_RECORDS = (STATE, WARMSTART, MANIFEST)
_CHECKSUMS, _RECORD_CHECKSUM = "checksums", "sha256"
# Suffixes of files that transformers, peft or a resume would load: weights, settings, templates, code.
_LOADED = (".bin", ".safetensors", ".json", ".pt", ".pth", ".jinja", ".model", ".py")
_TEMPLATES = "additional_chat_templates"
_GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # the saved file is missing


@dataclass(frozen=True)
class Damage:
    """A damaged file of a saved folder, and a description of the damage."""

    file: str
    why: str

    def __str__(self) -> str:
        return f"{self.file} {self.why}"


def checksum(path: Path) -> str:
    """The sha256 of a file in hex, read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksums(folder: Path) -> dict[str, str]:
    """The checksums of all files in a folder."""
    return {str(p.relative_to(folder)): checksum(p) for p in sorted(folder.rglob("*")) if p.is_file()}


def with_checksums(record: Mapping[str, Any], sums: Mapping[str, str]) -> str:
    """A record as JSON, with the checksums of the folder's files and of the record itself."""
    plain = json.loads(json.dumps({**record, _CHECKSUMS: dict(sums)}))
    plain.pop(_RECORD_CHECKSUM, None)
    return json.dumps({**plain, _RECORD_CHECKSUM: _digest(plain)}, indent=1)


def _digest(record: Mapping[str, Any]) -> str:
    contents = {name: value for name, value in record.items() if name != _RECORD_CHECKSUM}
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def saved_checksums(folder: Path) -> dict[str, str]:
    """The checksums in a folder's record; empty if the record is missing or damaged."""
    return dict((saved_record(folder) or {}).get(_CHECKSUMS, {}))


def saved_record(folder: Path) -> dict[str, Any] | None:
    """A folder's record; None if it is missing or damaged. The listed files are not checked."""
    name = _record_name(folder)
    record = None if name is None else _read_json(folder / name)
    return None if not isinstance(record, dict) or _wrong_record(record) is not None else record


def find_damage(folder: Path, *, record: str | None = None, model_only: bool = False) -> list[Damage]:
    """List the missing and changed files of a saved folder, and unexpected ones that would be loaded.

    `model_only` skips trainer/. A file that exists but cannot be read (network share, permissions) raises an error: it
    is not reported as damaged, because it may be intact. A folder without a record cannot be checked.
    """
    name = record or _record_name(folder)
    if name is None:
        return [Damage(STATE, "is missing")] if (folder / TRAINER).exists() else []
    contents = _read_json(folder / name)
    if contents is None and not (folder / name).is_file():
        return [Damage(name, "is missing")]
    if not isinstance(contents, dict):
        return [Damage(name, "is damaged: it holds no JSON object")]
    if (wrong := _wrong_record(contents)) is not None:
        return [Damage(name, wrong)]
    expected: dict[str, str] = contents[_CHECKSUMS]
    checked = {file: value for file, value in expected.items() if not (model_only and file.startswith(f"{TRAINER}/"))}
    wrong_files = [(file, _difference(folder / file, value)) for file, value in checked.items()]
    changed = [Damage(file, why) for file, why in wrong_files if why is not None]
    return changed + _not_saved(folder, {*expected, name}, model_only)


def check_model(folder: Path) -> None:
    """Raise an error if the model in a folder that Keel wrote is damaged."""
    if not folder.is_dir() or (_record_name(folder) is None and not any((folder / TRAINER).glob("*.pt"))):
        return
    if wrong := find_damage(folder, model_only=True):
        raise KeelError(f"{folder} is damaged: {wrong[0]}; restore the file, or name another checkpoint or model")


def _record_name(folder: Path) -> str | None:
    return next((name for name in _RECORDS if (folder / name).exists()), None)


def _read_json(path: Path) -> Any:
    """The contents of a JSON file; None if it is missing or invalid."""
    try:
        return json.loads(path.read_bytes())
    except (*_GONE, ValueError):  # ValueError: the file is not text or not JSON
        return None
    except OSError as error:
        raise _cannot_read(path, error) from error


def _cannot_read(path: Path, error: OSError) -> KeelError:
    return KeelError(
        f"{path} cannot be read now ({error.strerror or error}), but it may be intact: try again, or move its folder "
        "away to continue without it"
    )


def _wrong_record(record: Mapping[str, Any]) -> str | None:
    """Describe the error in a record; None if there is none."""
    fine = isinstance(record.get(_CHECKSUMS), dict) and record.get(_RECORD_CHECKSUM) == _digest(record)
    return None if fine else "has changed since it was saved (its own sha256 differs)"


def _difference(path: Path, saved: str) -> str | None:
    """Describe how a file differs from the sha256 `saved`; None if it does not."""
    try:
        return None if checksum(path) == saved else "has changed since it was saved (its sha256 differs)"
    except _GONE:
        return "is missing"
    except OSError as error:
        raise _cannot_read(path, error) from error


def _not_saved(folder: Path, saved: Collection[str], model_only: bool) -> list[Damage]:
    """Files that were added later and would be loaded. Folders that Keel did not write are ignored."""
    folders = {Path(file).parent for file in saved} | {Path(), Path(_TEMPLATES)}
    folders -= {Path(TRAINER)} if model_only else set()
    unexpected = []
    for path in sorted(path for subfolder in folders for path in (folder / subfolder).glob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix in _LOADED and not path.name.startswith(".") and name not in saved and path.is_file():
            unexpected.append(Damage(name, "was not saved here"))
    return unexpected
