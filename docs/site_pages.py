"""Links of the site: one to a file that is no page of it becomes the file's path."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """Turn a page's links to files of the checkout into their paths."""

    def turned(found: re.Match[str]) -> str:
        words, link, _ = found.groups()
        if any(file.src_uri == link and not file.inclusion.is_excluded() for file in files):
            return found[0]
        name = (Path(page.file.abs_src_path).parent / link).resolve().relative_to(ROOT)
        return f"`{name}`" if words.strip("`/") == str(name) else f"{words} (`{name}`)"

    return LINK.sub(turned, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings announce code by two colons; here it stands apart without them."""
    return html.replace("<p>::</p>", "").replace("::</p>", ":</p>")
