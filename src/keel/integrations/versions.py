"""The tested versions of other trainers. Keel overrides methods that a minor version may change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from keel.base.errors import KeelError


def minor(version: str) -> str:
    """The minor version, such as `1.16` for `1.16.0`."""
    return ".".join(version.split(".")[:2])


@dataclass(frozen=True)
class Bridge:
    """A trainer that Keel extends: its tested minor versions, and the requirement for pip.

    `overridden` are the methods that Keel's trainer overrides. `base` is the requirement of the package that defines
    them.
    """

    peer: str
    tested: tuple[str, ...]
    install: str
    base: str
    overridden: tuple[str, ...]

    @property
    def module(self) -> str:
        return f"keel.integrations.{self.peer.lower()}"

    def check_version(self) -> str:
        """The installed version. Raises if this version is not tested."""
        try:
            installed = version(self.peer.lower())
        except PackageNotFoundError:
            raise KeelError(f"{self.module} needs {self.peer}: pip install {self.install}") from None
        if minor(installed) not in self.tested:
            raise KeelError(
                f"{self.module} does not support {self.peer} {installed} (tested: {', '.join(self.tested)}): "
                f"pip install '{self.peer.lower()}=={self.tested[-1]}.*'"
            )
        return installed

    def check_names(self, owner: type, names: Sequence[str] | None = None) -> None:
        """Refuse a class that lacks the overridden or called methods: an override would then never be called."""
        missing = [name for name in (self.overridden if names is None else names) if not hasattr(owner, name)]
        if missing:
            package = self.base.partition("=")[0]
            raise KeelError(
                f"{owner.__name__} has no {missing[0]} in {package} {version(package)}, but {self.module} needs it: "
                f"pip install '{self.base}'"
            )


TRL = Bridge(
    peer="TRL",
    tested=("1.16",),
    install="'keel-rl[trl]'",
    base="transformers==5.22.*",  # `tested` pins TRL's own methods
    overridden=(
        *("_generate_and_score_completions", "_get_per_token_logps_and_entropies", "_compute_loss", "training_step"),
        *("_get_grad_norm", "evaluation_loop"),
        *("_save", "_save_checkpoint", "_load_optimizer_and_scheduler", "_load_from_checkpoint", "log", "train"),
    ),
)
VERL = Bridge(
    peer="verl",
    tested=("0.9",),
    install="'verl==0.9.*' TransferQueue",
    base="verl==0.9.*",
    overridden=("_step_once", "_compute_advantage", "_update_actor", "_save_checkpoint", "_load_checkpoint"),
)
VERL_WORKER_METHODS = ("set_loss_fn", "update_actor")  # methods that Keel calls
