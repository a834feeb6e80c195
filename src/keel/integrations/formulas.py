"""`keel verify --peers`: examine the KL terms of every installed trainer by calling the trainer's own functions."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from keel.base.errors import KeelError
from keel.integrations.versions import TRL, VERL, minor
from keel.verify.peer_terms import GRADIENT_LABELS, VALUE_LABELS, PeerTermResult, examine_term

# For each trainer: name, distribution, supported minor versions, and the path of the function that returns its terms.
PEERS = (
    ("TRL", "trl", TRL.tested, "keel.integrations.trl.formulas:formulas"),
    ("verl", "verl", VERL.tested, "keel.integrations.verl.formulas:formulas"),
    ("OpenRLHF", "openrlhf", ("0.11",), "keel.integrations.others:openrlhf"),
    ("AReaL", "areal", ("1.0",), "keel.integrations.others:areal"),
    ("tinker-cookbook", "tinker-cookbook", ("0.6",), "keel.integrations.others:tinker_cookbook"),
    ("prime-rl", "prime-rl", ("0.8",), "keel.integrations.others:prime_rl"),
)


@dataclass(frozen=True)
class Peer:
    """A trainer, with its rows or the reason why there are none."""

    name: str
    version: str | None
    rows: tuple[PeerTermResult, ...] = ()
    reason: str = ""


def peers() -> Iterator[Peer]:
    """Examine every peer in turn. A peer that cannot be called has a reason of one line."""
    for name, package, tested, where in PEERS:
        try:
            installed = version(package)
        except PackageNotFoundError:
            yield Peer(name, None, reason="not installed")
            continue
        if minor(installed) not in tested:
            yield Peer(name, installed, reason=f"Keel knows the functions of version {', '.join(tested)} alone")
            continue
        try:
            yield Peer(name, installed, tuple(_rows(name, installed, where)))
        except KeelError as error:
            yield Peer(name, installed, reason=str(error).removeprefix(f"{name} {installed}").lstrip(": "))


def _rows(name: str, installed: str, where: str) -> Iterator[PeerTermResult]:
    module, _, function = where.partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            terms: Any = getattr(importlib.import_module(module), function)()
        except (ImportError, OSError, RuntimeError) as error:
            raise KeelError(
                f"{name} {installed} cannot be imported here: {next(iter(str(error).splitlines()), '')}"
            ) from None
        except (AttributeError, TypeError, KeyError, ValueError) as error:
            raise KeelError(
                f"{name} {installed}: its functions are not those that Keel knows "
                f"({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
            ) from None
        yield from (examine_term(name, installed, term) for term in terms)


def columns(row: PeerTermResult) -> dict[str, str]:
    """The texts of a row on the page and in the terminal, by column name."""
    gradient = GRADIENT_LABELS[row.gradient]
    if row.gradient == "none":
        gradient += f" (cosines {row.cosine_policy_ref:.2f} and {row.cosine_ref_policy:.2f})"
    far = "the same" if row.far == row.gradient else GRADIENT_LABELS[row.far]
    off = "the same" if row.off_policy == row.gradient else GRADIENT_LABELS[row.off_policy]
    return {
        "its value": VALUE_LABELS.get(row.value, VALUE_LABELS["none"]),
        "its expected gradient": gradient,
        "log-ratios above 2 nats": far,
        "samples of older weights": off,
    }


def lines(peer: Peer) -> Iterator[str]:
    """The lines that the terminal shows for a peer."""
    title = f"{peer.name} {peer.version}" if peer.version else peer.name
    yield f"{title}: {peer.reason}" if peer.reason else title
    for row in peer.rows:
        yield f"  {row.name}, {row.file}:{row.line}"
        yield f"    {row.options}{' (default)' if row.default else ''}"
        yield f"    {'; '.join(f'{name}: {text}' for name, text in columns(row).items())}"
