"""The entry point of the group `verl.plugins`: registers `keel_sync` as soon as verl loads its trainers.

verl imports every plugin in every process and swallows what it raises (`verl/__init__.py`). So nothing heavy happens
here, and what keeps Keel's trainer from being loaded (a version that was not tested, a missing package) is said in the
log; a run of plain verl continues. Where `keel_sync` is then asked for, verl itself refuses it.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from keel.base.errors import KeelError
from keel.integrations.verl.unread import MODE, refuse_unread
from keel.integrations.versions import VERL

Follow = Callable[[ModuleType], None]
logger = logging.getLogger("keel")


def with_trainers(module: ModuleType) -> None:
    """After verl's trainers are loaded: make them refuse options that they would not read, and register Keel's."""
    refuse_unread(module.PPOTrainer)
    importlib.import_module("keel.integrations.verl.trainer")


def with_legacy_trainer(module: ModuleType) -> None:
    """After the trainer of `trainer.use_v1=False` is loaded."""
    refuse_unread(module.RayPPOTrainer)


# The first holds the registry, and imports every engine: too much for every process, so that Keel waits for it.
FOLLOWED: dict[str, Follow] = {
    "verl.trainer.ppo.v1": with_trainers,
    "verl.trainer.ppo.ray_trainer": with_legacy_trainer,
}


def follow_safely(follow: Follow, module: ModuleType) -> None:
    """Run Keel's hook after a module of verl; an error must not stop a run that does not use Keel."""
    try:
        follow(module)
    except Exception as error:
        reason = " ".join(str(error).split())
        logger.warning("Keel is not loaded into verl, %s is unknown (%s: %s)", MODE, type(error).__name__, reason)


class _Then(Loader):
    """A module's own loader, followed by Keel's hook."""

    def __init__(self, loader: Loader, follow: Follow) -> None:
        self.loader, self.follow = loader, follow

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        follow_safely(self.follow, module)


class Following(MetaPathFinder):
    """Find a module of verl in the usual way, and run Keel's hook after it, once."""

    def __init__(self, name: str, follow: Follow) -> None:
        self.name, self.follow = name, follow

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self.follow)
        return spec


def install() -> None:
    """Run Keel's hooks after verl's trainers are loaded: now if they are loaded already, else on import."""
    try:
        VERL.check_version()
    except KeelError as error:
        logger.warning("%s", error)
        raise
    for name, follow in FOLLOWED.items():
        if name in sys.modules:
            follow_safely(follow, sys.modules[name])
        else:
            sys.meta_path.insert(0, Following(name, follow))


install()
