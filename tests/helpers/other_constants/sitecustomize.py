"""Other values of the program's constants in the processes of a test: their own would take minutes, or hours.

Python imports this module when it starts, where the folder is on PYTHONPATH: `running.with_constants` sees to both.
"""

import importlib.machinery
import json
import os
import sys
from types import ModuleType
from typing import Any

VALUES: dict[str, dict[str, Any]] = json.loads(os.environ.get("OTHER_CONSTANTS", "{}"))
"""By module, its constants by name."""


class Finder(importlib.machinery.PathFinder):
    """Finds these modules as ever; what they hold is replaced as soon as they have run, before anybody imports it."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        spec = super().find_spec(name, path, target) if name in VALUES else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_replace(module: ModuleType) -> None:
            run(module)
            assert VALUES[name].keys() <= vars(module).keys(), f"{name} has no such constants: {VALUES[name]}"
            vars(module).update(VALUES[name])

        spec.loader.exec_module = run_and_replace  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder)
