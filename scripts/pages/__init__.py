"""Pages of the site that are made from the code when it is built; `scripts/site_hook.py` hands them to mkdocs."""

from __future__ import annotations

from pages.api import api_pages
from pages.commands import commands_page
from pages.facts import facts_page
from pages.findings import findings_page
from pages.logs import logs_page
from pages.metrics import metrics_page
from pages.options import options_page
from pages.peer_options import peer_options_page
from pages.studies import studies_page


def reference_pages() -> dict[str, str]:
    """Path on the site → text of every page of the reference."""
    return {
        "reference/options.md": options_page(),
        "reference/metrics.md": metrics_page(),
        "reference/findings.md": findings_page(),
        "reference/logs.md": logs_page(),
        "reference/peer-options.md": peer_options_page(),
        "reference/facts.md": facts_page(),
        "reference/studies.md": studies_page(),
        "reference/commands.md": commands_page(),
        **{f"reference/api/{name}.md": text for name, text in api_pages().items()},
    }


__all__ = ["reference_pages"]
