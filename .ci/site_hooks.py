"""Hooks of mkdocs: pages that work on GitHub work on the site.

README.md becomes the first page. A page may link to anything in the repository: a Markdown file outside docs/ becomes a
page below repository/, a source file a page that shows it, a folder a page that lists it, a picture is copied. A link
to nothing is left as it is, so that the strict build fails.
"""

import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

UNSEARCHED = "---\nsearch: {exclude: true}\n---\n\n"
REPOSITORY = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)\s#]+)([^)]*\))")
PICTURES = (".png", ".svg", ".jpg")
FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".sbatch": "bash", ".toml": "toml", ".json": "json"}


def page_of(path: str) -> str:
    """The site's source name of a file or folder of the repository."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (REPOSITORY / path).is_dir():
        return f"repository/{path}/" + ("README.md" if (REPOSITORY / path / "README.md").exists() else "index.md")
    return f"repository/{path}" + ("" if path.endswith((".md", *PICTURES)) else ".md")


def with_links(text: str, path: str, replaced: Callable[[str, str], str]) -> str:
    """The text of a repository's file, each relative link outside code replaced; the second argument is its target."""

    def replace(match: re.Match[str]) -> str:
        opening, link, rest = match.groups()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
        known = "://" not in link and not link.startswith("mailto:") and (REPOSITORY / target).exists()
        return f"{opening}{replaced(link, target)}{rest}" if known else match.group(0)

    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(replace, text[end : fence.start()]), fence.group(0)]
        end = fence.end()
    return "".join([*parts, LINK.sub(replace, text[end:])])


def site_text(path: str) -> str:
    """The Markdown of a page with links between pages of the site."""
    here = posixpath.dirname(page_of(path))
    text = (REPOSITORY / path).read_text(encoding="utf-8")
    return with_links(text, path, lambda _, target: posixpath.relpath(page_of(target), here or "."))


def listing(path: str) -> str:
    """A page that lists a folder without a README."""
    names = sorted(p.name for p in (REPOSITORY / path).iterdir() if p.name[0] not in "._")
    return f"{UNSEARCHED}# {path}\n\n" + "".join(f"- `{name}`\n" for name in names)


def source(path: str) -> str:
    """A page that shows a source file."""
    text = (REPOSITORY / path).read_text(encoding="utf-8")
    fence = "`" * 8
    return f"{UNSEARCHED}# {path}\n\n{fence}{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}\n{fence}\n"


def on_config(config: Any) -> Any:
    """Leaves pages out of the navigation that are not there."""

    def there(page: str) -> bool:
        folder = REPOSITORY if page.startswith("repository/") else REPOSITORY / "docs"
        return page == "index.md" or (folder / page.removeprefix("repository/")).exists()

    config["nav"] = [{title: [p for p in pages if there(p)] for title, pages in part.items()} for part in config["nav"]]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds what pages reach by links, and what is reached from there."""
    named = [p.removeprefix("repository/") for part in config["nav"] for pages in part.values() for p in pages]
    todo = ["README.md", *(p for p in named if (REPOSITORY / p).exists())]
    todo += [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    done: set[str] = set()
    while todo:
        path = todo.pop()
        page = page_of(path)
        if page in done:
            continue
        done.add(page)
        whole = REPOSITORY / path
        if whole.is_dir() and page.endswith("README.md"):
            todo.append(f"{path}/README.md")
            done.discard(page)
            continue
        if path.endswith(".md") and whole.is_file():
            with_links(whole.read_text(encoding="utf-8"), path, lambda link, target: (todo.append(target), link)[1])
        if path.startswith("docs/"):
            continue
        if page.endswith(PICTURES):
            files.append(File.generated(config, page, abs_src_path=os.fspath(whole)))
        else:
            text = listing(path) if whole.is_dir() else site_text(path) if path.endswith(".md") else source(path)
            files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns the links of the pages of docs/ into links of the site; the others are written so."""
    path = f"docs/{page.file.src_uri}"
    return site_text(path) if (REPOSITORY / path).is_file() else markdown


def on_page_content(html: str, **_: Any) -> str:
    """Shows a pipe in the code of a table as one: GitHub wants it with a backslash, which Python-Markdown keeps."""
    return re.sub(r"<td.*?</td>", lambda cell: cell.group(0).replace("\\|", "|"), html, flags=re.DOTALL)
