"""`raypar simulate` as a user calls it."""

import gc
import json
import pkgutil
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from helpers.tiny_job import write_job

import raypar.commands
from raypar.cli import COLLECT_EVERY, COMMANDS, main

SMALL = ["simulate", "--schedule", "1f1b", "--stages", "4", "--microbatches", "8"]


def run(capsys, *words):
    code = main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def facts(capsys, *words):
    code, out, err = run(capsys, "simulate", "--json", *words)
    assert (code, err) == (0, "")
    return json.loads(out)


def test_a_command_in_its_own_process_collects_garbage_seldom_and_one_called_by_a_program_leaves_the_collector_alone():
    """Loading PyTorch under Python's own threshold takes half a second more of a processor."""
    own = f"import gc, sys; from raypar import cli; sys.argv[1:] = {SMALL}; cli.main(); print(gc.get_threshold()[0])"
    done = subprocess.run([sys.executable, "-c", own], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout.splitlines()[-1]) == COLLECT_EVERY
    before = gc.get_threshold()
    assert main(SMALL) == 0 and gc.get_threshold() == before


def test_the_example_of_the_readme_gives_33_ms(capsys):
    found = facts(capsys, *SMALL[1:], "--forward-ms", "1", "--backward-ms", "2")
    assert found["makespan_ms"] == 33
    assert found["bubble_of_ideal"] == 3 / 8
    assert found["bubble_of_total"] == pytest.approx(3 / 11, rel=1e-12)
    assert found["utilization"] == pytest.approx(8 / 11, rel=1e-12)
    assert found["peak_activations"] == [4, 3, 2, 1]
    assert found["busy_ms"] == [24, 24, 24, 24]
    assert (found["schedule"], found["stages"], found["replicas"], found["workers"]) == ("1f1b", 4, [1, 1, 1, 1], 4)


def test_chunks_default_to_two_where_they_matter_and_times_are_of_all_chunks_together(capsys):
    found = facts(capsys, "--schedule", "interleaved", "--stages", "4", "--microbatches", "8")
    assert (found["makespan_ms"], found["chunks"]) == (28.5, 2)
    assert found["peak_activations"] == [5.5, 4.5, 3.5, 2.5]
    found = facts(capsys, "--schedule", "interleaved", "--chunks", "3", "--stages", "4", "--microbatches", "8")
    assert found["makespan_ms"] == 27
    assert found["peak_activations"][0] == pytest.approx(16 / 3, abs=1)


def test_recompute_makes_activations_again_and_keeps_those_of_one_microbatch(capsys, tmp_path):
    found = facts(capsys, *SMALL[1:], "--recompute", "--csv", str(tmp_path / "own.csv"))
    assert found["peak_activations"] == [1, 1, 1, 1] and found["busy_ms"] == [32, 32, 32, 24]
    assert facts(capsys, "--schedule-file", str(tmp_path / "own.csv"))["makespan_ms"] == found["makespan_ms"] == 39
    code, _, err = run(capsys, "simulate", "--schedule-file", str(tmp_path / "own.csv"), "--recompute")
    assert code == 2 and "--schedule-file and --recompute exclude each other" in err


@pytest.mark.parametrize("lists", ["spaces", "commas"])
def test_lists_are_one_value_or_one_per_stage(capsys, lists):
    def values(*items):
        return items if lists == "spaces" else [",".join(items)]

    found = facts(
        capsys, "--stages", "4", "--microbatches", "24", "--replicas", *values("1", "1", "3", "1"),
        "--forward-ms", *values("1", "1", "3", "1"), "--backward-ms", *values("2", "2", "6", "2"),
        "--warmup", *values("8", "7", "2", "1"),
    )  # fmt: skip
    assert found["makespan_ms"] == 87
    assert found["workers"] == 6


def test_weight_ms_is_the_part_of_the_backward_that_waits(capsys):
    words = ("--schedule", "zb-h1", "--stages", "2", "--microbatches", "4")
    assert facts(capsys, *words, "--weight-ms", "1") == facts(capsys, *words)
    assert facts(capsys, *words, "--weight-ms", "0")["makespan_ms"] > facts(capsys, *words)["makespan_ms"]


