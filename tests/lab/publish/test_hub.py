"""To a hub and back, without a network: a fake API for what is pushed, a hub on loopback for what is pulled."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
import torch
import yaml
from huggingface_hub import RepoUrl

from keel.api import train
from keel.base.errors import KeelError
from keel.cli import main
from keel.config import load_config
from keel.lab.publish.hub import push
from keel.lab.publish.pull import brings_code
from keel.models.load import load_model
from keel.models.tiny import tiny_model
from keel.run.model_ref import resolve_model
from trainer.small import BASE

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """What `push` asks of HfApi; keeps the files of the commit."""

    def __init__(self, error: Exception | None = None, public: bool = False) -> None:
        self.public = public
        self.files: dict[str, bytes] = {}
        self.repos: list[dict[str, Any]] = []
        self.error = error

    def create_repo(self, **options: Any) -> RepoUrl:
        if self.error is not None:
            raise self.error
        self.repos.append(options)
        owner = "" if "/" in options["repo_id"] else "me/"
        return RepoUrl(f"https://hub.invalid/{owner}{options['repo_id']}", endpoint="https://hub.invalid")

    def repo_info(self, **options: Any) -> Any:
        return SimpleNamespace(private=not self.public)

    def create_commit(self, *, repo_id: str, operations: Any, **options: Any) -> None:
        self.committed = repo_id
        for operation in operations:
            with operation.as_file() as file:
                self.files[operation.path_in_repo] = file.read()

    def write(self, folder: Path) -> Path:
        for name, data in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return folder


def a_run(folder: Path, *overrides: str) -> Path:
    settings = ["run.max_steps=2", "checkpoint.every=1", f"run.dir={folder}", *overrides]
    return train(load_config(BASE, settings)).directory


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_run(tmp_path_factory.mktemp("pushed"))


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_run(tmp_path_factory.mktemp("adapter"), "model.lora.r=2", "optim.learning_rate=0.1")


def front_matter(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---")[1])


def test_a_checkpoint_goes_up_with_its_card_and_without_the_trainers_files(run: Path, tmp_path: Path) -> None:
    hub = FakeHub()
    pushed = push(str(run), "me/letters", private=True, api=hub)
    assert pushed.url == "https://hub.invalid/me/letters"
    assert hub.repos == [{"repo_id": "me/letters", "private": True, "exist_ok": True}]
    assert not any(name.startswith("trainer") for name in hub.files)
    step = run / "checkpoints" / "step-2"
    assert hub.files["model.safetensors"] == (step / "model.safetensors").read_bytes()
    card = hub.files["README.md"].decode()
    about = front_matter(card)
    assert (about["library_name"], about["license"]) == ("transformers", "unknown")
    assert "base_model" not in about  # a loader in Python has no name on a hub
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"{last['kl/policy_ref/k3/mean']:.5f} ± {last['kl/policy_ref/k3/se']:.5f} nats per token (k3)" in card
    assert f"{last['kl/policy_ref/k1/mean']:.5f}" in card
    assert "β = 0.01, k3 in the loss" in card
    evaluated = json.loads((run / "eval.jsonl").read_text().splitlines()[-1])
    assert f"| letters (trained) | {100 * lines(run)[0]['pass@1']:.1f} [" in card
    assert f"{100 * evaluated['pass@1']:.1f} [{100 * evaluated['ci95'][0]:.1f}" in card
    assert 'from_pretrained("me/letters")' in card
    assert "trainer/" not in card
    there = load_model(str(hub.write(tmp_path / "copy")), device="cpu")
    here = resolve_model(str(run), ["model.device=cpu"]).load()
    assert all(map(torch.equal, there.model.parameters(), here.model.parameters()))


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]


def test_a_private_push_onto_a_public_repository_is_refused(run: Path) -> None:
    hub = FakeHub(public=True)
    with pytest.raises(KeelError, match="me/letters is there already and public"):
        push(str(run), "me/letters", private=True, api=hub)
    assert not hub.files
    push(str(run), "me/letters", api=hub)
    assert hub.files


def test_a_name_without_an_owner_is_the_users_own(run: Path) -> None:
    hub = FakeHub()
    push(str(run), "letters", api=hub)
    assert hub.committed == "me/letters"
    assert 'from_pretrained("me/letters")' in hub.files["README.md"].decode()


def test_another_checkpoint_by_step(run: Path) -> None:
    hub = FakeHub()
    push(str(run), "me/letters", checkpoint="1", api=hub)
    assert hub.files["model.safetensors"] == (run / "checkpoints/step-1/model.safetensors").read_bytes()
    assert ", step 1" in hub.files["README.md"].decode()


def test_an_adapter_goes_up_alone_or_merged_into_whole_weights(lora_run: Path, tmp_path: Path) -> None:
    alone, whole = FakeHub(), FakeHub()
    pushed = push(str(lora_run), "me/adapter", api=alone)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(alone.files)
    assert "--merged" in pushed.notes[0]
    assert front_matter(alone.files["README.md"].decode())["library_name"] == "peft"
    push(str(lora_run), "me/whole", merged=True, api=whole)
    assert "adapter_config.json" not in whole.files
    card = whole.files["README.md"].decode()
    assert front_matter(card)["library_name"] == "transformers"
    assert "PeftModel" not in card
    merged = load_model(str(whole.write(tmp_path / "whole")), device="cpu", probe=False).model
    adapted = resolve_model(str(lora_run), ["model.device=cpu"]).load().model
    with torch.no_grad():
        tokens = torch.arange(8).reshape(1, -1)
        ours, theirs = adapted(tokens).logits, merged(tokens).logits
        with adapted.disable_adapter():  # type: ignore[operator]
            base = adapted(tokens).logits
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert not torch.allclose(ours, base, atol=1e-3)


def response(status: int) -> httpx2.Response:
    return httpx2.Response(status, request=httpx2.Request("POST", "https://hub.invalid"))


def failures() -> list[tuple[Exception, str]]:
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    return [
        (HfHubHTTPError("no", response=response(401)), "hf auth login"),
        (HfHubHTTPError("no", response=response(403)), "write access"),
        (HfHubHTTPError("too large", response=response(413)), "answered 413: too large"),
        (httpx2.ConnectError("refused"), "cannot be reached (refused)"),
        (OfflineModeIsEnabled("off"), "HF_HUB_OFFLINE is set"),
    ]


@pytest.mark.parametrize("number", range(5))
def test_what_a_hub_refuses_is_one_line(run: Path, number: int) -> None:
    error, says = failures()[number]
    with pytest.raises(KeelError, match=r"cannot push to me/letters") as caught:
        push(str(run), "me/letters", api=FakeHub(error))
    assert says in str(caught.value)


def test_what_cannot_be_pushed(run: Path, tmp_path: Path) -> None:
    cases = [
        (str(run), "me/a/b", {}, "owner/name"),
        (str(run), "me/a--b", {}, "owner/name.*Cannot have --"),
        (str(run), "me/a", {"merged": True}, "whole weights"),
        (str(run), "me/a", {"checkpoint": "9"}, "no checkpoint of step 9"),
        (str(tmp_path), "me/a", {}, "holds no model"),
        (str(tmp_path / "none"), "me/a", {}, "no folder"),
        (str(run / "checkpoints/step-2"), "me/a", {"checkpoint": "best"}, "needs the folder of a run"),
    ]
    for source, repo, options, says in cases:
        with pytest.raises(KeelError, match=says):
            push(source, repo, api=FakeHub(), **options)


# ------------------------------------------------------------------------------------------------------------- pull


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("served")
    model, tokenizer = tiny_model()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def endpoint(model_files: dict[str, bytes]) -> Iterator[str]:
    """A hub with one public model, me/tiny; anything else is a 404 as the real one writes it."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if "Authorization" in self.headers:
                self.answer(401, b"{}", {"X-Error-Message": "Invalid credentials in Authorization header"})
            elif path in ("/api/models/me/tiny/revision/main", "/api/models/me/tiny"):
                files = [{"rfilename": name} for name in model_files]
                body = {"_id": "1", "id": "me/tiny", "sha": COMMIT, "siblings": files, "private": False}
                self.answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})
            elif path.startswith("/api/models/me/tiny/tree/"):
                tree = [
                    {"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                    for n, d in model_files.items()
                ]
                self.answer(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
            elif path.startswith(f"/me/tiny/resolve/{COMMIT}/") and path.rpartition("/")[2] in model_files:
                data = model_files[path.rpartition("/")[2]]
                tag = hashlib.sha1(data).hexdigest()
                self.answer(200, data, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT})
            else:
                self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def keel(*arguments: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: huggingface_hub reads its environment once, when it is imported."""
    cleaned = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    settings = {**cleaned, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **environment}
    command = [sys.executable, "-m", "keel.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=settings, timeout=120)


def test_a_model_is_pulled_and_loads(endpoint: str, tmp_path: Path, model_files: dict[str, bytes]) -> None:
    place = tmp_path / "pulled"
    done = keel("pull", "me/tiny", str(place), home=tmp_path / "home", HF_ENDPOINT=endpoint)
    assert done.returncode == 0, done.stderr
    assert f"model.name={place}" in done.stdout
    assert {path.name for path in place.iterdir() if path.is_file()} == set(model_files)
    assert all((place / name).read_bytes() == data for name, data in model_files.items())
    loaded, (original, _) = load_model(str(place), device="cpu", probe=False), tiny_model()
    assert all(map(torch.equal, loaded.model.parameters(), original.parameters()))


@pytest.mark.parametrize(
    ("name", "environment", "says"),
    [
        ("me/none", {}, "no such model, or it is private"),
        ("me/tiny", {"HF_TOKEN": "hf_wrong"}, "hf auth login"),
        ("me/tiny", {"HF_HUB_OFFLINE": "1"}, "cannot be reached"),
        ("me/tiny", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot be reached"),
        ("a/b/c", {}, "write owner/name"),
    ],
)
def test_a_pull_that_fails_is_one_line(
    name: str, environment: dict[str, str], says: str, endpoint: str, tmp_path: Path
) -> None:
    settings = {"HF_ENDPOINT": endpoint, **environment}
    done = keel("pull", name, str(tmp_path / "pulled"), home=tmp_path / "home", **settings)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_folder_in_use_is_not_pulled_into(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "mine.txt").write_text("x")
    assert main(["pull", "me/tiny", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err


def test_code_that_a_model_brings_is_refused_until_it_is_trusted(
    model_files: dict[str, bytes], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder = tmp_path / "custom"
    folder.mkdir()
    for name, data in model_files.items():
        (folder / name).write_bytes(data)
    (folder / ".cache").mkdir()
    (folder / ".cache" / "kept-here").write_text("x")
    hub = FakeHub()
    assert push(str(folder), "me/again", api=hub).notes == ("the folder has no README.md, so the model has no card",)
    assert set(hub.files) == set(model_files)
    assert not brings_code(folder)
    config = json.loads(model_files["config.json"])
    config |= {"model_type": "custom_keel_test", "auto_map": {"AutoConfig": "code.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    mark = tmp_path / "was_run"
    (folder / "code.py").write_text(f"open({str(mark)!r}, 'w').close()\nraise ImportError('was run')\n")
    assert brings_code(folder)
    assert main(["eval", str(folder), "--task", "arithmetic"]) == 2
    error = capsys.readouterr().err
    assert "model.trust_remote_code=true" in error
    assert len(error.strip().splitlines()) == 1
    assert not mark.exists()
    assert main(["eval", str(folder), "--task", "arithmetic", "model.trust_remote_code=true"]) == 2
    assert "was run" in capsys.readouterr().err
    assert mark.exists()  # the option is not a dead one
