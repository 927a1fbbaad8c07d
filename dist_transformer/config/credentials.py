"""What must never be written or printed: how to see it, and how to take it out of a text."""

import os
import re

_SECRET_NAME = re.compile(r"(.*_)?(TOKEN|PASSWORD|PASSWD|SECRET|API_?KEY|ACCESS_KEY)(_.*)?", re.IGNORECASE)
_USER = re.compile(
    r"(?<=://)(?:[^/\s\"']*@"  # user:password@, user@
    r"|[^/\s\"'@:]*:(?!\d+/)[^\s\"'@]*@)"  # databases take a "/" in a password; digits and "/" are a port
)
_PRESIGNED = "X-Amz-Signature|X-Amz-Credential|X-Amz-Security-Token|X-Goog-Signature|sig"
"""What makes an address of S3, Google or Azure a key to the file it names."""
_QUERY = re.compile(rf"([?&](?:password|passwd|pwd|token|api_key|secret|{_PRESIGNED})=)[^&\s\"'#]*", re.IGNORECASE)

_HEADER = re.compile(r"\b(Basic|Bearer) [\w.~+/=-]{6,}")
_PASSWORD_OF_ADDRESS = re.compile(r"://[^/:\s]*:([^\s]+)@")
_SHORTEST_SECRET = 6
"""A shorter value is no secret worth the name, and would be found in words that mean something else."""


def without_secrets(text: str) -> str:
    """For what others say, as servers do in errors: `without_credentials`, and without the secrets of the environment."""
    values = [value for name, value in os.environ.items() if is_secret_name(name)]
    values += [password for value in os.environ.values() for password in _PASSWORD_OF_ADDRESS.findall(value)]
    text = without_credentials(text)
    for value in sorted(values, key=len, reverse=True):  # one may be part of another
        if len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "***")
    return _HEADER.sub(r"\1 ***", text)


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
