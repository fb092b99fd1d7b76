"""`raypar doctor`: checks whether this machine, and a cluster, are fit for raypar: a line for each check, with the cure.

Exit code 1 if a check has failed. Every check has a deadline; one that cannot be made says why.
"""

from __future__ import annotations

import argparse

from raypar.console.command_arguments import add_run_dir_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar doctor`."""
    parser.add_argument("--address", help="the cluster whose nodes are asked, host:port (default: RAY_ADDRESS, else none)")
    add_run_dir_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the findings; exit code 1 if one is a failure."""
    import os
    from dataclasses import replace
    from functools import partial

    from raypar.doctor.checks import run_checks
    from raypar.doctor.finding import findings_as_json, format_findings, has_failures
    from raypar.doctor.gather import gather_facts
    from raypar.files.redact_secrets import redact_text, secrets_of_environment
    from raypar.storage.run_folder import check_local_path, parse_storage_location

    run_dir = parse_storage_location(args.run_dir, "--run-dir") or check_local_path(args.run_dir, "--run-dir")
    address = args.address or os.environ.get("RAY_ADDRESS") or None
    clean = partial(redact_text, known=secrets_of_environment(os.environ))
    found = run_checks(vars(gather_facts(run_dir, address, os.environ)))
    findings = [replace(finding, text=clean(finding.text)) for finding in found]
    print(findings_as_json(findings) if args.json else format_findings(findings))
    return 1 if has_failures(findings) else 0
