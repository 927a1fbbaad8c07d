"""What must never be written or printed: how to see it, and how to take it out of a text."""

import re

_SECRET_NAME = re.compile(r"(.*_)?(TOKEN|PASSWORD|PASSWD|SECRET|API_?KEY|ACCESS_KEY)(_.*)?", re.IGNORECASE)
_USER = re.compile(
    r"(?<=://)(?:[^/\s\"']*@"  # user:password@, user@
    r"|[^/\s\"'@:]*:(?!\d+/)[^\s\"'@]*@)"  # databases take a "/" in a password; digits and "/" are a port
)
_QUERY = re.compile(r"([?&](?:password|passwd|pwd|token|api_key|secret)=)[^&\s\"'#]*", re.IGNORECASE)


def without_credentials(text: str) -> str:
    """`text` with user:password@ removed from addresses and passwords in their queries replaced."""
    return _QUERY.sub(r"\1***", _USER.sub("", text))


def is_secret_name(name: str) -> bool:
    """Whether the variable of this name likely holds a secret: HF_TOKEN, MLFLOW_TRACKING_PASSWORD."""
    return _SECRET_NAME.fullmatch(name) is not None


def shown_override(override: str) -> str:
    """A `section.key=value` as messages may repeat it: no environment variables, no address with a user in it."""
    has_user = "://" in override and "@" in override
    if not has_user and "environment" not in override and without_credentials(override) == override:
        return override
    key = override.partition("=")[0]
    return f"{key}=***" if re.fullmatch(r"[\w.]+", key) else "***"
