"""scripts/migrate_page.py: docs/migrate.md has every name of the table."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("migrate_page", ROOT / "scripts/migrate_page.py")
migrate_page = importlib.util.module_from_spec(spec)
spec.loader.exec_module(migrate_page)


def test_the_page_is_up_to_date():
    assert migrate_page.PAGE.read_text(encoding="utf-8") == migrate_page.page(), "run: python scripts/migrate_page.py"
