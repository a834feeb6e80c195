"""What mkdocs builds besides docs/: the reference, made from the code, and the repository's own pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

from pages import reference_pages
from pages.simplex import simplex_script

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
}
# The same pages under the addresses that they have in the repository, seen from docs/ and from its root.
MOVED = {source: page for page, source in PAGES.items()}
SHIM, OURS = re.compile(r"https?://[^\s\"']*iframe-worker[^\s\"']*"), "disk-search.js"  # the theme's, and ours for it
LOADED = re.compile(r"<(?:script|img|link)\b[^>]*\b(?:src|href)=[\"']?https?://[^\s>]*")
ROW, CODE = re.compile(r"^\|.*$", re.MULTILINE), re.compile(r"`[^`]*`")
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Add what is made now, and the files outside docs/ that a page links to, to be read as they are."""
    made = {**reference_pages(), **{page: (ROOT / source).read_text() for page, source in PAGES.items()}}
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    files.append(File.generated(config, "simplex-data.js", content=simplex_script()))
    written = [*made.values(), *(page.content_string for page in files.documentation_pages())]
    for target in sorted({_in_site(link[1]) for text in written for link in LINK.findall(text)}):
        if files.get_file_from_path(target) is None and (ROOT / target).is_file():
            files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links of the repository become the site's; bars in code of tables, which the repository escapes, stand alone."""
    markdown = ROW.sub(lambda row: CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), markdown)
    if page.file.src_uri.startswith("reference/"):
        return markdown
    return LINK.sub(lambda link: link[1] + _in_site(link[2]) + link[3], markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Nothing is loaded from elsewhere: the search of a page that is opened from the disk is our own script."""
    return _from_here(output, get_relative_url(OURS, page.url))


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """The same for 404.html."""
    return _from_here(output_content, OURS)


def _from_here(html: str, script: str) -> str:
    html = SHIM.sub(script, html)
    if loaded := LOADED.search(html):
        raise PluginError(f"a page would load something from elsewhere: {loaded[0]}")
    return html


def _in_site(target: str) -> str:
    """Where the site has what a link of README.md or of docs/ leads to."""
    inside = target.removeprefix("../").removeprefix("docs/")
    return MOVED.get(inside, inside)
