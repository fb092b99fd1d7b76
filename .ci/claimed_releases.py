"""Prints the oldest or the newest Ray and pydantic that pyproject.toml claims and the package index offers, for pip.

    python .ci/claimed_releases.py oldest|newest

It is run by the Python of an environment in which raypar is installed. What there is to choose from is said on stderr.
"""

import re
import subprocess
import sys
from importlib.metadata import requires

from packaging.requirements import Requirement
from packaging.version import Version

LIBRARIES = ("ray", "pydantic")


def offered(name: str) -> list[Version]:
    """The releases of a package that the index offers for this Python, as `pip index versions` says."""
    said = subprocess.run([sys.executable, "-m", "pip", "index", "versions", name], capture_output=True, text=True, check=True)
    return [Version(word) for word in re.search(r"^Available versions: (.*)$", said.stdout, re.M)[1].split(", ")]


def main(which: str) -> None:
    """Print `name==release` of each library."""
    claimed = {r.name: r for r in map(Requirement, requires("raypar")) if r.marker is None}
    for name in LIBRARIES:
        claim = claimed[name]
        fits = sorted({release for release in offered(name) if release in claim.specifier})
        if not fits:
            raise SystemExit(f"{name}: the index has no release that fits {claim.specifier}")
        chosen = min(fits) if which == "oldest" else max(fits)
        choice = "the only one there is" if len(fits) == 1 else f"the {which} of {len(fits)}, {min(fits)} to {max(fits)}"
        print(f"{name} {claim.specifier}: {chosen}, {choice}", file=sys.stderr)
        print(f"{name}{'[' + ','.join(sorted(claim.extras)) + ']' if claim.extras else ''}=={chosen}")


if __name__ == "__main__":
    main(sys.argv[1])
