"""Builds sdist and wheel, installs the wheel into an empty environment, and trains the shipped default there.

    python scripts/check_wheel.py [--dist FOLDER] [--tag v1.2.3]

The wheel is built out of the sdist, so that what the sdist lacks is missed here. Every file of src/keel and configs
must be in the wheel. The environment gets Keel without extras, under constraints.txt, and the commands run in a folder
that knows no clone. Only the standard library is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHORT = "run.max_steps=3 warmstart.steps=20 optim.warmup_steps=1 rollout.prompts_per_step=4 eval.samples=8"
# every shipped configuration loads, or says which extra it needs
LOADS = """
import pathlib, keel
from keel.base.errors import KeelError
for path in sorted(pathlib.Path(keel.__file__).with_name("configs").glob("*.yaml")):
    try:
        keel.load_config(path.stem)
        print(path.stem, "loads")
    except KeelError as error:
        if "pip install 'keel-rl[" not in str(error):
            raise
        print(path.stem, "asks for an extra:", error)
"""


def version(root: Path = ROOT) -> str:
    """The one place that says it."""
    text = (root / "src/keel/__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.M)
    if found is None:
        raise SystemExit("check_wheel: src/keel/__init__.py has no __version__")
    return found[1]


def check_tag(tag: str, root: Path = ROOT) -> None:
    """A release says its version in the tag, in CITATION.cff and as a heading of the changelog."""
    number = version(root)
    if tag != f"v{number}":
        raise SystemExit(
            f"check_wheel: the tag is {tag}, src/keel/__init__.py says {number}: tag v{number}, or change it"
        )
    if f"\nversion: {number}\n" not in (root / "CITATION.cff").read_text(encoding="utf-8"):
        raise SystemExit(f"check_wheel: CITATION.cff does not say version: {number}")
    if f"\n## {number} " not in (root / "CHANGELOG.md").read_text(encoding="utf-8"):
        raise SystemExit(f"check_wheel: CHANGELOG.md has no heading ## {number} (date)")


def packaged() -> set[str]:
    """What the wheel must hold: the package with all of its data, and the shipped configurations beside it."""
    files = {}
    for folder, place in ((ROOT / "src/keel", "keel"), (ROOT / "configs", "keel/configs")):
        files |= {f"{place}/{path.relative_to(folder).as_posix()}": path for path in folder.rglob("*")}
    return {name for name, path in files.items() if path.is_file() and "__pycache__" not in path.parts}


def run(*command: str, where: Path) -> str:
    """What a command prints, shown as it comes; neither a clone's code nor another environment is on its path."""
    print(f"check_wheel: {shlex.join(command)}".partition("\n")[0], flush=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    process = subprocess.Popen(command, cwd=where, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    printed = []
    for line in process.stdout:
        print(line, end="", flush=True)
        printed.append(line)
    if process.wait():
        raise SystemExit(f"check_wheel: exit status {process.returncode} of: {shlex.join(command)}")
    return "".join(printed)


def environment(folder: Path) -> Path:
    """A new virtual environment's programs."""
    run(sys.executable, "-m", "venv", str(folder), where=folder.parent)
    return folder / ("Scripts" if os.name == "nt" else "bin")


def build(temporary: Path) -> tuple[Path, Path]:
    """(sdist, wheel), the second out of the first."""
    programs, dist = environment(temporary / "builder"), temporary / "dist"
    run(str(programs / "pip"), "install", "--quiet", "--disable-pip-version-check", "build", where=temporary)
    run(str(programs / "python"), "-m", "build", "--outdir", str(dist), str(ROOT), where=temporary)
    [sdist], [wheel] = dist.glob("*.tar.gz"), dist.glob("*.whl")
    return sdist, wheel


def check_files(sdist: Path, wheel: Path) -> None:
    """Both carry the version and every file that they should."""
    number = version()
    expected = (f"keel_rl-{number}.tar.gz", f"keel_rl-{number}-py3-none-any.whl")
    if (sdist.name, wheel.name) != expected:
        raise SystemExit(f"check_wheel: built {sdist.name} and {wheel.name}, expected {' and '.join(expected)}")
    with zipfile.ZipFile(wheel) as archive:
        missing = packaged() - set(archive.namelist())
    if missing:
        raise SystemExit(f"check_wheel: {wheel.name} lacks {', '.join(sorted(missing))}")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("LICENSE", "README.md", "CHANGELOG.md", "Makefile", "constraints.txt", "tests/conftest.py"):
        if name not in names:
            raise SystemExit(f"check_wheel: {sdist.name} lacks {name}")
    print(f"check_wheel: {wheel.name} {wheel.stat().st_size / 2**20:.1f} MiB, all {len(packaged())} files", flush=True)


def check_installed(wheel: Path, temporary: Path) -> None:
    """Trains, reports, shows and judges as a user who has the wheel alone."""
    programs, here = environment(temporary / "user"), temporary / "here"
    here.mkdir()
    constraints = str(ROOT / "constraints.txt")
    pip = [str(programs / "pip"), "install", "--disable-pip-version-check", "--no-compile", "-c", constraints]
    run(*pip, str(wheel), where=here)
    keel = str(programs / "keel")
    printed = run(keel, "--version", where=here)
    if printed != f"keel {version()}\n":
        raise SystemExit(f"check_wheel: keel --version says {printed!r}, src/keel/__init__.py {version()!r}")
    run(str(programs / "python"), "-c", LOADS, where=here)
    run(keel, "train", "default", *shlex.split(SHORT), where=here)
    run(keel, "show", "runs/default", "--limit", "1", where=here)
    run(keel, "report", "runs/default", "--out", "again.html", where=here)
    summary = json.loads((here / "runs/default/summary.json").read_text(encoding="utf-8"))
    if summary["steps"] != 3 or not (here / "again.html").stat().st_size:
        raise SystemExit(f"check_wheel: the run is not whole: {summary}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dist", type=Path, help="where sdist and wheel are kept; by default nowhere")
    parser.add_argument("--tag", default="", help="of a release: it must be the version's")
    options = parser.parse_args()
    if options.tag:
        check_tag(options.tag)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="keel-wheel-") as folder:
        temporary = Path(folder)
        sdist, wheel = build(temporary)
        check_files(sdist, wheel)
        check_installed(wheel, temporary)
        if options.dist is not None:
            options.dist.mkdir(parents=True, exist_ok=True)
            for built in (sdist, wheel):
                shutil.copy(built, options.dist)
    print(f"check_wheel: sound, in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
