"""Removes secrets (passwords, tokens, keys) from texts and job values before they are written, or shown to others. Pure.

It cannot know every secret: it goes by the names of keys, by the shapes of well-known tokens, and by the values that the caller
knows to be secret. What it is not sure of it removes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import pairwise

from raypar.files.json_type import Json

REMOVED = "[removed]"
"""What stands in place of a secret."""

SECRET_WORDS = (
    "password", "passwd", "pwd", "passphrase", "secret", "secrets", "token", "tokens", "credential", "credentials", "apikey",
    "auth", "authorization", "bearer", "cookie", "dsn", "sas", "jwt",
)  # fmt: skip
"""Words in the name of a key whose text is a secret."""
SECRET_ENDINGS = ("password", "passwd", "secret", "token", "apikey", "accesskey", "privatekey", "secretkey", "credentials")
"""Endings of names without separators: `authtoken`, `dbpassword`."""
SECRET_PAIRS = {("api", "key"), ("access", "key"), ("private", "key"), ("secret", "key"), ("account", "key"), ("ssh", "key")}
"""Neighbouring words in the name of a key whose text is a secret."""
NUMBERS_TOO = ("password", "passwd", "pwd", "passphrase", "secret", "pin")
"""Words in the name of a key whose number is a secret too; a `token` that is a number is one of a vocabulary."""
STYLE = re.compile(r"[a-z]+(-[a-z]+)*([:/]\d+)*")
"""A sharding style, such as `qkv:8/2`: under `plan.styles` keys are patterns of layer names, such as `embed.token`."""

NO_SECRETS = ("_MODE", "_TYPE", "_METHOD", "_ENABLED", "_SOCK")
"""Endings of environment variables that only say how secrets are used, such as RAY_AUTH_MODE."""

KNOWN_SHAPES = re.compile(
    r"\b(?:"
    r"A(?:KIA|SIA)[0-9A-Z]{12,}"  # AWS
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|xox[abeoprs]-[\w-]{8,}|AIza[\w-]{30,}|ya29\.[\w.-]{16,}"
    r"|npm_[A-Za-z0-9]{16,}|pypi-[\w-]{16,}|dop_v1_[0-9a-f]{16,}|r8_[A-Za-z0-9]{16,}"
    r"|eyJ[\w-]{6,}\.[\w-]{6,}\.[\w-]*"  # a JSON web token
    r")"
)
PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
USER_OF_URL = re.compile(r"(?<=://)[^\s/@'\"<>]*(?:@[^\s/@'\"<>]*)*@")
"""`user:password@` in a URL; a password may have an @ of its own."""
PASSWORD_OF_URL = re.compile(r"(?<=://)[^\s/@:'\"<>]*:[^\s/@'\"<>]+(?:@[^\s/@'\"<>]*)*@")
"""The same with a password: without one it may be a container, as in `abfs://container@account/path`."""
QUERY_OF_URL = re.compile(
    r"(?i)([?&;](?:[\w.-]{0,60}(?:token|secret|password|passwd|key|signature|credential|auth)[\w.-]{0,60}|sig|pwd)=)[^\s&#'\"<>]+"
)
SCHEME = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9+/_.~=-]{8,}")
ASSIGNMENT = re.compile(
    r"(?i)((?<![A-Za-z0-9])[\w.-]{0,60}(?:password|passwd|passphrase|secret|api[_-]?key|access[_-]?key|private[_-]?key"
    r"|secret[_-]?key|auth[_-]?token|access[_-]?token|[_-]token|\btoken|credentials?)['\"]?\s{0,8}(?:=|:(?!//))\s{0,8}"
    r"|--?[\w-]{0,60}(?:password|passwd|token|secret|api-key)\s{1,8})(?!\[removed)(\"[^\"\n]*\"|'[^'\n]*'|[^\s,;}\])'\"]+)"
)
"""`name=value`, `name: value` or `--name value` with the name of a secret."""


def is_secret_name(name: str) -> bool:
    """Whether a text under this name is taken for a secret: `auth_token`, `apiKey`, `DB-PASSWORD`."""
    return bool(_secret_words(name))


def _secret_words(name: str) -> list[str]:
    """The words of a name that make it one of a secret; empty if there are none."""
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    found = [word for word in words if word in SECRET_WORDS]
    found += [a + b for a, b in pairwise(words) if (a, b) in SECRET_PAIRS]
    return found + [word for word in words if word.endswith(SECRET_ENDINGS)]


def redact_text(text: str, known: Collection[str] = ()) -> str:
    """The text without anything that may be a secret, for a page that is sent to others. `known`: texts that are secret
    wherever they stand."""
    text = redact_certain_secrets(text, known)
    text = USER_OF_URL.sub(f"{REMOVED}@", text)
    text = QUERY_OF_URL.sub(rf"\1{REMOVED}", text)
    text = SCHEME.sub(rf"\1 {REMOVED}", text)
    return ASSIGNMENT.sub(lambda found: found[1] + REMOVED, text)


def redact_certain_secrets(text: str, known: Collection[str] = ()) -> str:
    """The text without what is certainly a secret: `known` texts, private keys, tokens of known services, passwords in URLs.

    For what raypar writes while it runs: messages stay as they are otherwise (`unexpected token: '}'`), because people need
    them to find what is wrong.
    """
    for secret in sorted(known, key=len, reverse=True):
        text = text.replace(secret, REMOVED)
    text = PRIVATE_KEY.sub(REMOVED, text)
    text = PASSWORD_OF_URL.sub(f"{REMOVED}@", text)
    return KNOWN_SHAPES.sub(REMOVED, text)


def without_certain_secrets(facts: Mapping[str, Json], known: Collection[str]) -> dict[str, Json]:
    """The facts of an event without certain secrets in their texts. Lists and dicts stay as they are."""
    return {key: redact_certain_secrets(value, known) if isinstance(value, str) else value for key, value in facts.items()}


def tree_without_certain_secrets(value: Json, known: Collection[str]) -> Json:
    """JSON data without certain secrets in its texts."""
    if isinstance(value, Mapping):
        return {key: tree_without_certain_secrets(each, known) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [tree_without_certain_secrets(each, known) for each in value]
    return redact_certain_secrets(value, known) if isinstance(value, str) else value


def redact_value(value: Json, known: Collection[str] = (), *, inside: tuple[str, ...] = ()) -> Json:
    """A value of a job without secrets, of whatever keys and lists it is made. `inside`: the keys that it is under."""
    secret = next((words for name in inside if (words := _secret_words(name))), [])
    if isinstance(value, Mapping):
        return {
            redact_text(str(key), known): redact_value(each, known, inside=(*inside, str(key))) for key, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redact_value(each, known, inside=inside) for each in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        numbers = any(word.startswith(NUMBERS_TOO) or word.endswith(NUMBERS_TOO) for word in secret)
        return REMOVED if numbers or str(value) in known else value
    text = str(value)
    if secret and not (inside[:2] == ("plan", "styles") and STYLE.fullmatch(text)) and text:
        return REMOVED
    return redact_text(text, known)


def find_secrets_in_job(value: Json, known: Collection[str] = (), inside: tuple[str, ...] = ()) -> list[str]:
    """The keys of a job, as `trackers.0.args.api_key`, whose text is a secret: by its shape, or by the name of its key."""
    if isinstance(value, Mapping):
        return [found for key, each in value.items() for found in find_secrets_in_job(each, known, (*inside, str(key)))]
    if isinstance(value, (list, tuple)):
        return [found for i, each in enumerate(value) for found in find_secrets_in_job(each, known, (*inside, str(i)))]
    if not isinstance(value, str) or inside[:2] == ("plan", "styles"):
        return []
    named = bool(inside) and is_secret_name(inside[-1]) and len(value) >= 8 and not set(value) & {"/", " "}
    return [".".join(inside)] if named or redact_certain_secrets(value, known) != value else []


def secrets_of_environment(environment: Mapping[str, str]) -> list[str]:
    """Values of environment variables that have the names of secrets, if they are long enough not to be a common word."""
    return [
        value
        for name, value in environment.items()
        if len(value) >= 8 and is_secret_name(name) and not name.upper().endswith(NO_SECRETS) and not _is_path(value)
    ]


def _is_path(value: str) -> bool:
    """Whether a value is the path of a file (of a token), which is no secret itself."""
    return value.startswith(("/", "~", "./")) and "\n" not in value and value.count("/") > 1
