"""The reference of other trainers' option names: what each becomes in Keel, from keel/config/peers.yaml."""

from __future__ import annotations

from keel.config.peers import Alias, tables
from pages.tables import table

HEAD = """# Options of other trainers

Keel accepts these names in a configuration and on the command line, and `keel migrate` translates them
([guide](../other-trainers.md#move-a-configuration-to-keel)).

"""
TITLES = {
    "Keel": "Short names",
    "TRL": "TRL (GRPOConfig, DistillationConfig, GKDConfig, 1.16)",
    "verl": "verl (YAML)",
    "OpenRLHF": "OpenRLHF (command line)",
    "other": "Other trainers and courses",
}


def peer_options_page() -> str:
    parts = []
    for origin, aliases in tables().items():
        rows = [(f"`{alias.name}`", f"`{alias.target}`", alias.note) for alias in aliases if alias.target]
        parts.append(f"## {TITLES[origin]}\n\n{table(('name', 'becomes', 'note'), rows)}")
        if others := [_without_target(alias) for alias in aliases if not alias.target]:
            parts.append(table(("without an option in Keel", "", "why"), others))
    return HEAD + "\n\n".join(parts) + "\n"


def _without_target(alias: Alias) -> tuple[str, str, str]:
    refused = alias.convert is None or alias.note.startswith("refused")
    return f"`{alias.name}`", "refused" if refused else alias.unneeded or "not needed", alias.note
