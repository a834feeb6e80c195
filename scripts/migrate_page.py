"""Write the tables of docs/migrate.md from the table of peers' options: python scripts/migrate_page.py."""

from __future__ import annotations

from pathlib import Path

from keel.config.peers import Alias, tables

PAGE = Path(__file__).resolve().parents[1] / "docs" / "migrate.md"
TITLES = {
    "Keel": "Short names",
    "TRL": "TRL (GRPOConfig, DistillationConfig, GKDConfig, 1.16)",
    "verl": "verl (YAML)",
    "OpenRLHF": "OpenRLHF (command line)",
    "other": "Other trainers and courses",
}


def page() -> str:
    """The page's own words, and every name with what it becomes."""
    head = PAGE.read_text(encoding="utf-8").partition("## ")[0]
    parts = []
    for origin, aliases in tables().items():
        rows = [f"| `{alias.name}` | `{alias.target}` | {alias.note} |" for alias in aliases if alias.target]
        parts.append(_table(f"## {TITLES[origin]}", "| name | becomes | note |", rows))
        if others := [_without_target(alias) for alias in aliases if not alias.target]:
            parts.append(_table("Without an option here:", "| name | | why |", others))
    return head + "\n".join(parts)


def _table(title: str, header: str, rows: list[str]) -> str:
    return "\n".join((title, "", header, "| --- | --- | --- |", *rows, ""))


def _without_target(alias: Alias) -> str:
    refused = alias.convert is None or alias.note.startswith("refused")
    return f"| `{alias.name}` | {'refused' if refused else alias.unneeded or 'not needed'} | {alias.note} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
