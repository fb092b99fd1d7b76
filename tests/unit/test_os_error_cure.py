"""Where no file descriptor is left the error says so, with the limit and what raises it, and nothing of the disk."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

from raypar.cli import main
from raypar.files.os_error_cure import cure_of_os_error
from raypar.files.untrusted_files import cure_of_read_error
from raypar.storage.run_folder import unwritable_run_dir_error
from raypar.worker.checkpoint.export_weights import unwritable_out_error

NO_MORE, NONE_HERE, FULL = (OSError(n, os.strerror(n), "x") for n in (errno.EMFILE, errno.ENFILE, errno.ENOSPC))


def test_the_cure_is_the_limit_of_the_process_or_of_the_machine():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raises = ": `ulimit -n " if soft != hard else ", and its hard limit"
    for cure in (
        cure_of_os_error(NO_MORE, "free disk space"),
        unwritable_run_dir_error(Path("runs"), NO_MORE).cure,
        unwritable_out_error(Path("out"), NO_MORE).cure,
        cure_of_read_error(NO_MORE),
    ):
        assert cure.startswith(f"this process may have {soft} files and connections open{raises}") and "disk" not in cure
    assert "fs.file-max" in cure_of_os_error(NONE_HERE, "free disk space")
    assert cure_of_os_error(FULL, "free disk space") == "free disk space"


def test_a_read_only_disk_has_room_and_is_to_be_made_writable():
    """`free disk space or set run_dir to a disk that has some`"""
    read_only = OSError(errno.EROFS, os.strerror(errno.EROFS), "x")
    writable = "make that disk writable again: it is mounted read-only (`dmesg` says whether after an error of its own)"
    assert cure_of_os_error(read_only, "free disk space") == writable
    assert cure_of_os_error(read_only, "free disk space or set run_dir to another") == f"{writable}; or set run_dir to another"
    assert unwritable_run_dir_error(Path("runs"), read_only).cure == f"{writable}; or set run_dir to a folder you may write"


USE_UP = """
import os, sys, traceback
from pathlib import Path
from raypar.files.atomic_write import write_text_atomically
from raypar.errors import RayparError
from raypar.storage.run_folder import RunFolder
from raypar.storage.checkpoint_store import write_and_fsync
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 99))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
folder = Path(sys.argv[1])
def checkpoint():
    with write_and_fsync(folder / "c"):
        pass
for name, write in {
    "text": lambda: write_text_atomically(folder / "a", "a"),
    "checkpoint": checkpoint,
}.items():
    try:
        write()
    except RayparError as error:
        print(name, str(error).replace(chr(10), " | "))
"""


def test_a_process_that_has_used_all_of_them_says_so_when_it_writes(tmp_path):
    ended = subprocess.run([sys.executable, "-c", USE_UP, str(tmp_path)], capture_output=True, text=True, timeout=60)
    lines = ended.stdout.splitlines()
    assert len(lines) == 2, ended.stderr
    for line in lines:
        assert "Too many open files |   cure: this process may have 64 files and connections open: `ulimit -n 99`" in line
        assert "disk" not in line


def test_a_command_that_has_none_left_ends_with_two_lines(monkeypatch, capsys):
    def opens(args):
        raise NO_MORE

    monkeypatch.setattr("raypar.commands.status.run", opens)
    assert main(["status"]) == 1
    what, cure = capsys.readouterr().err.splitlines()
    assert what == "error: Too many open files: no file descriptor is left for x" and "files and connections open" in cure
