"""Recognition of credentials, which must never be written or printed: they are removed from texts, and refused in a
configuration, which is written into run folders, batch scripts and MLflow. A job gets its secrets from the environment of
the submitting shell, which Slurm keeps over requeues.
"""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dist_transformer.config.schema import TrackingConfig
from dist_transformer.config.section import Section
from dist_transformer.config.yaml_positions import KeyPath, dotted
from dist_transformer.errors import UserError

ADDRESS_VARIABLE = "MLFLOW_TRACKING_URI"
"""Variable of MLflow with the address of its server, where `tracking.uri` has none."""

_CERTAIN = "TOKEN|PASSW(OR)?D|PASSPHRASE|SSHPASS|SECRETS?|API_?KEY|(ACCESS|ACCOUNT|SHARED|PRIVATE)_KEY|CONNECTION_STRING|WEBHOOK"
_SECRET_NAME = re.compile(rf".*({_CERTAIN})(_.*)?")
_PERHAPS_SECRET_NAME = re.compile(
    r"(.*_)?((?<!PUBLIC_)KEY(_ID|_?\d+)?|AUTH(_CONFIG)?|CREDENTIALS?(_JSON)?|COOKIE|DSN|PASS|PAT|SAS|SHARED_ACCESS_SIGNATURE)|.+_PWD"
)
"""Names of variables with a key or similar; a path as the value is the location of the key, and no secret."""
_NAME_OF_A_PLACE = re.compile(r".*_(FILE|PATH|DIR|FOLDER|SOCK|(?<!WEBHOOK_)UR[LI]|ENDPOINT)")
_SWITCH = re.compile(r"\d{0,3}|true|false|yes|no|on|off", re.IGNORECASE)

_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(gh[opsur]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{16,}|npm_[A-Za-z0-9]{16,}"
    r"|sk-((proj|ant|or|svcacct|admin)-[\w-]{16,}|[A-Za-z0-9]{20,})|nvapi-[\w-]{16,}|pypi-[\w-]{16,}|dckr_pat_[\w-]{16,}"
    r"|dapi[0-9a-f]{32}|(AKIA|ASIA)[0-9A-Z]{16}|xox[a-z]-[\w-]{10,}|AIza[\w-]{30,}|ya29\.[\w-]{16,}|SG\.[\w-]{16,}\.[\w-]+"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|-----BEGIN [A-Z ]*PRIVATE KEY-----)"
)
"""Tokens with the prefixes that services give them so that leaked ones are found."""
_USER = re.compile(
    r"(?<=://)(?:[^/\s\"']*@"  # user:password@, user@
    r"|[^/\s\"'@:]*:(?!\d+/)[^\s\"'@]*@)"  # databases take a "/" in a password; digits and "/" are a port
)
_USER_WITHOUT_PASSWORD = re.compile(r"(?<=://)[^/@:\s]+:?@")
_PRESIGNED = re.compile(r"X-Amz-(Signature|Credential|Security-Token)|X-Goog-Signature|sig|pwd", re.IGNORECASE)
"""Query parameters that make an address of S3, Google or Azure a key to the file it names."""
_QUERY = re.compile(r"([?&]([\w.-]+)=)[^&\s\"'#]*")
_GIVEN = re.compile(
    r"(?:(?<![\w$?&])([A-Za-z_][\w-]*)=|--([A-Za-z][\w-]*)[ \t]+(?!-)|\bsetenv[ \t]+(\w+)[ \t]+)(?=[\"']?([^\s;&|,\"']*))"
)
"""NAME=value, --name value and setenv NAME value of shell lines and options."""
_REFERENCE = re.compile(r"\$\([^()]*\)|`[^`]*`|\$\{[^}]*\}|\$\w+")
"""Substitutions of a shell, whose values are not in the text."""

_HEADER = re.compile(r"\b(Basic|Bearer) [\w.~+/=-]{6,}")
_AUTHORIZATION = re.compile(r"Authorization[:=]\s*\w+ [^\s\"']{6,}", re.IGNORECASE)
_PASSWORD_OF_ADDRESS = re.compile(r"://[^/:\s]*:([^\s]+)@")
_SHORTEST_SECRET = 6
"""Minimum length of a secret: a shorter value would also match parts of other words."""
_CHECKED_APART = ("tracking", "uri")
"""Key with a check of its own, which also refuses a user without a password."""
_REMEDY_OF_A_JOB = (
    "looks like a secret, and would be written into the run folder; remove it here and `export` it in the shell that calls "
    "train or submit: the job inherits it, also when it is requeued"
)
_REMEDY = (
    "holds a password or token, and would be written into the run folder; give it to the filesystem by its own files or "
    "variables (~/.aws/credentials, HF_TOKEN, FSSPEC_<PROTOCOL>_<OPTION>) and remove it here"
)


