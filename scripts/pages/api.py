"""The reference of the Python API: a page a room, with the names that it exports; mkdocstrings reads them."""

from __future__ import annotations

import importlib

# page → (what it is for, modules); of a module all of its `__all__`, or the names behind the colon
PAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "keel": (
        "Train and evaluate from a program.",
        ("keel.api: train evaluate TrainResult", "keel.lab.notebook: Run", "keel.config"),
    ),
    "kl": ("Estimators, facts, placements, controllers of β: pure functions.", ("keel.kl",)),
    "losses": ("Advantages, policy losses, reductions, the objective: pure functions.", ("keel.losses",)),
    "verify": ("Proofs by exact enumeration, and the audit of a formula.", ("keel.verify",)),
    "envs": (
        "Tasks, episodes, tools and rewards; what tasks draw, read and split their problems with.",
        (
            "keel.envs",
            "keel.envs.registry: build_task check_task",
            "keel.envs.mixture: Mixture mixture",
            "keel.envs.base: play_turns",
            "keel.envs.problems: HELD_OUT_FRACTION Draw check_split held_out_problems is_held_out split_held_out",
            "keel.envs.problems: seeded_rng training_problems",
            "keel.envs.options: SourceOptions",
            "keel.envs.layouts: LoadedProblems source_of",
            "keel.envs.rows: BrokenRow DataRow DataRows convert_rows handle_broken_rows read_rows row_order",
            "keel.envs.dataset: Dataset NoGrader data_name split",
            "keel.envs.answers: last_tag",
            "keel.envs.tools: MAX_CHARACTERS Tool check_distinct tool",
            "keel.envs.with_tools: tools_of",
            "keel.envs.tool_calls: FORMATS Format write_call",
            "keel.envs.toolbox: MAX_CALLS Toolbox ToolEpisode",
        ),
    ),
    "rollout": (
        "Engines that sample.",
        ("keel.rollout", "keel.rollout.registry: build_engine", "keel.rollout.native.engine: NativeEngine"),
    ),
    "models": (
        "Loading a model, and its fingerprint; small models with random weights.",
        (
            "keel.models",
            "keel.models.tiny: CHARACTERS character_tokenizer random_model",
            "keel.models.tiny: word_model",
        ),
    ),
    "reference": ("What the KL is measured against.", ("keel.reference", "keel.reference.kinds: build_reference")),
    "cli": (
        "A command line of one's own: Keel's arguments, output and errors, the model that is named, an interval.",
        (
            "keel.cli: main",
            "keel.cli.app: ANY_OPTION application bar print_json split",
            "keel.run.model_ref: resolve_model",
            "keel.run.parts: build_renderer",
            "keel.eval.statistics: wilson",
        ),
    ),
    "loggers": ("Where metrics, rollouts and events go.", ("keel.loggers",)),
    "lab": (
        "The doctor and the drift between two models, as functions.",
        (
            "keel.doctor",
            "keel.doctor.examine: examine",
            "keel.doctor.preflight: preflight",
            "keel.lab.compare: Drift DriftEstimate measure_drift",
        ),
    ),
    "integrations": ("Keel inside TRL.", ("keel.integrations.trl",)),
    "base": (
        "What travels between the rooms, and what parts of one's own are declared with.",
        (
            "keel.base.types: Problem Completion Group Reward Scores",
            "keel.base.options: Options PluginOptions PositiveFloat PositiveInt",
            "keel.base.options: read_options",
            "keel.base.errors: KeelError unknown",
            "keel.base.files: write_atomic",
            "keel.base.parts: import_object",
        ),
    ),
}


def api_pages() -> dict[str, str]:
    """Page → Markdown with a directive for every module."""
    return {name: _page(name, about, modules) for name, (about, modules) in PAGES.items()}


def lazy_attributes(module: str) -> tuple[str, list[str]]:
    """A module's path, and which of its names are shown."""
    path, _, names = module.partition(":")
    return path, names.split() or sorted(importlib.import_module(path).__all__)


def _page(name: str, about: str, modules: tuple[str, ...]) -> str:
    parts = [f"# {name if name == 'keel' else f'keel.{name}'}\n\n{about}"]
    for module in modules:
        path, names = lazy_attributes(module)
        listed = "\n".join(f"        - {each}" for each in names)
        parts.append(f"::: {path}\n    options:\n      members:\n{listed}")
    return "\n\n".join(parts) + "\n"
