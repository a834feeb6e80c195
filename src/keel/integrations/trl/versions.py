"""Which versions of TRL the bridge was tested with: it builds on private names, which a minor version may change."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from keel.base.errors import KeelError

TESTED = ("1.16",)


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
