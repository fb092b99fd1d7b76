"""`raypar doctor`: what is made of facts about a machine and a cluster, and that no check waits for ever."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest

from raypar.cli import main
from raypar.comm.nccl import bindings
from raypar.doctor import check_machine as machine
from raypar.doctor import gather
from raypar.doctor.check_cluster import check_cluster
from raypar.doctor.check_environment_variables import check_environment_variables
from raypar.doctor.checks import CHECKS, refuse_unfit_machine, run_checks
from raypar.doctor.finding import Finding, NotKnown, findings_as_json, format_findings, has_failures
from raypar.doctor.machine_facts import (
    ClusterFacts,
    DoctorFacts,
    FolderFacts,
    HostFacts,
    LimitFacts,
    NodeFacts,
    ProcessorFacts,
    TlsFacts,
    TokenFacts,
)
from raypar.errors import ClusterError

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
VERSIONS = {
    "python": "3.11.7", "raypar": "0.1.0", "torch": "2.13.0+cpu", "ray": "2.60.0", "numpy": "2.4.6", "pydantic": "2.14.3",
    "pyyaml": "6.0.3", "safetensors": "0.8.0", "torchvision": "0.28.0", "cupy": "14.2.0",
}  # fmt: skip
FOLDER = FolderFacts("/runs", "", 100 * GIB, 50 * GIB, 10**6)
HOST = HostFacts("alpha", ("10.0.0.5",), "", ("lo", "eth0"), 32768, 60999)
TOKEN = TokenFacts("", False, "/home/me/.ray/auth_token", False)
NODE = NodeFacts("b09ad58f", "beta", "", 0.001, 0.002, 
                 {"python": "3.11.9", "torch": "2.13.0", "ray": "2.60.0", "raypar": "0.1.0"},
                 "AMD 25", {}, True, 8 * GIB, 65536)  # fmt: skip
CLUSTER = ClusterFacts(
    "10.0.0.1:6379",
    (NODE, replace(NODE, node="70961f5a")),
    {"python": "3.11.7", "torch": "2.13.0", "ray": "2.60.0", "raypar": "0.1.0"},
    "AMD 25",
)
WELL = DoctorFacts(
    versions=VERSIONS, processors=ProcessorFacts(4, 8, None, 16 * GIB, 12 * GIB), gpus=(), torch={"cuda": None, "gpus": []},
    torchvision={}, nccl={}, ray={}, shm=replace(FOLDER, path="/dev/shm"), runs=FOLDER, temporary=FOLDER,
    limits=LimitFacts(65536, 65536, None), host=HOST, token=TOKEN, tls=TlsFacts(False), environment={}, cluster=CLUSTER,
    address="10.0.0.1:6379",
)  # fmt: skip


def levels(findings: list[Finding]) -> list[str]:
    return [finding.level for finding in findings]


def test_a_machine_that_is_well_has_no_warning():
    found = run_checks(vars(WELL))
    assert set(levels(found)) == {"ok"} and not has_failures(found)
    assert all(finding.cure == "" for finding in found)
    assert levels(run_checks(vars(replace(WELL, cluster=NotKnown(""), address=None))))[-1] == "not checked"


def test_a_fact_that_is_not_known_is_told_once_by_the_check_that_needs_it():
    for name in ("versions", "processors", "shm", "limits", "runs", "temporary", "token", "tls", "ray", "torch"):
        found = [one for one in run_checks(vars(replace(WELL, **{name: NotKnown("slow")}))) if one.level != "ok"]
        assert [(one.level, one.text) for one in found] == [("not checked", "slow")], name


def test_a_run_makes_those_checks_of_the_doctor_that_apply_to_it():
    assert {field for check in CHECKS for field in check.facts} == {field.name for field in fields(DoctorFacts)}
    package = Path(machine.__file__).parents[1]
    sources = "".join(path.read_text() for room in ("actors", "launch") for path in (package / room).glob("*.py"))
    handed_over = set(re.findall(r'refuse_unfit_machine\(\{"(\w+)"', sources))
    assert {fact for check in CHECKS if "run" in check.where for fact in check.facts} == handed_over
    assert [check.name for check in CHECKS if "run" in check.where] == ["address space", "room for logs"]
    little = LimitFacts(100, 100, 10, None, 1 << 30)
    failures = [finding for finding in run_checks({"limits": little}) if finding.level == "failure"]
    assert [finding.subject for finding in failures] == ["open files", "processes", "address space"]
    with pytest.raises(ClusterError) as refused:
        refuse_unfit_machine({"limits": little})
    assert (refused.value.what, refused.value.cure) == (failures[-1].text, failures[-1].cure)
    refuse_unfit_machine({"limits": replace(little, address_space_bytes=None), "temporary": FOLDER})


GPUS = ("/dev/nvidia0", "/dev/nvidia1")
SICK = {
    "a PyTorch that is too old": (
        {"versions": {**VERSIONS, "torch": "2.4.1"}}, "failure", "2.4.1 is too old", "constraints.txt",
    ),
    "no Ray": ({"versions": {**VERSIONS, "ray": ""}}, "failure", "not installed", "pip install"),
    "a Ray of the future": ({"versions": {**VERSIONS, "ray": "3.1"}}, "warning", "has not been tried", "constraints.txt"),
    "Python 3.9": ({"versions": {**VERSIONS, "python": "3.9.18"}}, "failure", "too old", "pip install"),
    "versions unknown": ({"versions": NotKnown("slow")}, "not checked", "slow", ""),
    "PyTorch broken": ({"torch": {"error": "ImportError: libc10"}}, "failure", "libc10", "anew"),
    "PyTorch hangs": ({"torch": NotKnown("no answer within 60 s")}, "not checked", "60 s", ""),
    "Ray broken": ({"ray": {"error": "ImportError: grpc"}}, "failure", "grpc", "anew"),
    "a Ray that has renamed something": (
        {"ray": {"version": "2.71", "lacks": [["Ray 2.71: seeing an autoscaler is off", "use Ray 2.60"]]}},
        "warning", "seeing an autoscaler is off", "use Ray 2.60",
    ),
    "a PyTorch that has renamed something": (
        {"torch": {"cuda": None, "gpus": [], "lacks": [["PyTorch 3.0: guarding x is off", "use PyTorch 2.13"]]}},
        "warning", "guarding x is off", "use PyTorch 2.13",
    ),
    "GPUs, PyTorch for CPUs": (
        {"gpus": GPUS, "nccl": {"text": "x"}}, "warning", "PyTorch sees 0: it was built for CPUs", "CUDA",
    ),
    "GPUs hidden": (
        {"gpus": GPUS, "nccl": {"text": "x"}, "torch": {"cuda": "13.0", "gpus": ["H200"]},
         "environment": {"CUDA_VISIBLE_DEVICES": "0"}},
        "warning", "CUDA_VISIBLE_DEVICES is '0'", "unset",
    ),
    "GPUs not seen": (
        {"gpus": GPUS, "nccl": {"text": "x"}, "torch": {"cuda": "13.0", "gpus": []}}, "warning", "2 on this", "nvidia-smi",
    ),
    "no CuPy beside GPUs": (
        {"gpus": GPUS, "torch": {"cuda": "13.0", "gpus": ["H200"] * 2}, "nccl": {"error": "no CuPy", "cure": "install it"}},
        "failure", "no CuPy", "install it",
    ),
    "an old CuPy": ({"versions": {**VERSIONS, "cupy": "13.6.0"}}, "warning", "13.6.0 is too old", "cuda13"),
    "foreign torchvision": (
        {"torchvision": {"error": "RuntimeError: operator torchvision::nms does not exist"}},
        "warning", "another PyTorch", "one index",
    ),
    "broken torchvision": ({"torchvision": {"error": "ImportError: x"}}, "warning", "cannot be imported", "uninstall"),
    "CPU quota": ({"processors": ProcessorFacts(8, 8, 1.5, 16 * GIB, 12 * GIB)}, "warning", "allows 1.5", "limit"),
    "no memory": ({"processors": ProcessorFacts(8, 8, None, 16 * GIB, 1 << 28)}, "failure", "no worker fits", "larger"),
    "memory nearly full": ({"processors": ProcessorFacts(1, 8, None, 64 * GIB, GIB)}, "warning", "1.0 GiB free", "95 %"),
    "little memory": ({"processors": ProcessorFacts(8, 8, None, 8 * GIB, GIB)}, "warning", "2 workers", "fewer"),
    "Docker's /dev/shm": (
        {"shm": FolderFacts("/dev/shm", "", 64 << 20, 64 << 20, None)}, "warning", "64 MiB free of 64 MiB", "--shm-size",
    ),
    "small /dev/shm": ({"shm": FolderFacts("/dev/shm", "", GIB, GIB // 2, None)}, "warning", "512 MiB", "--shm-size"),
    "no /dev/shm": ({"shm": FolderFacts("/dev", "", GIB, GIB, None)}, "failure", "does not exist", "mount"),
    "runs not writable": ({"runs": replace(FOLDER, error="Read-only file system")}, "failure", "Read-only", "--run-dir"),
    "runs full": ({"runs": replace(FOLDER, free_bytes=GIB // 2)}, "failure", "512 MiB free", "free disk space"),
    "runs nearly full": ({"runs": replace(FOLDER, free_bytes=5 * GIB)}, "warning", "5.0 GiB free", "checkpoint"),
    "no inodes": ({"runs": replace(FOLDER, free_inodes=12)}, "failure", "12 more files", "small files"),
    "a dead network disk": ({"runs": NotKnown("looking at runs/: no answer within 5 s")}, "not checked", "5 s", ""),
    "temporary files full": ({"temporary": replace(FOLDER, free_bytes=4 * GIB)}, "warning", "95 % full", "RAY_TMPDIR"),
    "temporary files not writable": ({"temporary": replace(FOLDER, error="Permission denied")}, "failure", "denied", "TMPDIR"),
    "few open files": ({"limits": LimitFacts(1024, 4096, None)}, "warning", "1,024", "ulimit -n"),
    "hardly any open files": ({"limits": LimitFacts(256, 512, None)}, "failure", "256", "ulimit -n"),
    "little address space": ({"limits": LimitFacts(65536, 65536, None, None, 1 << 30)}, "failure", "needs 2.5", "ulimit -v"),
    "few processes": ({"limits": LimitFacts(65536, 65536, 1000)}, "warning", "1,000", "ulimit -u"),
    "processes all taken": ({"limits": LimitFacts(65536, 65536, 5000, 4950)}, "failure", "4,950 are taken", "pids-limit"),
    "no name": ({"host": NotKnown("gaierror: Name or service not known")}, "failure", "not known", "/etc/hosts"),
    "name of no address": ({"host": replace(HOST, addresses=())}, "failure", "no address", "/etc/hosts"),
    "a loopback name": ({"host": replace(HOST, addresses=("127.0.1.1",))}, "warning", "cannot reach", "/etc/hosts"),
    "a firewall": ({"host": replace(HOST, own_connection_error="timed out")}, "failure", "timed out", "firewall"),
    "few ports": ({"host": replace(HOST, last_port=33000)}, "warning", "233 ports", "sysctl"),
    "no token": ({"token": replace(TOKEN, mode="token")}, "failure", "there is none", "RAY_AUTH_TOKEN"),
    "a token that all read": ({"token": TokenFacts("token", False, "/t", True, 0o100644)}, "warning", "mode 644", "chmod 600"),
    "TLS without its files": (
        {"tls": TlsFacts(True, ("RAY_TLS_CA_CERT",), ("RAY_TLS_SERVER_KEY=/k",))}, "failure",
        "RAY_TLS_CA_CERT is not set, RAY_TLS_SERVER_KEY=/k cannot be read", "unset RAY_USE_TLS",
    ),
    "TLS, which raypar's connections lack": ({"tls": TlsFacts(True)}, "warning", "are not encrypted", "network of their own"),
    "a token and no mode": ({"token": TokenFacts("", True, "/t", False)}, "warning", "not set to token", "RAY_AUTH_MODE"),
    "a cluster without a token": (
        {"cluster": replace(CLUSTER, open_to_all=True)}, "warning", "whoever reaches its ports can run", "RAY_AUTH_MODE=token"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SICK)
def test_each_trouble_is_found_with_its_cure_and_nothing_else(case):
    changed, level, text, cure = SICK[case]
    found = [finding for finding in run_checks(vars(replace(WELL, **changed))) if finding.level != "ok"]
    assert [finding.level for finding in found] == [level], found
    assert text in found[0].text and cure in found[0].cure
    assert has_failures(found) == (level == "failure")


SETTINGS_CASES = {
    "MKL": ({"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default"}, "MKL_CBWR=COMPATIBLE, ATEN_CPU_CAPABILITY=default"),
    "threads": ({"OMP_NUM_THREADS": "many"}, "no number"),
    "pinning": ({"GOMP_CPU_AFFINITY": "0-3"}, "same processors"),
    "spinning": ({"OMP_WAIT_POLICY": "ACTIVE"}, "busy"),
    "NCCL": ({"NCCL_ALGO": "Ring", "NCCL_DEBUG": "INFO"}, "NCCL_ALGO: changes"),
    "proxy": ({"http_proxy": "http://me:geheim@proxy:3128"}, "no_proxy lacks localhost, 127.0.0.1, 10.0.0.5"),
    "folder": ({"RAY_TMPDIR": "/" + "x" * 60}, "61 characters"),
    "faults": ({"RAY_testing_asio_delay_us": "1"}, "fail on purpose"),
    "debugger": ({"RAY_DEBUG": "1"}, "attach"),
    "memory": ({"RAY_memory_monitor_refresh_ms": "0"}, "any process"),
    "allocator": ({"LD_PRELOAD": "libjemalloc.so"}, "addresses"),
    "blocking": ({"CUDA_LAUNCH_BLOCKING": "1"}, "waited for"),
}


@pytest.mark.parametrize("case", SETTINGS_CASES)
def test_settings_that_change_bits_or_hang_are_found(case):
    environment, text = SETTINGS_CASES[case]
    found = check_environment_variables(environment, HOST)
    assert levels(found) == ["warning"] and text in found[0].text and found[0].cure
    assert "geheim" not in str(found)


@pytest.mark.parametrize(
    "environment",
    [
        {}, {"OMP_NUM_THREADS": "4"}, {"OMP_PROC_BIND": "false"}, {"NCCL_DEBUG": "INFO"}, {"RAY_ADDRESS": "10.0.0.1:6379"},
        {"https_proxy": "x", "no_proxy": "localhost,127.0.0.1,10.0.0.0/8"}, {"https_proxy": "x", "NO_PROXY": "*"},
        {"RAY_some_setting": "1"}, {"RAY_TMPDIR": "/t"},
    ],
)  # fmt: skip
def test_settings_that_do_no_harm(environment):
    assert levels(check_environment_variables(environment, HOST)) == ["ok"]


@pytest.mark.parametrize(
    "wanted, there", [("eth", True), ("=eth", False), ("=eth0", True), ("^lo", True), ("^lo,eth", False), ("ib", False)]
)
def test_the_network_that_nccl_is_told_to_use(wanted, there):
    found = check_environment_variables({"NCCL_SOCKET_IFNAME": wanted}, HOST)
    assert any("finds no network" in finding.text for finding in found) != there


CLUSTER_CASES = {
    "a clock": ({"skew_s": -3.0}, "warning", "3.0 s behind"),
    "a clock far off": ({"skew_s": 90.0}, "failure", "90.0 s ahead of"),
    "another PyTorch": ({"versions": {**NODE.versions, "torch": "2.12.0"}}, "warning", "torch 2.12.0 there, 2.13.0 here"),
    "another Ray": ({"versions": {**NODE.versions, "ray": "2.59.0"}}, "failure", "ray 2.59.0 there"),
    "another Python": ({"versions": {**NODE.versions, "python": "3.12.1"}}, "failure", "python 3.12.1 there"),
    "no PyTorch": ({"versions": {**NODE.versions, "torch": ""}}, "failure", "torch is not installed there"),
    "no raypar": ({"versions": {**NODE.versions, "raypar": ""}}, "warning", "raypar is not installed there"),
    "another processor": ({"processor": "Intel 6"}, "warning", "AMD 25: b09ad58f; Intel 6: 70961f5a"),
    "other settings": ({"settings": {"MKL_CBWR": "AUTO"}}, "warning", "MKL_CBWR=AUTO, this machine's none"),
    "no shared folder": ({"sees_folder": False}, "failure", "not seen by node 70961f5a"),
    "small shm": ({"shm_free_bytes": 64 << 20}, "warning", "64 MiB free"),
    "few files": ({"open_files": 256}, "warning", "256 open files"),
    "silent": ({"error": "beta did not answer within 25 s"}, "failure", "did not answer"),
}


@pytest.mark.parametrize("case", CLUSTER_CASES)
def test_each_trouble_of_a_node_is_found(case):
    changed, level, text = CLUSTER_CASES[case]
    cluster = replace(CLUSTER, nodes=(NODE, replace(NODE, node="70961f5a", **changed)))
    found = [finding for finding in check_cluster(cluster, "10.0.0.1:6379") if finding.level != "ok"]
    assert [finding.level for finding in found] == [level] and text in found[0].text and found[0].cure


def test_a_slow_answer_excuses_a_clock_and_a_cluster_without_nodes_is_a_failure():
    slow = replace(CLUSTER, nodes=(replace(NODE, skew_s=2.0, uncertainty_s=1.8),))
    assert set(levels(check_cluster(slow, "a:1"))) == {"ok"}
    assert has_failures(check_cluster(replace(CLUSTER, nodes=()), "a:1"))
    assert has_failures(check_cluster(NotKnown("nothing answers at 'a:1'"), "a:1"))


def test_the_ranges_are_those_of_the_package():
    needs = dict(re.findall(r'"([a-z]+)(?:\[[a-z]+\])?>=([\d.]+)', (ROOT / "pyproject.toml").read_text()))
    for library in ("torch", "ray", "pydantic", "safetensors"):
        assert machine.GOOD[library][0] == machine.parse_version(needs[library]), library
    python = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert machine.GOOD["python"][0] == machine.parse_version(python[1])
    assert f"cupy-cuda13x>={machine.CUPY_FROM[0]}" in (ROOT / "pyproject.toml").read_text() and bindings.OLDEST_NCCL


def test_findings_as_text_and_as_json():
    found = [
        Finding("ok", "Python", "3.11"),
        Finding("failure", "disk", "full", "free it"),
        Finding("not checked", "x", "slow"),
    ]
    assert format_findings(found).splitlines() == [
        "ok           Python  3.11",
        "failure      disk    full",
        "                     cure: free it",
        "not checked  x       slow",
        "",
        "1 ok, 0 warnings, 1 failure, 1 not checked",
    ]
    told = json.loads(findings_as_json(found))
    assert told["healthy"] is False and told["checks"][1] == {
        "level": "failure",
        "subject": "disk",
        "text": "full",
        "cure": "free it",
    }


def test_no_fact_is_waited_for_beyond_its_deadline_and_errors_are_told():
    asked = threading.Event()
    began = time.monotonic()
    stuck = gather.Gathering(asked.wait, 0.05, "looking at /nfs")
    assert stuck.result() == NotKnown("looking at /nfs: no answer within 0.05 s") and time.monotonic() - began < 2
    asked.set()
    broken = gather.Gathering(lambda: 1 / 0, 5, "counting").result()
    assert broken == NotKnown("counting: ZeroDivisionError: division by zero")


def test_a_probe_that_hangs_is_killed_and_what_it_had_said_counts(monkeypatch, tmp_path):
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho noise\necho '{\"torch\": {}}'\necho '{bad'\nexec sleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    began = time.monotonic()
    assert gather.run_probe("library_import_probe", ["torch"], 0.3) == {"torch": {}}
    assert time.monotonic() - began < 5


def test_facts_of_this_machine_are_gathered(tmp_path):
    there = gather.read_folder(str(tmp_path / "not" / "yet"))
    assert there.path == str(tmp_path) and there.error == "" and there.free_bytes > 0 and list(tmp_path.iterdir()) == []
    assert gather.read_folder("/proc").error
    facts = gather.read_processors()
    assert 0 < facts.processors <= facts.all_processors and 0 < facts.free_memory_bytes <= facts.memory_bytes
    assert gather.read_limits().open_files is None or gather.read_limits().open_files > 0
    assert gather.read_versions()["python"].startswith("3.") and gather.read_host().name == socket.gethostname()
    assert gather.connect_to_self("127.0.0.1") == "" and gather.connect_to_self("192.0.2.77") != ""


def test_a_token_is_not_read(tmp_path):
    file = tmp_path / "token"
    file.write_text("a-secret-token")
    file.chmod(0o600)
    found = gather.read_token({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file), "RAY_AUTH_TOKEN": "another-secret"})
    assert found.file_exists and found.in_environment and "secret" not in repr(found)


def test_the_command_ends_with_1_on_a_failure_and_tells_no_secret(monkeypatch, capsys):
    token = "ray-token-0123456789abcdef"
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    asked = []

    def facts(run_dir, address, environment):
        asked.append((run_dir, address))
        return replace(WELL, runs=replace(FOLDER, error=f"no disk for {token}"))

    monkeypatch.setattr(gather, "gather_facts", facts)
    assert main(["doctor", "--address", "10.0.0.1:6379", "--json"]) == 1
    told = capsys.readouterr().out
    assert json.loads(told)["healthy"] is False and token not in told
    monkeypatch.setattr(gather, "gather_facts", lambda *given: WELL)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["doctor"]) == 0
    assert "0 failures" in capsys.readouterr().out and asked == [(Path("runs"), "10.0.0.1:6379")]


@pytest.mark.ci
def test_what_runs_on_nodes_needs_no_raypar_there():
    send = """