def test_messages_take_latency_and_bandwidth_and_held_activations_take_memory(capsys):
    # 1F0 waits for 0F0 and 0B0 for 1B0: twice 5 ms + 8 Mbit / 1 Gbit/s.
    found = facts(
        capsys, "--stages", "2", "--microbatches", "1", "--latency-ms", "5", "--bandwidth-gbps", "1", "--activation-mb", "1"
    )
    assert found["makespan_ms"] == 6 + 2 * (5 + 8)
    assert found["peak_activation_bytes"] == [1_000_000, 1_000_000]
    found = facts(capsys, *SMALL[1:], "--held-mb", "100", "--activation-mb", "3")
    assert found["peak_activation_bytes"] == [400_000_000, 300_000_000, 200_000_000, 100_000_000]


def test_text_shows_the_grid_and_a_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    code, out, _ = run(capsys, *SMALL)
    assert code == 0
    assert "worker 3  .  .  .  F0 B0--- F1 B1---" in out
    assert "makespan          33 ms" in out
    assert "4 3 2 1 microbatches" in out


def test_more_workers_than_a_terminal_holds_get_the_table_only(capsys):
    code, out, _ = run(capsys, "simulate", "--stages", "8", "--replicas", "8", "--microbatches", "64")
    assert code == 0
    assert "--svg F draws it" in out
    assert len(out.splitlines()) < 12


def test_files_are_written_and_named(capsys, tmp_path):
    svg, trace = tmp_path / "a.svg", tmp_path / "a.json"
    code, out, _ = run(capsys, *SMALL, "--svg", str(svg), "--trace", str(trace))
    assert code == 0
    assert f"wrote {svg}" in out
    ET.fromstring(svg.read_text())
    assert len([e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]) == 64


def test_a_schedule_file_comes_back_as_it_went_out(capsys, tmp_path):
    path = tmp_path / "mine.csv"
    words = ("--stages", "2", "--replicas", "1", "2", "--microbatches", "6")
    written = facts(capsys, "--schedule", "1f1b", *words, "--csv", str(path))
    read = facts(capsys, "--schedule-file", str(path))
    assert {**read, "schedule": "1f1b"} == written


def test_a_schedule_file_with_idle_replicas_needs_their_number(capsys, tmp_path):
    path = tmp_path / "idle.csv"
    written = facts(capsys, "--stages", "2", "--replicas", "3", "1", "--microbatches", "2", "--csv", str(path))
    assert written["busy_ms"].count(0) == 1
    code, _, err = run(capsys, "simulate", "--schedule-file", str(path))
    assert code == 2 and "--replicas" in err
    read = facts(capsys, "--schedule-file", str(path), "--replicas", "3", "1")
    assert {**read, "schedule": "1f1b"} == written
    assert run(capsys, "simulate", "--schedule-file", str(path), "--replicas", "1", "1")[0] == 2


def test_a_schedule_file_in_v_shape_keeps_its_placement(capsys, tmp_path):
    path = tmp_path / "v.csv"
    facts(capsys, "--schedule", "zb-v", "--stages", "4", "--microbatches", "8", "--csv", str(path))
    found = facts(capsys, "--schedule-file", str(path))
    assert (found["makespan_ms"], found["chunks"], found["stages"]) == (25.5, 2, 4)


