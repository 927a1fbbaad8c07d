"""Pages as a person sees them, and what is kept of the look."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCREENSHOTS = "DIST_TRANSFORMER_SCREENSHOTS"
"""The folder that pictures are written to; none: no pictures. Those of docs/ are made so:
DIST_TRANSFORMER_SCREENSHOTS=docs/images python -m pytest tests/browser"""

DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
LARGEST_PICTURE_BYTES = 200_000
PATIENCE_MS = 60_000
"""MLflow's pages load piece by piece, and the machine may be busy."""

# MLflow shows its pages for language-model applications unless told otherwise, and opens a chat beside them.
MLFLOW_SETTINGS = """
localStorage.setItem("mlflow.workflowType_v1", '"machine_learning"');
localStorage.setItem("mlflow.assistant.fab.autoOpenedOnFirstLoad_v1", "true");
localStorage.setItem("mlflow.assistant.panelOpen_v1", "false");
"""


@contextmanager
def opened(browser: Any, address: str, size: dict[str, int] = DESKTOP, **options: Any) -> Iterator[Any]:
    """A page at this address; `options` are those of a browser context."""
    context = browser.new_context(viewport=size, **options)
    context.set_default_timeout(PATIENCE_MS)
    context.add_init_script(MLFLOW_SETTINGS if address.startswith("http") else "")
    page = context.new_page()
    try:
        page.goto(address)
        yield page
    finally:
        context.close()


def keep_picture(page: Any, name: str) -> None:
    """Writes NAME.png where pictures are asked for."""
    if os.environ.get(SCREENSHOTS):
        from PIL import Image

        path = Path(os.environ[SCREENSHOTS]) / f"{name}.png"
        page.screenshot(path=path, animations="disabled")
        with Image.open(path) as picture:
            few_colors = picture.convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE, kmeans=2)
            few_colors.save(path, optimize=True)
        assert path.stat().st_size < LARGEST_PICTURE_BYTES
