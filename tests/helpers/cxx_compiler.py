"""The C++ compiler that torch's own needs."""

import os
import shutil

import pytest

needs_compiler = pytest.mark.skipif(
    not os.environ.get("DIST_TRANSFORMER_REQUIRE_SERVICES") and shutil.which("g++") is None,
    reason="no C++ compiler here: apt-get install g++",
)
