"""Where the modules of 0.1 went: `module:attr` names of earlier configurations still load, imports are refused."""

from __future__ import annotations

import dis
import importlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from types import FrameType, ModuleType
from typing import Any

# The longest name that fits decides: `keel.studies.plan` went elsewhere than the rest of `keel.studies`.
MOVED = {
    "keel.build": "keel.run.build",
    "keel.cli.hub": "keel.cli.push",
    "keel.cli.look": "keel.cli.report",
    "keel.config.fields": "keel.base.options",
    "keel.config.interpolate": "keel.lab.migrate.interpolate",
    "keel.config.migrate": "keel.lab.migrate.migrate",
    "keel.config.peer_files": "keel.lab.migrate.peer_files",
    "keel.config.shell": "keel.lab.migrate.shell",
    "keel.config.sources": "keel.config.schema",
    "keel.data": "keel.envs.shards",
    "keel.data.shards": "keel.envs.shards",
    "keel.doctor": "keel.lab.doctor",
    "keel.doctor.bench": "keel.lab.doctor.setup",
    "keel.doctor.probes.expected": "keel.lab.doctor.expected",
    "keel.doctor.probes.outcome": "keel.lab.doctor.probes.result",
    "keel.doctor.thresholds": "keel.base.thresholds",
    "keel.drift": "keel.lab.compare",
    "keel.errors": "keel.base.errors",
    "keel.loggers.files": "keel.base.files",
    "keel.loggers.lock": "keel.base.lock",
    "keel.metrics": "keel.base.metrics",
    "keel.models.branches": "keel.models.prefix_attention",
    "keel.models.lengths": "keel.models.rope",
    "keel.models.scratch": "keel.envs.chess.models",
    "keel.redact": "keel.base.redact",
    "keel.reference.held": "keel.reference.weights",
    "keel.report": "keel.lab.report",
    "keel.report.charts": "keel.lab.plots.charts",
    "keel.report.picture": "keel.lab.plots.picture",
    "keel.report.read": "keel.lab.runs",
    "keel.rollout.batch": "keel.rollout.native.batch",
    "keel.rollout.cache": "keel.rollout.native.cache",
    "keel.rollout.decode": "keel.rollout.native.decode",
    "keel.rollout.graph": "keel.rollout.native.graph",
    "keel.rollout.kept": "keel.rollout.native.turn_cache",
    "keel.rollout.lean": "keel.rollout.native.llama",
    "keel.rollout.weights": "keel.rollout.native.weights",
    "keel.studies": "keel.lab.studies",
    "keel.studies.hardware": "keel.lab.plan.hardware",
    "keel.studies.live": "keel.lab.plan.counters",
    "keel.studies.pictures": "keel.lab.studies.plots",
    "keel.studies.plan": "keel.lab.plan.plan",
    "keel.studies.rehearse": "keel.lab.plan.dry_run",
    "keel.studies.rows": "keel.lab.studies.results",
    "keel.studies.shapes": "keel.lab.plan.shapes",
    "keel.studies.stats": "keel.eval.statistics",
    "keel.tasks": "keel.envs",
    "keel.tasks.concurrent": "keel.envs.calls",
    "keel.tasks.guard": "keel.envs.calls",
    "keel.train": "keel.trainer",
    "keel.train.api": "keel.run.train",
    "keel.train.environment": "keel.run.environment",
    "keel.train.evaluate": "keel.eval.evaluate",
    "keel.train.evaluation": "keel.run.evaluate",
    "keel.train.export": "keel.lab.publish.export",
    "keel.train.hub": "keel.lab.publish.hub",
    "keel.train.paths": "keel.run.paths",
    "keel.train.resume": "keel.run.resume",
    "keel.train.subject": "keel.run.model_ref",
    "keel.train.supervise": "keel.run.sft",
    "keel.train.warmstart": "keel.run.warmstart",
    "keel.types": "keel.base.types",
    "keel.verify.show": "keel.lab.report.proofs",
    "keel.verify.task": "keel.envs.prove",
    "keel.worlds": "keel.envs.multihop.models",
}
_NAME = re.compile(r"(keel(?:\.\w+)+)(:\w+)")


def current(module: str) -> str:
    """The name that a module has today."""
    parts = module.split(".")
    for end in range(len(parts), 1, -1):
        if (head := ".".join(parts[:end])) in MOVED:
            return ".".join([MOVED[head], *parts[end:]])
    return module


def current_names(value: Any) -> Any:
    """Plain data with every `module:attr` of Keel's own under the name that it has today."""
    if isinstance(value, str):
        match = _NAME.fullmatch(value)
        return value if match is None else current(match[1]) + match[2]
    if isinstance(value, dict):
        return {key: current_names(part) for key, part in value.items()}
    return type(value)(map(current_names, value)) if isinstance(value, list | tuple) else value


class _OldNames(MetaPathFinder):
    """Refuses an import of a module under its name of 0.1, in one line with its new name and the importing file."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if fullname not in MOVED:
            return
        from keel.base.errors import RenamedImport

        name, location = _importer(fullname, sys._getframe(1))
        raise RenamedImport(f"{name} is now {current(name)}: change the import in {location}")


def refuse_renamed(module: str, renamed: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` that refuses its names of 0.1 in one line that says what each became.

    Python's `from … import` drops the message of an AttributeError, `hasattr` waits for one: each gets its own.
    """

    def lookup(name: str) -> Any:
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        from keel.base.errors import RenamedAttribute, RenamedImport

        frame = sys._getframe(1)
        imported = dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"
        error = RenamedImport if imported else RenamedAttribute
        raise error(f"{module}.{name} is now {renamed[name]}: see docs/upgrading.md")

    return lookup


def _importer(name: str, frame: FrameType | None) -> tuple[str, str]:
    """The module that is imported, of which `name` may be the parent, and the file and line that import it."""
    while frame is not None and frame.f_code.co_filename.startswith(("<frozen importlib", importlib.__file__)):
        imported = frame.f_locals.get("name")
        name = imported if isinstance(imported, str) and imported.startswith(f"{name}.") else name
        frame = frame.f_back
    return name, "?" if frame is None else f"{frame.f_code.co_filename}, line {frame.f_lineno}"


def refuse_old_names() -> None:
    """Come before all other finders: a folder that an upgrade left behind would pass for a namespace package."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OldNames())
