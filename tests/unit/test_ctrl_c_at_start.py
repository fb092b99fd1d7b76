"""Ctrl-C while Python imports the command line: exit code 130 and one line, whichever way `raypar` was started."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLOW_IMPORT = """
import sys, time
class SlowImport:
    def find_spec(self, name, path=None, target=None):
        if name == "raypar.cli":
            print("importing", flush=True)
            {wait}
sys.meta_path.insert(0, SlowImport())
"""
WAIT = "time.sleep(60)"
WAIT_THAT_CATCHES_CTRL_C = """try:
                time.sleep(60)
            except KeyboardInterrupt:
                pass"""


def console_script() -> str:
    """What the script `raypar`, which pip writes, executes."""
    found = re.search(r'^raypar = "([\w.]+):(\w+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return f"import sys\nfrom {found[1]} import {found[2]}\nsys.exit({found[2]}())"


@pytest.mark.parametrize("wait", [WAIT, WAIT_THAT_CATCHES_CTRL_C])
@pytest.mark.parametrize("arguments", [["-m", "raypar"], ["-c", console_script()]], ids=["python -m raypar", "raypar"])
def test_ctrl_c_while_the_command_line_is_imported_ends_with_130_and_without_a_traceback(arguments, wait, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORT.replace("{wait}", wait))
    with subprocess.Popen(
        [sys.executable, *arguments, "--version"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "importing\n"
            process.send_signal(signal.SIGINT)
            printed, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, printed, errors) == (130, "", "interrupted\n")


def test_a_process_that_ignores_ctrl_c_still_does(tmp_path: Path):
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + console_script().replace(
        "sys.exit(main())", "main(); print(signal.getsignal(signal.SIGINT))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True
    )
    assert done.stdout.splitlines()[-1] == str(signal.SIG_IGN)


def test_little_is_imported_before_the_handler_is_there():
    """Python itself ends with a traceback until then."""
    code = "import sys; before = {*sys.modules}; import raypar; print(*sorted({*sys.modules} - before))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, check=True
    )
    assert done.stdout.split() == ["__future__", "raypar"]
