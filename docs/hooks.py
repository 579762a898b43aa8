"""Hooks of MkDocs that make pages of the files outside docs/ that pages link to.

There is no address where the repository can be read, so the site holds what it cites: a Markdown file becomes a page,
a source file a page with its text, a folder a list of its files, and anything else is copied. All of these lie under
``source/`` with the paths they have in the repository, and links in the site's pages are turned to them. So links may
be written as they work in a checkout, and ``mkdocs build --strict`` checks that each leads somewhere.
"""

from __future__ import annotations

import ast
import posixpath
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parent.parent
PREFIX = "source/"
LANGUAGES = {
    ".py": "python",
    ".cu": "cuda",
    ".cuh": "cuda",
    ".j2": "jinja",
    ".sh": "bash",
    ".toml": "toml",
    ".txt": "text",
}
_FENCE = re.compile(r"^(```+)[^\n]*\n.*?^\1[ \t]*$", flags=re.MULTILINE | re.DOTALL)
_IMAGE = re.compile(r'(<img [^>]*src="([^"]*)"[^>]*>)')
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show the package's version beside its name."""
    version = runpy.run_path(str(ROOT / "mtagen" / "version.py"))["__version__"]
    config.site_name = f"{config.site_name} {version}"
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages of all files that are cited, by pages of docs/, by the navigation or by other such files."""
    queue = [*_cited_by_navigation(config.nav)]
    for file in files.documentation_pages():
        queue += _cited(f"docs/{file.src_uri}")
    while queue:
        path = _readme(queue.pop())
        if files.get_file_from_path(_uri(path)) is None:
            files.append(_file(path, config))
            queue += _cited(path)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the repository to the site's pages of them."""
    at = page.file.src_uri

    def turn(link: re.Match[str]) -> str:
        path = _path(link[1], _origin(at))
        if path is None:
            return link[0]
        path = _readme(path)
        to = path.removeprefix("docs/") if _is_of_docs(path) else _uri(path)
        return posixpath.relpath(to, posixpath.dirname(at) or ".") + (link[2] or "")

    return _outside_fences(markdown, lambda text: _LINK.sub(turn, text))


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make each picture a link to itself, and load MathJax on pages with formulas."""
    html = _IMAGE.sub(r'<a class="picture" href="\2">\1</a>', html)
    if 'class="arithmatex"' in html:
        sources = (get_relative_url(name, page.url) for name in ("mathjax.js", "mathjax/startup.js"))
        html += "".join(f'<script defer src="{source}"></script>' for source in sources)
    return html


def _cited_by_navigation(nav: Any) -> Iterator[str]:
    """Paths in the repository that the navigation names by their pages."""
    if isinstance(nav, str):
        if nav.startswith(PREFIX):
            yield nav.removeprefix(PREFIX)
    else:
        for item in nav.values() if isinstance(nav, dict) else nav or ():
            yield from _cited_by_navigation(item)


def _cited(path: str) -> list[str]:
    """Files outside docs/ that a page of a file links to."""
    if (ROOT / path).is_dir():
        return [f"{path}/{name}" for name in _listed(path)]
    if not path.endswith(".md"):
        return []
    found: list[str] = []

    def collect(text: str) -> str:
        found.extend(filter(None, (_path(link[1], path) for link in _LINK.finditer(text))))
        return text

    _outside_fences((ROOT / path).read_text(encoding="utf-8"), collect)
    return [one for one in found if not _is_of_docs(one)]


def _outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """Markdown changed everywhere but in fenced blocks."""
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


def _path(link: str, origin: str) -> str | None:
    """Where in the repository a link of the file ``origin`` leads; None: to another site, or nowhere."""
    if ":" in link:
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))
    return path if not path.startswith("..") and (ROOT / path).exists() else None


def _is_of_docs(path: str) -> bool:
    """Whether MkDocs knows a file without these hooks: all in docs/ but these modules."""
    return path.startswith("docs/") and not path.endswith(".py")


def _origin(uri: str) -> str:
    """The path in the repository of what a page shows."""
    return uri.removeprefix(PREFIX) if uri.startswith(PREFIX) else f"docs/{uri}"


def _readme(path: str) -> str:
    """The README of a folder that has one, in place of a list of its files."""
    readme = f"{path}/README.md"
    return readme if (ROOT / readme).exists() else path


def _uri(path: str) -> str:
    """The page of a file or folder of the repository, or its copy."""
    if (ROOT / path).is_dir():
        return f"{PREFIX}{path}/index.md"
    return f"{PREFIX}{path}.md" if Path(path).suffix in LANGUAGES else PREFIX + path


def _file(path: str, config: MkDocsConfig) -> File:
    """The page of a file or folder of the repository, or its copy."""
    uri, source = _uri(path), ROOT / path
    if source.is_dir():
        return File.generated(config, uri, content=_list(path))
    if source.suffix in LANGUAGES:
        made = File.generated(config, uri, content=_show(path))
    else:
        made = File.generated(config, uri, abs_src_path=str(source))
    made.edit_uri = f"../{path}"  # from docs/
    return made


def _show(path: str) -> str:
    """A page with the text of a source file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    fence = "`" * 6
    body = f"{fence} {{.{LANGUAGES[Path(path).suffix]} linenums=1}}\n{text.rstrip()}\n{fence}\n"
    return f"{_HIDDEN}# `{path}`\n\n{body}"


def _list(path: str) -> str:
    """A page that lists what a folder holds, with what modules say of themselves."""
    lines = [f"| [`{name}`]({name}) | {_summary(ROOT / path / name)} |" for name in _listed(path)]
    return f"{_HIDDEN}# `{path}/`\n\n| | |\n|---|---|\n" + "\n".join(lines) + "\n"


def _listed(path: str) -> list[str]:
    """Names of a folder's files and folders, less what tools leave there."""
    return sorted(one.name for one in (ROOT / path).iterdir() if not one.name.startswith((".", "__pycache__")))


def _summary(module: Path) -> str:
    """The first line of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) if module.suffix == ".py" else None
    return docstring.splitlines()[0].replace("|", "&#124;") if docstring else ""


_HIDDEN = "---\nsearch:\n  exclude: true\nhide: [toc]\n---\n\n"  # from the search
