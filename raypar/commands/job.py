"""`raypar job --schema` prints the JSON schema of job files: each key with its type, default and meaning.

With it an editor completes keys, shows what they mean, and underlines misspelt keys and wrong types. For editors with a YAML
language server write it beside your job files, and name it in the first line of each:

    raypar job --schema > job.schema.json
    # yaml-language-server: $schema=job.schema.json
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar job`."""
    parser.add_argument(
        "--schema", action="store_true", required=True, help="print the JSON schema, for editors and validators"
    )


def run(args: argparse.Namespace) -> int:
    """Print the schema; exit code 0."""
    import json

    from raypar.job.schema import make_schema

    print(json.dumps(make_schema(), indent=1))
    return 0
