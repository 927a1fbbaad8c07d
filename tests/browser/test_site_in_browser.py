"""The documentation site in a real Chromium."""

import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import DESKTOP, PHONE, keep_picture, opened

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted(path.stem for path in (REPOSITORY / "docs").glob("*.md"))


@pytest.fixture(scope="module")
def site_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    subprocess.run(build, cwd=REPOSITORY, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_site_fits_the_window_and_asks_no_other_server(
    browser: Any, site_address: str, size: dict[str, int]
) -> None:
    with opened(browser, site_address + "index.html", size) as page:
        others: list[str] = []
        page.on(
            "request", lambda r: None if r.url.startswith((site_address, "data:", "blob:")) else others.append(r.url)
        )
        for name in ("index", *PAGES) if size == PHONE else ("index", "tutorial"):
            page.goto(f"{site_address}{name}.html")
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), name
            assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)"), name
        assert others == []
        page.goto(f"{site_address}settings.html")
        keep_picture(page, f"site_{'phone' if size == PHONE else 'desktop'}")


def test_the_search_finds_a_page(browser: Any, site_address: str) -> None:
    with opened(browser, site_address + "index.html") as page:
        page.wait_for_function("document.querySelector('.md-search-result__meta').textContent.includes('Type')")
        page.keyboard.press("/")
        page.keyboard.type("profiling")
        page.wait_for_selector(".md-search-result__item a[href*='profiling.html']", state="attached")
