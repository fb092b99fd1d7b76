"""shellcheck and hadolint on texts, and a search for secrets. Both programs come with packages of the extra `test`."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

SECRETS = {
    "an AWS access key": r"\b(AKIA|ASIA)[0-9A-Z]{16}\b",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a token of GitHub or Hugging Face": r"\b(gh[pousr]_|hf_)[A-Za-z0-9]{20,}",
    "a long random number": r"\b(?!0+\b)[0-9a-f]{32,}\b",
    "a password": r"(?i)\b(password|passwd|secret|token|api_?key)\b[\"']?\s*[:=]\s*[\"']?(?!token\b|\$)[A-Za-z0-9+/_-]{6,}",
}
"""What a secret looks like. `RAY_AUTH_MODE=token` and `mode: token` are none, nor are values that the shell puts in."""


def secrets_in(text: str) -> list[str]:
    """What in a text looks like a secret."""
    return [f"secret: {what}: {found[0][:12]}..." for what, pattern in SECRETS.items() if (found := re.search(pattern, text))]


@functools.cache
def program(name: str) -> str | None:
    """The path of a program in this environment, or None."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


@functools.cache
def shellcheck(script: str, exclude: tuple[str, ...] = ()) -> tuple[str, ...]:
    """What shellcheck says about a script of bash, with all its severities."""
    path = program("shellcheck")
    assert path is not None, "install the extra `test`: it has shellcheck"
    command = [path, "--format=json", "--shell=bash", *(f"--exclude={code}" for code in exclude), "-"]
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    return tuple(f"shellcheck: line {found['line']}: SC{found['code']} {found['message']}" for found in json.loads(done.stdout))


@functools.cache
def hadolint(dockerfile: str) -> tuple[str, ...]:
    """What hadolint says about a Dockerfile, with all its severities."""
    path = program("hadolint")
    assert path is not None, "install the extra `test`: it has hadolint"
    done = subprocess.run([path, "--format=json", "-"], input=dockerfile, capture_output=True, text=True, check=False)
    return tuple(f"hadolint: line {found['line']}: {found['code']} {found['message']}" for found in json.loads(done.stdout))
