"""Writes docs/api.md from the docstrings of the package: python tests/api/api_page.py --write"""

import inspect
import sys
from pathlib import Path

import dist_transformer

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "api.md"
PROGRAM = Path(__file__).with_name("first_run.py")
HEAD = """# From Python

`import dist_transformer` has ten names, with types (`mypy --strict`), that do what the verbs of the command do; errors are
exceptions, each a `UserError` where the user or the machine is the cause (`ConfigError` and `MachineError` are such).
Nothing slow is imported before it is needed. Trains, resumes, translates and reads what a run wrote:

```python
{program}```

A test runs this program and checks its types. This page is made from the docstrings (`tests/api/api_page.py --write`).
"""


def documented(name: str) -> str:
    """The section of one name, with those of its own methods and properties if it is one of our classes."""
    thing = getattr(dist_transformer, name)
    lines = [f"## {name}", "", signature(name, thing), "", text_of(thing)]
    for member, value in vars(thing).items() if name in ("Run", "Translator") else ():
        is_shown = member == "__call__" or not member.startswith("_")
        if is_shown and (function := value.fget if isinstance(value, property) else value):
            shown = f"`{member}`" if isinstance(value, property) else signature(member, function)
            lines += ["", f"### {name}.{member}", "", shown, "", text_of(function)]
    return "\n".join(lines)


def signature(name: str, thing: object) -> str:
    if name in ("Config", "MachineError", "UserError"):
        return f"`class {name}`"
    shown = str(inspect.signature(thing)).replace("pathlib._local.", "").replace("pathlib.", "")  # type: ignore[arg-type]
    for prefix in ("collections.abc.", "typing.", "dist_transformer.config.schema.", "dist_transformer.api."):
        shown = shown.replace(prefix, "")
    return f"```python\n{name}{shown}\n```"


def text_of(thing: object) -> str:
    """The docstring; the lists of arguments and errors in Google's form become lists of markdown."""
    lines = []
    for line in (inspect.getdoc(thing) or "").splitlines():
        is_heading = line in ("Args:", "Raises:", "Returns:", "Attributes:")
        lines += ["", line, ""] if is_heading else [f"- {line[4:]}" if line[:4] == "    " != line[4:8] else line]
    return "\n".join(lines)


def page() -> str:
    program = PROGRAM.read_text(encoding="utf-8").partition("\n\n")[2]
    sections = [HEAD.format(program=program), *map(documented, dist_transformer.__all__)]
    return "\n\n".join(section.strip() for section in sections) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page())