def without_secrets(text: str) -> str:
    """Removes credentials, and the secrets of the environment, from foreign texts such as error messages of servers."""
    values = [value for name, value in os.environ.items() if is_secret(name, value)]
    values += [password for value in os.environ.values() for password in _PASSWORD_OF_ADDRESS.findall(value)]
    text = without_credentials(text)
    for value in sorted(values, key=len, reverse=True):  # one may be part of another
        if len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "***")
    return _HEADER.sub(r"\1 ***", text)


def without_credentials(text: str) -> str:
    """Removes user:password@ from addresses, and replaces passwords in their queries and known tokens."""
    return _TOKEN.sub("***", _QUERY.sub(_without_value, _USER.sub("", text)))


def cleaned(value: Any) -> Any:
    """Returns a value of any depth, such as settings, each text in it without credentials."""
    if isinstance(value, Mapping):
        return {key: cleaned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [cleaned(item) for item in value]
    return without_credentials(value) if isinstance(value, str) else value


def is_secret_name(name: str) -> bool:
    """True if the variable of this name likely holds a secret: HF_TOKEN, PGPASSWORD, AZURE_STORAGE_KEY, accessToken."""
    words = _in_capitals(name)
    if _NAME_OF_A_PLACE.fullmatch(words):
        return False
    return bool(_SECRET_NAME.fullmatch(words) or _PERHAPS_SECRET_NAME.fullmatch(words))


def is_secret(name: str, value: str) -> bool:
    """True if this value of a variable is likely a secret, and not a number, a switch or a path."""
    if not is_secret_name(name) or _SWITCH.fullmatch(value):
        return False
    words = _in_capitals(name)
    if not _SECRET_NAME.fullmatch(words):
        return not value.startswith(("/", "~", "./"))
    return not (value.isdecimal() and "TOKEN" in words)  # a number of tokens


def holds_secret(text: str) -> bool:
    """True if a text, such as a shell line, an option or an address, contains a password, token or key in clear."""
    given = _REFERENCE.sub("", text)
    address = _USER_WITHOUT_PASSWORD.sub("", given)
    return (
        _TOKEN.search(text) is not None
        or without_credentials(address) != address
        or _AUTHORIZATION.search(given) is not None
        or any(is_secret(m[1] or m[2] or m[3], m[4]) for m in _GIVEN.finditer(given))
    )


def shown_override(override: str) -> str:
    """Returns a `section.key=value` for messages, its value hidden if it is a variable or line of a job, an address
    with a user, or holds a secret."""
    has_user = "://" in override and "@" in override
    if not has_user and not re.search("environment|setup|export", override) and not holds_secret(override):
        return override
    key = override.partition("=")[0]
    return f"{key}=***" if re.fullmatch(r"[\w.]+", key) else "***"


def _in_capitals(name: str) -> str:
    """Converts accessToken, access-token -> ACCESS_TOKEN."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-.]", "_", name).upper()


def _without_value(match: re.Match[str]) -> str:
    name = match[2]
    is_key = _PRESIGNED.fullmatch(name) or (is_secret_name(name) and name.lower() != "key")  # ?key= is often an id
    return f"{match[1]}***" if is_key else match[0]


def secret_problems(sections: Mapping[str, Section]) -> Iterator[tuple[KeyPath, str]]:
    """Yields a problem for each text that looks like a secret, by its content or by the name of its variable."""
    for name, section in sections.items():
        for path, text in _texts((name,), section.model_dump()):
            is_named = path[:2] == ("slurm", "environment") and is_secret(str(path[-1]), text)
            if is_named or (path != _CHECKED_APART and holds_secret(text)):
                yield path, f"{dotted(path)}: {_REMEDY_OF_A_JOB if name == 'slurm' else _REMEDY}"


def _texts(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, str]]:
    """Yields every text in a section, also in mappings and lists, with its key path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping | list | tuple):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _texts((*path, key), part)


def tracking_address(settings: TrackingConfig) -> str | None:
    """Returns `settings.uri`, or MLflow's variable (it may hold credentials and is never written); None: sqlite.

    Raises UserError if the variable is set to no address: a run that is meant for a server must go to no other.
    """
    said = os.environ.get(ADDRESS_VARIABLE)
    if settings.uri or said is None:
        return settings.uri
    if re.match(r"(?!sqlite[\w+]*:(?!////))[\w+.-]+://.|databricks", said):  # no file relative to a command's folder
        return said
    shown = "***" if "@" in said else repr(said)
    got = shown if said.strip() else "an empty text; was the address to be read from a file that is not there?"
    raise UserError(
        f"the variable {ADDRESS_VARIABLE}: expected the address of MLflow, http://HOST:PORT or sqlite:////PATH.db, got {got}\n"
        f"Set it right, or `unset {ADDRESS_VARIABLE}` to track in the folder of runs (mlflow.db), or set tracking.uri"
    )
