"""Pages of the site besides the files of ``docs/``: files elsewhere in the checkout, and the table
of examples. A link to a file that has no page becomes its path.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]

PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Files of the checkout, and the pages that they become."""

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    for source, page in PAGES.items():
        text = _with_links(ROOT / source, (ROOT / source).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "examples.md", content=_examples()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn the links of a page that lies in ``docs/``."""
    source = page.file.abs_src_path
    return markdown if source is None else _with_links(Path(source), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings announce code by two colons; here it stands apart without them."""
    return html.replace("::</p>", ":</p>")


def _with_links(source: Path, text: str) -> str:
    """A file's text, its links from within the checkout turned to those of the site."""

    def turned(found: re.Match[str]) -> str:
        mark, words, link = found.groups()
        path, _, anchor = link.partition("#")
        if re.match(r"\w+:", link) or not path:
            return found[0]
        target = (source.parent / path).resolve()
        name = str(target.relative_to(ROOT))
        place = PAGES.get(name)
        if name == "README.md" and anchor == "examples":
            place, anchor = "examples.md", ""
        elif target.parent == ROOT / "examples" and target.suffix == ".py":
            place, anchor = "examples.md", target.stem.replace("_", "-")
        if place is None and target.is_relative_to(ROOT / "docs"):
            place = str(target.relative_to(ROOT / "docs"))
        if place is None:
            return f"`{name}`" if words.strip("`/") == name else f"{words} (`{name}`)"
        return f"{mark}[{words}]({place}{'#' + anchor if anchor else ''})"

    return LINK.sub(turned, text)


def _examples() -> str:
    """The examples: what each does, what it prints, and its code."""
    parts = [
        "# Examples\n\nEach program takes `--devices`: `cpu,cpu`, or `0,1`, or `all` for every GPU"
        " of the cluster. There is a notebook besides, `examples/notebook.ipynb`.\n"
    ]
    for path in sorted((ROOT / "examples").glob("*.py")):
        code = path.read_text(encoding="utf-8")
        about, _, output = (ast.get_docstring(ast.parse(code)) or "").partition("\nOutput::\n")
        if not output:
            continue
        shown = "\n".join(line[4:] for line in output.strip("\n").splitlines())
        parts.append(f"## {path.stem.replace('_', ' ').capitalize()}\n\n{about.strip()}\n")
        parts.append(f"```text\n$ python examples/{path.name}\n{shown}\n```\n")
        body = code.split('"""\n', 1)[1].strip("\n")
        parts.append(f'??? note "examples/{path.name}"\n')
        parts.append("    ```python\n" + "\n".join(f"    {x}" for x in body.splitlines()))
        parts.append("    ```\n")
    return "\n".join(parts)
