"""`keel verify --peers`: the KL terms of every trainer that is installed, judged by their own functions."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from keel.base.errors import KeelError
from keel.verify.peer_terms import GRADIENT_LABELS, VALUE_LABELS, PeerTermResult, examine_term

# name, what pip calls it, and where its terms are: a function of no arguments that returns them
PEERS = (
    ("TRL", "trl", "keel.integrations.trl.formulas:formulas"),
    ("verl", "verl", "keel.integrations.verl.formulas:formulas"),
    ("OpenRLHF", "openrlhf", "keel.integrations.others:openrlhf"),
    ("AReaL", "areal", "keel.integrations.others:areal"),
    ("tinker-cookbook", "tinker-cookbook", "keel.integrations.others:tinker_cookbook"),
    ("prime-rl", "prime-rl", None),
)


@dataclass(frozen=True)
class Peer:
    """A trainer: its rows, or why there are none."""

    name: str
    version: str | None
    rows: tuple[PeerTermResult, ...] = ()
    reason: str = ""


def peers() -> Iterator[Peer]:
    """Every peer in turn; a version whose functions are called in another way is a line of its own."""
    for name, package, where in PEERS:
        try:
            installed = version(package)
        except PackageNotFoundError:
            yield Peer(name, None, reason="not installed")
            continue
        if where is None:
            yield Peer(name, installed, reason="Keel does not know its functions")
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
                f"{name} {installed} is none that Keel knows the functions of "
                f"({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
            ) from None
        yield from (examine_term(name, installed, term) for term in terms)


def words(row: PeerTermResult) -> dict[str, str]:
    """A row as the page and the terminal show it, by what the column is called."""
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
    """What a terminal shows of a peer."""
    title = f"{peer.name} {peer.version}" if peer.version else peer.name
    yield f"{title}: {peer.reason}" if peer.reason else title
    for row in peer.rows:
        yield f"  {row.name}, {row.file}:{row.line}"
        yield f"    {row.options}{' (default)' if row.default else ''}"
        yield f"    {'; '.join(f'{name}: {text}' for name, text in words(row).items())}"
