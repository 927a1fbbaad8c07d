"""The answer to batch scripts of earlier versions: a queued job keeps its script, but its code may be in a checkout that
was changed since. They call this module, or `requeue`.
"""

import sys

EXIT_STOP = 3
"""With which they end without a requeue."""


def refuse() -> int:
    """Says what to do; returns the exit code."""
    print(
        "the batch script of this job is of an earlier version of dist-transformer than the code in its folder; nothing is "
        "lost: submit the run again, and it resumes from its newest checkpoint",
        file=sys.stderr,
    )
    return EXIT_STOP if sys.argv[1:2] == ["end"] else 2


if __name__ == "__main__":
    sys.exit(refuse())
