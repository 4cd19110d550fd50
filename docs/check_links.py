"""Check the built documentation: each internal link and anchor exists, and no page loads anything from elsewhere.

python docs/check_links.py build/docs
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {"img": "src", "script": "src", "link": "href", "iframe": "src"}


class Page(HTMLParser):
    """The links, the anchors and the loaded files of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect what the tag names."""
        found = {name: value or "" for name, value in attrs}
        self.anchors.update(found[key] for key in ("id", "name") if key in found)
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in LOADS and LOADS[tag] in found and found.get("rel") in (None, "stylesheet", "preload", "icon"):
            self.loads.append(found[LOADS[tag]])


def problems(root: Path) -> list[str]:
    """Each dead link, and each file that a page loads from elsewhere."""
    pages = {path.resolve(): Page(path) for path in sorted(root.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        where = path.relative_to(root.resolve())
        found += [f"{where} loads {each}" for each in page.loads if urlsplit(each).netloc]
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                found.append(f"{where} links to {link}, which does not exist")
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{where} links to {link}, and that page has no such anchor")
    return found


if __name__ == "__main__":
    all_problems = problems(Path(sys.argv[1]))
    print("\n".join(all_problems) or "All links of the documentation lead somewhere.")
    sys.exit(bool(all_problems))
