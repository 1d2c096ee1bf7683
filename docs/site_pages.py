"""Links of the site: files of the checkout that pages link to are copied beside them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(\.\./([^)\s:#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any, **_: Any) -> None:
    """Add the files to the site, as text."""
    pages = [(ROOT / "docs" / page.src_uri).read_text() for page in files.documentation_pages()]
    for name in {link for page in pages for _, link, _ in LINK.findall(page)}:
        if (ROOT / name).is_file():
            source = str(ROOT / name)
            files.append(File.generated(config, f"checkout/{name}.txt", abs_src_path=source))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to files of the checkout lead to the copies; a folder is its name alone."""

    def turned(found: re.Match[str]) -> str:
        words, name, _ = found.groups()
        return f"[{words}](checkout/{name}.txt)" if (ROOT / name).is_file() else f"`{name}`"

    return LINK.sub(turned, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings announce code by two colons; here it stands apart without them."""
    return html.replace("<p>::</p>", "").replace("::</p>", ":</p>")
