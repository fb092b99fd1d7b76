"""Checks `cluster/slurm.sh`, the Dockerfiles and their ignore files: shellcheck, hadolint, and what they must say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from helpers.script_checks import hadolint, secrets_in, shellcheck

ROOT = Path(__file__).parents[2]
PROJECT = ("pyproject.toml", "constraints.txt", "README.md", "LICENSE", "raypar", "jobs", "examples")
"""What an image is made of."""

SLURM_RULES = {
    "an error ends the job": r"^set -euo pipefail$",
    "a node that fails does not end the job": r"^#SBATCH --no-kill$",
    "a preempted job is queued again": r"^#SBATCH --requeue$",
    "the script is told before its time is over": r"^#SBATCH --signal=B:TERM@\d{2,}$",
    "one Ray a node": r"^#SBATCH --ntasks-per-node=1$",
    "only the user may read the token": r"^umask 077$",
    "Ray asks for the token": r"^export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=\"\$state/token\"",
    "the token is random": r"/dev/urandom",
    "the token goes with the job": r"rm -rf \"\$state\"",
    "the cluster ends with the script": r"^trap end_cluster EXIT$",
    "a notice stops the trainer": r"^trap stop_trainer TERM$",
    "the run is saved: SIGINT is ignored in background processes": r"kill -TERM \"\$trainer\"",
    "jobs may share a node": r"SLURM_JOB_ID % ",
    "the node's step outlives a node": r"--no-kill --wait=0 --kill-on-bad-exit=0",
    "the run goes on where it was": r"raypar train \"\$job_file\" --resume --address \"\$address\"",
    "a stopped job is queued again": r"scontrol requeue \"\$SLURM_JOB_ID\"",
    "the exit code is the trainer's": r"^exit \"\$status\"$",
}
DOCKER_RULES = {
    "versions are those of constraints.txt": r"pip install --no-cache-dir .*-c constraints\.txt \"\.\[jobs[a-z0-9,]*\]\"",
    "KubeRay's probes call wget": r"apt-get install -y --no-install-recommends .*\bwget\b",
    "functions of the jobs can be imported": r"^ENV PYTHONPATH=/home/ray/app\b",
    "the user has the number that the manifests name": r"useradd .*--uid 1000 .*\bray\b",
    "the mount point of shared storage is the user's": r"install -d -o ray -g ray /shared",
}


def complaints_about_slurm_script(text: str) -> list[str]:
    """What is wrong with the script; empty if nothing is."""
    return [*secrets_in(text), *_missing(text, SLURM_RULES), *shellcheck(text)]


def complaints_about_dockerfile(text: str) -> list[str]:
    """What is wrong with a Dockerfile; empty if nothing is."""
    return [*secrets_in(text), *_missing(text, DOCKER_RULES), *_image_complaints(text), *hadolint(text)]


def complaints_about_dockerignore(text: str) -> list[str]:
    """An ignore file lets in what the Dockerfiles copy, and nothing else."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    wanted = ["*", *(f"!{name}" for name in PROJECT), "**/__pycache__"]
    return [] if lines == wanted else [f"ignore: {lines} instead of {wanted}"]


def _missing(text: str, rules: dict[str, str]) -> list[str]:
    return [f"rule: {why}: {pattern}" for why, pattern in rules.items() if not re.search(pattern, text, re.MULTILINE)]


def _image_complaints(text: str) -> Iterator[str]:
    lines = text.replace("\\\n", " ").splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    if users != ["1000:1000"] or not lines[-2].startswith("USER "):
        yield f"rule: the image ends as user 1000:1000, by number, so that `runAsNonRoot` can be checked; users: {users}"
    for line in lines:
        if line.startswith("FROM ") and not re.fullmatch(r"FROM [\w./-]+:\d[\w.-]+", line):
            yield f"rule: a base image with a version: {line}"
        if line.startswith("ADD ") or re.search(r"\bsudo\b|curl .*\| *(ba)?sh", line):
            yield f"rule: nothing is fetched but packages: {line}"
        if line.startswith("COPY "):
            yield from (f"rule: {name} is no part of the project" for name in _sources(line) if name not in PROJECT)
    copied = {name for line in lines if line.startswith("COPY ") for name in _sources(line)}
    yield from (f"rule: {name} is not copied" for name in PROJECT if name not in copied)
    yield from (f"rule: {name} is not in the repository" for name in PROJECT if not (ROOT / name).exists())


def _sources(line: str) -> list[str]:
    return [word for word in line.split()[1:-1] if not word.startswith("--")]