import sys
from ray import cloudpickle
from raypar.actors.cluster_probe import NodeFactsProbe, send_code_whole
send_code_whole()
sys.stdout.buffer.write(cloudpickle.dumps(NodeFactsProbe))
"""
    answer = """
import sys
sys.modules["raypar"] = None
from ray import cloudpickle
made = cloudpickle.loads(sys.stdin.buffer.read())()
found = made.describe(["torch", "raypar"], ["MKL_CBWR"], "/")
assert found["versions"]["torch"] and found["sees_folder"] and found["processor"] and made.clock() > 0
"""
    code = subprocess.run([sys.executable, "-c", send], cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=60).stdout
    subprocess.run([sys.executable, "-c", answer], input=code, check=True, timeout=60)


def test_what_is_set_for_tls_is_read_without_the_keys(tmp_path):
    from raypar.doctor.gather import read_tls

    cert = tmp_path / "tls.crt"
    cert.write_text("x")
    assert read_tls({}) == TlsFacts(False) == read_tls({"RAY_USE_TLS": "0", "RAY_TLS_CA_CERT": "/none"})
    found = read_tls({"RAY_USE_TLS": "1", "RAY_TLS_SERVER_CERT": str(cert), "RAY_TLS_SERVER_KEY": "/no/tls.key"})
    assert found == TlsFacts(True, ("RAY_TLS_CA_CERT",), ("RAY_TLS_SERVER_KEY=/no/tls.key",))