@pytest.mark.parametrize("command", [["plan", "--no-profile"], ["debug", "--steps", "1"]])
def test_a_job_whose_schedule_file_is_not_complete_is_refused_before_anything_runs(command, capsys, tmp_path):
    """`raypar plan` drew it, and `raypar debug` ran another schedule."""
    job = write_job(tmp_path)
    sets = [f"plan={{stages: 2, schedule_file: {tmp_path / 's.csv'}}}", "microbatches=2", "virtual_replicas=2", "batch_size=4"]
    words = [command[0], str(job), *command[1:], *(word for one in sets for word in ("--set", one))]
    (tmp_path / "s.csv").write_text("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n")
    assert main(words) == 2
    assert "0B1" in capsys.readouterr().err
    (tmp_path / "s.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert main(words) == 0
    assert f"schedule {tmp_path / 's.csv'}" in capsys.readouterr().out


def test_a_broken_schedule_file_is_refused_with_the_reason(capsys, tmp_path):
    path = tmp_path / "broken.csv"
    facts(capsys, "--stages", "2", "--microbatches", "2", "--csv", str(path))
    path.write_text(path.read_text().replace("1B1", "1B0"))
    code, out, err = run(capsys, "simulate", "--schedule-file", str(path))
    assert (code, out) == (2, "")
    assert "error: " in err and "cure: " in err and "1B" in err


@pytest.mark.parametrize(
    "words, message",
    [
        (["simulate", "--schedule", "1f1p", "--stages", "4", "--microbatches", "8"], "did you mean 1f1b"),
        (["simulate", "--stages", "4"], "--microbatches"),
        (["simulate", "--stages", "0", "--microbatches", "8"], "at least 1"),
        (["simulate", "--stages", "4", "--microbatches", "x"], "'x' is not a whole number"),
        (["simulate", "--stages", "4", "--microbatches", "8", "--forward-ms", "-1"], "at least 0"),
        (["simulate", "--stages", "4", "--microbatches", "8", "--forward-ms", "nan"], "'nan' is not a number"),
        (["simulate", "--stages", "4", "--microbatches", "8", "--forward-ms", "1", "2"], "2 values for 4 stages"),
        (["simulate", "--stages", "4", "--microbatches", "8", "--weight-ms", "3"], "--weight-ms 3 is more than"),
        (["simulate", "--stages", "4", "--microbatches", "8", "--bandwidth-gbps", "0"], "never deliver"),
        (["simulate", "--stages", "4", "--microbatches", "8", "--chunks", "2"], "1f1b has 1 stage"),
        (["simulate", "--stage", "4", "--microbatches", "8"], "did you mean --stages"),
        (["simulate", "--schedule-file", "/does/not/exist.csv"], "/does/not/exist.csv"),
        (["simulate", "--stages", "1", "--microbatches", "1", "--svg", "/does/not/exist.svg"], "cannot write"),
        (["simulat"], "did you mean simulate"),
    ],
)
def test_bad_input_gives_one_message_with_a_cure_and_exit_code_2(capsys, words, message):
    code, out, err = run(capsys, *words)
    assert code == 2
    assert err.startswith("error: ") and message in err and "cure: " in err
    assert "Traceback" not in err + out


def test_the_help_of_every_command_line_form_leaves_with_0(capsys):
    for words in (["--help"], ["simulate", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 0
    assert main([]) == 0
    assert "simulate" in capsys.readouterr().out


def test_a_keyboard_interrupt_exits_with_130(capsys, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("raypar.commands.simulate.run", interrupted)
    assert main(SMALL) == 130
    assert capsys.readouterr().err == "interrupted\n", "it is no error"


@pytest.mark.parametrize("words", [["--help"], ["simulate", "--help"], [*SMALL, "--json"]])
def test_it_starts_without_torch_ray_numpy_and_pydantic(words):
    script = (
        "import sys\nfrom raypar.cli import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit:\n    pass\n"
        "print(*sorted({'torch', 'ray', 'numpy', 'pydantic', 'cupy', 'yaml'} & set(sys.modules)), file=sys.stderr)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert found.stderr.strip() == ""
    assert found.stdout


def test_python_m_raypar_is_the_same_command():
    found = subprocess.run(
        [sys.executable, "-m", "raypar", *SMALL, "--json"], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(found.stdout)["makespan_ms"] == 33


LARGE = ["--stages", "64", "--replicas", "16", "--microbatches", "2048"]


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", ["1f1b", *(pytest.param(n, marks=pytest.mark.full) for n in ("naive", "gpipe", "interleaved", "zb-h1", "zb-v"))]
)
def test_a_thousand_workers_take_under_20_s_and_2_gb(name, tmp_path):
    script = (
        "import re, sys, time\nfrom raypar.cli import main\nstart = time.perf_counter()\n"
        f"main(['simulate', '--schedule', {name!r}, *{LARGE!r}, '--json', '--svg', {str(tmp_path / 'large.svg')!r}])\n"
        # Not ru_maxrss, which begins with the peak of the process that has started this one: of the whole test run.
        "peak_kb = re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]\n"
        "print(time.perf_counter() - start, 1024 * int(peak_kb), file=sys.stderr)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    seconds, peak_bytes = map(float, found.stderr.split())
    assert json.loads(found.stdout)["workers"] == 1024
    assert seconds < 20 and peak_bytes < 2e9
    assert (tmp_path / "large.svg").stat().st_size < 4_000_000


def test_the_overview_lists_the_command_modules_and_nothing_else():
    modules = {m.name for m in pkgutil.iter_modules(raypar.commands.__path__) if not m.name.startswith("_")}
    assert modules == set(COMMANDS)
