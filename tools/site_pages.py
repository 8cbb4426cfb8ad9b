"""For mkdocs: the pages of the site are the Markdown files of the repository, at the places where they are there.

So a link from docs/guide.md to ../examples/sessions.py is the same link on the site as in the repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parent.parent
#: Pages, and the files that they link to.
PATTERNS = (
    "*.md",
    "LICENSE",
    "benchmarks/*.md",
    "docs/**/*.md",
    "docs/pictures/*.svg",
    "examples/*.md",
    "examples/*.py",
)


def site_files() -> list[str]:
    return sorted({path.relative_to(ROOT).as_posix() for pattern in PATTERNS for path in ROOT.glob(pattern)})


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    docs = Path(config.docs_dir)
    for file in list(files):
        if file.abs_src_path is not None and Path(file.abs_src_path).is_relative_to(docs):
            files.remove(file)
    for name in site_files():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files
