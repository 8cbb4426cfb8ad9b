"""The site is built from the pages of the repository; its links lead somewhere; a browser loads nothing remote."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
#: Attributes that make a browser load something, and the elements on which they do. A link (<a href>) does not.
LOADS = {"src", "srcset", "data", "poster", "background"}
LOADING_LINKS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload", "manifest"}


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=source,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT, folder)
    assert built.returncode == 0, built.stderr
    return folder


class Page(HTMLParser):
    """What a page loads, where it links to, and the places in it that others can link to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids.add(values.get("id", ""))
        self.loads += [values[name] for name in LOADS & values.keys()]
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and LOADING_LINKS & set(values.get("rel", "").split()):
            self.loads.append(values.get("href", ""))
        if "style" in values:
            self.loads += re.findall(r"url\(([^)]+)\)", values["style"])


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def is_remote(address: str) -> bool:
    return bool(urlsplit(address.strip("'\" ")).netloc)


def test_a_browser_loads_nothing_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    assert {str(path): [one for one in page.loads if is_remote(one)] for path, page in pages.items()} == {
        str(path): [] for path in pages
    }
    assert any(page.loads for page in pages.values())
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert [one for one in re.findall(r"url\(([^)]+)\)", text) if is_remote(one)] == [], sheet
        assert not re.search(r"@import\s+[\"']?(url\()?[\"']?(https?:)?//", text), sheet
    # The theme's own script would load the drawing program for these.
    assert [path for path in pages if 'class="mermaid"' in path.read_text(encoding="utf-8")] == []


def test_every_link_leads_to_a_file_and_a_place_in_it(site: Path, pages: dict[Path, Page]) -> None:
    dead = []
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links are absolute
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            known = pages.get(target)
            if not target.exists() or (parts.fragment and known and unquote(parts.fragment) not in known.ids):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert dead == []


def test_every_page_of_the_repository_is_on_the_site(site: Path) -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]:
        place = page.relative_to(ROOT).with_suffix("")
        place = place.parent if place.name == "README" else place
        assert (site / place / "index.html").exists(), page


def test_a_dead_link_fails_the_build(tmp_path: Path) -> None:
    names = ["mkdocs.yml", "README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"]
    for name in [*names, "docs", "tools", "examples", "benchmarks"]:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    page = tmp_path / "docs" / "faq.md"
    page.write_text(page.read_text() + "\n[nothing](tutorial.md#no-such-place)\n")
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode != 0 and "no-such-place" in built.stderr


def test_no_page_is_in_the_navigation_twice() -> None:
    pages = re.findall(r"^ +- [^:\n]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(pages) > 20
    assert sorted(pages) == sorted(set(pages))
