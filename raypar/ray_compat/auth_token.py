"""Finds the token that Ray's processes show each other, where Ray itself looks for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from raypar.errors import ConfigError

TOKEN_VARIABLE, PATH_VARIABLE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
"""The variables that hold the token, and the path of its file."""
DEFAULT_FILE = "~/.ray/auth_token"
"""The token's file where no variable names one."""


def token_file(environ: Mapping[str, str]) -> Path:
    """The file from which the token is read where `RAY_AUTH_TOKEN` is not set. It need not exist."""
    return Path(environ.get(PATH_VARIABLE) or DEFAULT_FILE).expanduser()


def find_token(environ: Mapping[str, str]) -> str | None:
    """The token of `RAY_AUTH_TOKEN`, of the file `RAY_AUTH_TOKEN_PATH`, or of `~/.ray/auth_token`; None if there is none.

    Raises `ConfigError` where a file that is named or there cannot be read, and for a token that no header can hold.
    """
    token = environ.get(TOKEN_VARIABLE, "").strip()
    if not token:
        path = token_file(environ)
        try:
            token = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            if isinstance(error, FileNotFoundError) and not environ.get(PATH_VARIABLE):
                return None
            raise ConfigError(
                f"the token cannot be read from {path}: {getattr(error, 'strerror', None) or 'it is no text'}",
                cure=f"put the cluster's token there, or into {TOKEN_VARIABLE} ({PATH_VARIABLE} names another file)",
            ) from error
    if not token.isprintable():
        raise ConfigError("the cluster's token holds characters that no header can", cure="it is one line of text")
    return token or None
