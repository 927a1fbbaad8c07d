"""Durations as text."""


def duration(seconds: float | None) -> str:
    """Returns "12 s", "3 min 20 s", "2 h 05 min" or "3 d 4 h"; "-" for None."""
    if seconds is None:
        return "-"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
