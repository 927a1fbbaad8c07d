"""Known vulnerabilities of the installed packages, by pip-audit: shown, and no reason to fail, since new ones come any day.

What could not be audited is said: pip-audit itself passes over packages that its service does not answer for. Exit code 1
only if pip-audit cannot be run.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

MOST_SECONDS = 300
COMMAND = [
    sys.executable,
    "-m",
    "pip_audit",
    "--local",
    "--skip-editable",
    "--progress-spinner",
    "off",
    "--format",
    "json",
]


def main() -> int:
    try:
        done = subprocess.run(COMMAND, capture_output=True, text=True, check=False, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"dependency audit NOT DONE: the advisory service did not answer within {MOST_SECONDS} s")
        return 0
    print(*told(done.stdout, done.stderr), sep="\n", flush=True)
    return 1 if "No module named pip_audit" in done.stderr else 0


def told(out: str, errors: str) -> Iterator[str]:
    """The lines to print, from the outputs of pip-audit."""
    try:
        packages: list[dict[str, Any]] = json.loads(out)["dependencies"]
    except (ValueError, KeyError, TypeError):
        reason = (errors.strip().splitlines() or ["it said nothing"])[-1]
        yield f"dependency audit NOT DONE: no answer of the advisory service, or of pip-audit: {reason}"
        return
    asked = [package for package in packages if "skip_reason" not in package]
    left_out = [package for package in packages if "skip_reason" in package]
    if not asked:
        reason = left_out[0]["skip_reason"] if left_out else "no package was found"
        yield f"dependency audit NOT DONE: the advisory service knows none of {len(packages)} packages ({reason})"
        return
    found = [(package, vulnerability) for package in asked for vulnerability in package["vulns"]]
    yield f"dependency audit: {len(asked)} of {len(packages)} packages, {len(found)} known vulnerabilities"
    for package, vulnerability in found:
        fixed = ", ".join(vulnerability["fix_versions"]) or "no version yet"
        yield f"  {package['name']} {package['version']}: {vulnerability['id']}, fixed in {fixed}"
    if left_out:
        yield f"  not audited: {', '.join(package['name'] for package in left_out)}"


if __name__ == "__main__":
    sys.exit(main())
