"""MkDocs hook: add files outside docs/ to the site, and rewrite links so that they work in both places.

Pages link to other files by paths in the repository, which a Git host follows. On the site docs/ is the root, and the
files outside it that pages link to are pages, too: Markdown as it is, examples as a code block.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
RESULTS = "benchmarks/results"
LIST = f"{RESULTS}/all.md"
LINK = re.compile(r"(\]\()(?!\w+:|#|/)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add changes, contributing, benchmark results and examples."""
    results = sorted((ROOT / RESULTS).glob("*.md"))
    for path in (ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *results):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    files.append(File.generated(config, LIST, content=_list(results)))
    for path in sorted((ROOT / "examples").glob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        content = f"# {name}\n\n````python\n{path.read_text(encoding='utf-8')}````\n"
        files.append(File.generated(config, f"{name}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links of a page from paths in the repository to paths on the site."""
    site_path = page.file.src_uri
    if site_path.startswith("examples/") or site_path == LIST:
        return markdown  # written above
    if site_path.startswith(RESULTS):
        page.meta.setdefault("search", {"boost": 0.2})
        markdown = markdown.replace("] [", "] \\[")  # options of a script, not a reference to a link
    in_repository = site_path if page.file.generated_by is not None else f"docs/{site_path}"
    return LINK.sub(lambda link: link[1] + _on_site(link[2], in_repository), markdown)


def _on_site(link: str, in_repository: str) -> str:
    """Return a link of the page at path `in_repository`, relative to that page on the site."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository), link))
    if target == RESULTS:
        target = LIST
    elif target.startswith("examples/"):
        target += ".md"
    return posixpath.relpath(_site_path(target), posixpath.dirname(_site_path(in_repository)) or ".")


def _site_path(in_repository: str) -> str:
    return in_repository.removeprefix("docs/")


def _list(results: list[Path]) -> str:
    lines = ["# Benchmark results", "", "Each page names its machine and the physical limit.", ""]
    for path in results:
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines) + "\n"
