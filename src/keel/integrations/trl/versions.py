"""Which versions of TRL the bridge was tested with: it builds on private names, which a minor version may change."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from keel.base.errors import KeelError

TESTED = ("1.16",)
# What the bridge overrides of TRL's and transformers' trainers.
OVERRIDDEN = (
    *("_generate_and_score_completions", "_get_per_token_logps_and_entropies", "_compute_loss", "_get_grad_norm"),
    *("_save", "_save_checkpoint", "_load_optimizer_and_scheduler", "_load_from_checkpoint", "log", "train"),
)


def check_trl() -> str:
    """The installed version, which has to be a tested one."""
    try:
        installed = version("trl")
    except PackageNotFoundError:
        raise KeelError("keel.integrations.trl needs TRL: pip install 'keel-rl[trl]'") from None
    if ".".join(installed.split(".")[:2]) not in TESTED:
        raise KeelError(
            f"TRL {installed} is none that keel.integrations.trl was tested with ({', '.join(TESTED)}): "
            f"pip install 'trl=={TESTED[-1]}.*'"
        )
    return installed


def check_names(trainer: type) -> None:
    """Refuse a transformers whose trainer lacks what is overridden: an override that is never called guards nothing."""
    missing = [name for name in OVERRIDDEN if not hasattr(trainer, name)]
    if missing:
        raise KeelError(
            f"the trainer of transformers {version('transformers')} has no {missing[0]}, which keel.integrations.trl "
            "builds on: pip install 'transformers==5.22.*'"
        )
