"""What must never be written or printed: how to see it, and how to take it out of a text."""

import os
import re

_CERTAIN = "TOKEN|PASSW(OR)?D|PASSPHRASE|SSHPASS|SECRETS?|API_?KEY|(ACCESS|ACCOUNT|SHARED|PRIVATE)_KEY|CONNECTION_STRING|WEBHOOK"
_SECRET_NAME = re.compile(rf".*({_CERTAIN})(_.*)?")
_PERHAPS_SECRET_NAME = re.compile(
    r"(.*_)?((?<!PUBLIC_)KEY(_ID|_?\d+)?|AUTH(_CONFIG)?|CREDENTIALS?(_JSON)?|COOKIE|DSN|PASS|PAT|SAS|SHARED_ACCESS_SIGNATURE)|.+_PWD"
)
"""Of keys and the like; a path in such a variable is where the key lies."""
_NAME_OF_A_PLACE = re.compile(r".*_(FILE|PATH|DIR|FOLDER|SOCK|(?<!WEBHOOK_)UR[LI]|ENDPOINT)")
_SWITCH = re.compile(r"\d{0,3}|true|false|yes|no|on|off", re.IGNORECASE)

_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(gh[opsur]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{16,}|npm_[A-Za-z0-9]{16,}"
    r"|sk-((proj|ant|or|svcacct|admin)-[\w-]{16,}|[A-Za-z0-9]{20,})|nvapi-[\w-]{16,}|pypi-[\w-]{16,}|dckr_pat_[\w-]{16,}"
    r"|dapi[0-9a-f]{32}|(AKIA|ASIA)[0-9A-Z]{16}|xox[a-z]-[\w-]{10,}|AIza[\w-]{30,}|ya29\.[\w-]{16,}|SG\.[\w-]{16,}\.[\w-]+"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|-----BEGIN [A-Z ]*PRIVATE KEY-----)"
)
"""Beginnings that services give their tokens so that they are found where they should not be."""
_USER = re.compile(
    r"(?<=://)(?:[^/\s\"']*@"  # user:password@, user@
    r"|[^/\s\"'@:]*:(?!\d+/)[^\s\"'@]*@)"  # databases take a "/" in a password; digits and "/" are a port
)
_USER_WITHOUT_PASSWORD = re.compile(r"(?<=://)[^/@:\s]+:?@")
_PRESIGNED = re.compile(
    r"X-Amz-Signature|X-Amz-Credential|X-Amz-Security-Token|X-Goog-Signature|sig|pwd", re.IGNORECASE
)
"""What makes an address of S3, Google or Azure a key to the file it names."""
_QUERY = re.compile(r"([?&]([\w.-]+)=)[^&\s\"'#]*")
_GIVEN = re.compile(
    r"(?:(?<![\w$?&])([A-Za-z_][\w-]*)=|--([A-Za-z][\w-]*)[ \t]+(?!-)|\bsetenv[ \t]+(\w+)[ \t]+)(?=[\"']?([^\s;&|,\"']*))"
)
"""NAME=value, --name value and setenv NAME value of shell lines and options."""
_REFERENCE = re.compile(r"\$\([^()]*\)|`[^`]*`|\$\{[^}]*\}|\$\w+")
"""What a shell puts in from elsewhere."""

_HEADER = re.compile(r"\b(Basic|Bearer) [\w.~+/=-]{6,}")
_AUTHORIZATION = re.compile(r"Authorization[:=]\s*\w+ [^\s\"']{6,}", re.IGNORECASE)
_PASSWORD_OF_ADDRESS = re.compile(r"://[^/:\s]*:([^\s]+)@")
_SHORTEST_SECRET = 6
"""A shorter value is no secret worth the name, and would be found in words that mean something else."""


def without_secrets(text: str) -> str:
    """For what others say, as servers do in errors: `without_credentials`, and without the secrets of the environment."""
    values = [value for name, value in os.environ.items() if is_secret(name, value)]
    values += [password for value in os.environ.values() for password in _PASSWORD_OF_ADDRESS.findall(value)]
    text = without_credentials(text)
    for value in sorted(values, key=len, reverse=True):  # one may be part of another
        if len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "***")
    return _HEADER.sub(r"\1 ***", text)


def without_credentials(text: str) -> str:
    """`text` with user:password@ removed from addresses, and passwords in their queries and known tokens replaced."""
    return _TOKEN.sub("***", _QUERY.sub(_without_value, _USER.sub("", text)))


def is_secret_name(name: str) -> bool:
    """Whether the variable of this name likely holds a secret: HF_TOKEN, PGPASSWORD, AZURE_STORAGE_KEY, accessToken."""
    words = _in_capitals(name)
    if _NAME_OF_A_PLACE.fullmatch(words):
        return False
    return bool(_SECRET_NAME.fullmatch(words) or _PERHAPS_SECRET_NAME.fullmatch(words))


def is_secret(name: str, value: str) -> bool:
    """Whether this value of a variable is likely a secret: no number or path in place of one."""
    if not is_secret_name(name) or _SWITCH.fullmatch(value):
        return False
    words = _in_capitals(name)
    if not _SECRET_NAME.fullmatch(words):
        return not value.startswith(("/", "~", "./"))
    return not (value.isdecimal() and "TOKEN" in words)  # a number of them


def holds_secret(text: str) -> bool:
    """Whether a text, such as a shell line, an option or an address, has a password, token or key written out in it."""
    given = _REFERENCE.sub("", text)
    address = _USER_WITHOUT_PASSWORD.sub("", given)
    return (
        _TOKEN.search(text) is not None
        or without_credentials(address) != address
        or _AUTHORIZATION.search(given) is not None
        or any(is_secret(m[1] or m[2] or m[3], m[4]) for m in _GIVEN.finditer(given))
    )


def shown_override(override: str) -> str:
    """A `section.key=value` as messages may repeat it: no variables or lines of a job, no address with a user in it."""
    has_user = "://" in override and "@" in override
    if not has_user and not re.search("environment|setup|export", override) and not holds_secret(override):
        return override
    key = override.partition("=")[0]
    return f"{key}=***" if re.fullmatch(r"[\w.]+", key) else "***"


def _in_capitals(name: str) -> str:
    """accessToken, access-token -> ACCESS_TOKEN"""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-.]", "_", name).upper()


def _without_value(match: re.Match[str]) -> str:
    name = match[2]
    is_key = _PRESIGNED.fullmatch(name) or (is_secret_name(name) and name.lower() != "key")  # ?key= is often an id
    return f"{match[1]}***" if is_key else match[0]
