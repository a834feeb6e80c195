"""The entry point of the group `verl.plugins`: registers `keel_sync` when verl loads its trainers.

verl imports every plugin in every process and ignores exceptions (`verl/__init__.py`). This module therefore imports
nothing heavy, and logs why Keel's trainer cannot be loaded (an untested version, a missing package). Runs without Keel
continue; a run with `keel_sync` is refused by verl itself.
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
from keel.integrations.verl import MODE, refuse_unread
from keel.integrations.versions import VERL

Hook = Callable[[ModuleType], None]
logger = logging.getLogger("keel")


def register(module: ModuleType) -> None:
    """Register Keel's trainer, and make verl's own trainer refuse options of Keel that it would ignore."""
    refuse_unread(module.PPOTrainer)
    importlib.import_module("keel.integrations.verl.trainer")


def guard_legacy_trainer(module: ModuleType) -> None:
    """Make the trainer of `trainer.use_v1=False` refuse options of Keel that it would ignore."""
    refuse_unread(module.RayPPOTrainer)


# verl.trainer.ppo.v1 has the registry, but it imports every engine, which is too slow for every process.
HOOKS: dict[str, Hook] = {
    "verl.trainer.ppo.v1": register,
    "verl.trainer.ppo.ray_trainer": guard_legacy_trainer,
}


def run_hook(hook: Hook, module: ModuleType) -> None:
    """Run a hook; an error must not stop a run that does not use Keel."""
    try:
        hook(module)
    except Exception as error:
        reason = " ".join(str(error).split())
        kind = type(error).__name__
        logger.warning("Keel could not be loaded, so verl does not know the mode %s (%s: %s)", MODE, kind, reason)


class _HookedLoader(Loader):
    """Load a module with its own loader, then run a hook."""

    def __init__(self, loader: Loader, hook: Hook) -> None:
        self.loader, self.hook = loader, hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        run_hook(self.hook, module)


class HookedFinder(MetaPathFinder):
    """A finder that runs a hook once, after a module is loaded."""

    def __init__(self, name: str, hook: Hook) -> None:
        self.name, self.hook = name, hook

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _HookedLoader(spec.loader, self.hook)
        return spec


def install() -> None:
    """Run Keel's hooks after verl's trainers are loaded: now if they are already loaded, else on import."""
    try:
        VERL.check_version()
    except KeelError as error:
        logger.warning("%s", error)
        raise
    for name, hook in HOOKS.items():
        if name in sys.modules:
            run_hook(hook, sys.modules[name])
        else:
            sys.meta_path.insert(0, HookedFinder(name, hook))


install()
