"""What CI says of the packages' known vulnerabilities, and of an audit that was none."""

import importlib.util
import json
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / ".ci" / "audit_dependencies.py"


def lines(out: object, errors: str = "") -> list[str]:
    spec = importlib.util.spec_from_file_location("audit_dependencies", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [*module.told(out if isinstance(out, str) else json.dumps({"dependencies": out}), errors)]


def test_vulnerabilities_are_shown_with_the_version_that_is_without_them():
    found = [{"id": "PYSEC-1", "fix_versions": ["1.1", "2.0"]}, {"id": "GHSA-x", "fix_versions": []}]
    packages = [{"name": "a", "version": "1.0", "vulns": found}, {"name": "b", "version": "3", "vulns": []}]
    assert lines(packages) == [
        "dependency audit: 2 of 2 packages, 2 known vulnerabilities",
        "  a 1.0: PYSEC-1, fixed in 1.1, 2.0",
        "  a 1.0: GHSA-x, fixed in no version yet",
    ]


def test_packages_that_the_service_does_not_know_are_named():
    packages = [{"name": "a", "version": "1.0", "vulns": []}, {"name": "b", "skip_reason": "not found"}]
    assert lines(packages) == ["dependency audit: 1 of 2 packages, 0 known vulnerabilities", "  not audited: b"]


def test_an_audit_of_nothing_is_not_shown_as_one():
    assert lines([{"name": "a", "skip_reason": "not found on PyPI"}] * 2) == [
        "dependency audit NOT DONE: the advisory service knows none of 2 packages (not found on PyPI)"
    ]
    for out, errors, reason in [
        ("", "Traceback\nConnectionError: no host", "ConnectionError: no host"),
        ("[]", "", "it said nothing"),
        ("{}", "", "it said nothing"),
    ]:
        (line,) = lines(out, errors)
        assert line.startswith("dependency audit NOT DONE: ")
        assert line.endswith(reason)
