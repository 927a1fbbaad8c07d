"""A filter that keeps a pair if both sides have the same numbers: 7 and 30 of "at 7:30", whatever stands between them.

data: {filters: {plugin: "examples/keep_numbers.py:keep"}}
"""

import re


def keep(source: str, target: str) -> bool:
    """True if the pair is kept."""
    return sorted(re.findall(r"\d+", source)) == sorted(re.findall(r"\d+", target))
