"""The documentation site, built strictly as `make docs` does; tests/browser looks at it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dist_transformer.config.schema import Config

REPOSITORY = Path(__file__).resolve().parents[2]
MKDOCS = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [*MKDOCS, REPOSITORY / "mkdocs.yml", "--site-dir", folder],
        cwd=REPOSITORY, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_the_page_of_settings_is_what_their_definitions_say():
    script = (REPOSITORY / ".ci" / "settings_page.py").read_text(encoding="utf-8")
    names: dict[str, object] = {"__file__": str(REPOSITORY / ".ci" / "settings_page.py"), "__name__": "settings_page"}
    exec(compile(script, "settings_page.py", "exec"), names)
    page = (REPOSITORY / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == names["page"](), "run: python .ci/settings_page.py"  # type: ignore[operator]
    for section, field in Config.model_fields.items():
        for key in field.annotation.model_fields:
            assert f"| `{key}` |" in page, f"{section}.{key}"


@pytest.mark.slow
def test_every_page_of_docs_and_what_it_links_to_is_on_the_site(site):
    for page in (REPOSITORY / "docs").glob("*.md"):
        assert (site / f"{page.stem}.html").is_file()
    assert (site / "index.html").is_file(), "the README is the first page"
    assert (site / "repository" / "configs" / "wmt14_en_de_base.yaml.html").is_file()
    shown = (site / "repository" / "configs" / "wmt14_en_de_base.yaml.html").read_text(encoding="utf-8")
    assert "warmup_steps" in shown
    assert "<code>tok:spaces|smooth:none</code>" in (site / "reproduce.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_link_to_nothing_fails_the_build(tmp_path):
    copy = tmp_path / "copy"
    (copy / "docs").mkdir(parents=True)
    (copy / ".ci").mkdir()
    for name in ("mkdocs.yml", ".ci/site_hooks.py"):
        (copy / name).write_text((REPOSITORY / name).read_text(encoding="utf-8"), encoding="utf-8")
    (copy / "docs" / "data.md").write_text("# Data\n", encoding="utf-8")
    readme = copy / "README.md"
    for text, ends_well in (("[data](docs/data.md#data)", True), ("[data](docs/date.md)", False),
                            ("[data](docs/data.md#date)", False)):  # fmt: skip
        readme.write_text(f"# First\n\n{text}\n", encoding="utf-8")
        built = subprocess.run([*MKDOCS, copy / "mkdocs.yml"], cwd=copy, capture_output=True, text=True)
        assert (built.returncode == 0) == ends_well, text + built.stderr
