"""The site builds without a warning, and a browser shows its pages as they are meant."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import NAMES, Tab, find_chromium, opened
from pages import ROOT, page

pytest.importorskip("mkdocs")

DOCS = ROOT / "docs"
FORMULAS = {  # of each page but the first, in display
    path.relative_to(DOCS).with_suffix("").as_posix(): path.read_text(encoding="utf-8").count("```math\n")
    for path in DOCS.rglob("*.md")
    if path != DOCS / "index.md"
}
PUBLISHED = {
    "SITE_URL": "https://example.org/mtagen/",
    "REPO_URL": "https://example.org/you/mtagen",
    "EDIT_URI": "edit/main/docs/",
}
WIDTHS = 1280, 390  # of a small laptop and of a telephone, in CSS pixels

# Elements of a page's text that are cut off: no element around them scrolls to show the rest.
CUT_OFF = """
[...document.querySelectorAll('.md-content *')]
  .filter(e => !e.closest('mjx-assistive-mml, details:not([open])'))
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1 || e.getBoundingClientRect().left < -1)
  .filter(e => {
    for (let around = e.parentElement; around !== document.body; around = around.parentElement)
      if (/auto|scroll/.test(getComputedStyle(around).overflowX)) return false
    return true
  })
  .map(e => e.outerHTML.slice(0, 100))
"""
# Parts of the pictures drawn by docs/pictures.py that lie outside their view box.
CLIPPED = """
Promise.all([...document.querySelectorAll('.md-content img[src$=".svg"]')].map(async image => {
  const text = await (await fetch(image.src)).text()
  const frame = document.body.appendChild(document.createElement('div'))
  frame.innerHTML = text.slice(text.indexOf('<svg'))
  const box = frame.firstElementChild.getBoundingClientRect()
  const outside = [...frame.querySelectorAll('text, rect, line')].filter(e => !e.closest('defs')).filter(e => {
    const part = e.getBoundingClientRect()
    return part.left < box.left - 1 || part.right > box.right + 1 || part.bottom > box.bottom + 1
  }).map(e => `${image.src}: ${e.outerHTML}`)
  frame.remove()
  return outside
})).then(found => found.flat())
"""
PICTURES = "[...document.querySelectorAll('.md-content img')]"
DARK = """
(() => {
  const light = (element, colour) =>
    Math.max(...getComputedStyle(document.querySelector(element))[colour].match(/[0-9.]+/g).slice(0, 3))
  return light('body', 'backgroundColor') < 80 && light('.md-content', 'color') > 160
})()
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def build(to: Path, **environment: str) -> Path:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(to)]
    inherited = {name: value for name, value in os.environ.items() if name not in PUBLISHED}
    made = subprocess.run(
        command, cwd=ROOT, env=inherited | environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return to


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without a warning: every link leads somewhere, and every docstring is understood."""
    return build(tmp_path_factory.mktemp("built") / "site")


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    chromium = find_chromium()
    if chromium is None:
        pytest.skip(f"no Chromium on PATH: none of {', '.join(NAMES)}")
    with opened(chromium, tmp_path_factory.mktemp("profile")) as tab:
        yield tab


def html(site: Path, name: str) -> str:
    return (site / name / "index.html").read_text(encoding="utf-8")


def test_every_formula_is_marked(site: Path) -> None:
    assert {name: html(site, name).count('<div class="arithmatex">\\[') for name in FORMULAS} == FORMULAS
    assert sum(FORMULAS.values()) >= 30


def test_mathjax_is_loaded_only_for_formulas(site: Path) -> None:
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert ("mathjax/startup.js" in text) == ('class="arithmatex"' in text), path


def test_version_is_shown(site: Path) -> None:
    (version,) = re.findall(r'^__version__ = "(.*)"$', page("mtagen/version.py"), flags=re.MULTILINE)
    assert f"<title>mtagen {version}</title>" in html(site, ".")


def test_published_pages_link_to_the_repository(tmp_path: Path) -> None:
    site = build(tmp_path / "site", **PUBLISHED)
    for name, source in {"kernels": "docs/kernels.md", "source/SECURITY": "SECURITY.md"}.items():
        assert f'href="https://example.org/you/mtagen/edit/main/{source}"' in html(site, name)
        assert f'<link rel="canonical" href="https://example.org/mtagen/{name}/">' in html(site, name)


def test_pages_in_a_browser(site: Path, address: str, tab: Tab) -> None:
    """Pages of the navigation: nothing fails, is fetched from elsewhere, is cut off, or stays light in the dark."""
    names = sorted(set(re.findall(r'<a href="([^":#]*)" class="md-nav__link', html(site, "."))))
    assert len(names) > 20
    faults = [f"{name}: {fault}" for name in names for fault in look(tab, address, name.removeprefix("./"))]
    assert not faults, "\n".join(faults)


def look(tab: Tab, address: str, name: str) -> Iterator[str]:
    """Open a page and yield what is wrong with it."""
    tab.show(WIDTHS[0])
    tab.open(address + name)
    if formulas := FORMULAS.get(name.rstrip("/")):
        assert tab.wait("!!window.MathJax?.startup?.promise"), "MathJax is not loaded"
        tab.evaluate("MathJax.startup.promise.then(() => document.fonts.ready).then(() => 0)")
        shown = tab.evaluate("document.querySelectorAll('.arithmatex > mjx-container[display]').length")
        if shown != formulas:
            yield f"{shown} of {formulas} formulas are typeset"
        if faults := tab.evaluate("[...document.querySelectorAll('mjx-merror')].map(e => e.textContent)"):
            yield f"not understood: {faults}"
    tab.evaluate(f"Promise.all({PICTURES}.map(image => image.decode())).then(() => 0)")
    for width in WIDTHS:
        tab.show(width)
        if (found := tab.evaluate("document.documentElement.scrollWidth")) > width:
            yield f"{found} pixels wide in a window of {width}"
        yield from (f"cut off at {width} pixels: {element}" for element in tab.evaluate(CUT_OFF))
    yield from (f"clipped: {part}" for part in tab.evaluate(CLIPPED))
    if tab.evaluate(f"{PICTURES}.some(image => image.closest('a')?.href !== image.src)"):
        yield "a picture does not open on a click"
    tab.show(WIDTHS[-1], dark=True)
    if not tab.wait(DARK, seconds=5):
        yield "not dark where the system prefers it"
    yield from complaints(tab, address)


def complaints(tab: Tab, address: str) -> Iterator[str]:
    """What the browser reported of a page: errors in its console, and requests to other hosts."""
    for event in tab.events:
        match event:
            case {"method": "Network.requestWillBeSent", "params": {"request": {"url": str(url)}}}:
                if not url.startswith((address, "data:")):
                    yield f"requests {url}"
            case {"method": "Runtime.exceptionThrown", "params": {"exceptionDetails": details}}:
                yield f"throws {details}"
            case {"method": "Runtime.consoleAPICalled", "params": {"type": "error", "args": arguments}}:
                yield f"logs {arguments}"
            case {"method": "Log.entryAdded", "params": {"entry": {"level": "error"} as entry}}:
                yield f"logs {entry['text']} {entry.get('url', '')}"
