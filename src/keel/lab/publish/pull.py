"""A model from a hub, through huggingface_hub alone: nothing here waits for torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError, first_line


def pull(repo: str, folder: str | Path, *, revision: str | None = None) -> Path:
    """Download a model's files into a new folder, ready for `model.name`; nothing that came with it is run."""
    from huggingface_hub import snapshot_download

    check_repo(repo)
    target = Path(folder).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise KeelError(f"{target} is there already and not empty: name a folder that is not")
    with hub_errors(f"pull {repo}"):
        snapshot_download(repo_id=repo, revision=revision, local_dir=str(target))
    return target


def brings_code(folder: Path) -> bool:
    """Whether a model's folder wants Python code of its own to be run."""
    for name in ("config.json", "tokenizer_config.json"):
        try:
            if json.loads((folder / name).read_text(encoding="utf-8")).get("auto_map"):
                return True
        except (OSError, ValueError, AttributeError):
            continue
    return False


def check_repo(repo: str) -> None:
    """Refuse what is no name on a hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise KeelError(f"{repo!r} is no name on a hub: write owner/name ({first_line(error)})") from None


@contextmanager
def hub_errors(doing: str) -> Iterator[None]:
    """Turn a hub's errors into one line with its remedy."""
    import httpx2
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        raise KeelError(f"cannot {doing}: access is granted on request; ask for it on its page, then log in") from None
    except errors.RepositoryNotFoundError as error:
        why = "the token is not valid: log in again with `hf auth login`" if _status(error) == 401 else ""
        why = (
            why or "there is no such model, or it is private and you are not logged in: check the name, `hf auth login`"
        )
        raise KeelError(f"cannot {doing}: {why}") from None
    except errors.RevisionNotFoundError:
        raise KeelError(f"cannot {doing}: it has no such revision: check --revision") from None
    except errors.HfHubHTTPError as error:
        raise KeelError(f"cannot {doing}: {_refusal(error)}") from None
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, httpx2.TransportError, OSError) as error:
        offline = "HF_HUB_OFFLINE is set" if isinstance(error, errors.OfflineModeIsEnabled) else first_line(error)
        raise KeelError(
            f"cannot {doing}: the hub cannot be reached ({offline}): check the network, HF_ENDPOINT"
        ) from None


def _status(error: Any) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _refusal(error: Any) -> str:
    status = _status(error)
    if status == 401:
        return "the hub does not know your token: log in with `hf auth login`, or set HF_TOKEN"
    if status == 403:
        return "your token may not do this: use one with write access to this name"
    return f"the hub answered {status}: {first_line(error)}" if status else first_line(error)
