"""The picture of a run's throughput: to scale, its pauses and faults marked, no label on another or under a line."""

import random
import re
import time
import xml.etree.ElementTree as ET

import pytest
from helpers.recorded_runs import history_of, view_of

from raypar.cli import main
from raypar.draw.run_history_chart import _LABEL, MARK_KINDS, ChartMark, RunHistory, throughput_bins, throughput_svg
from raypar.record.history import MOST_MARKS
from raypar.storage.run_folder import RunFolder

SVG = "{http://www.w3.org/2000/svg}"


def step(number, at_s, seconds, samples=8):
    return {
        "step": number,
        "loss": 1.0,
        "time": at_s,
        "seconds": seconds,
        "samples_per_s": samples / seconds,
        "peak_rss_bytes": [1, 1, 1, 1],
    }


METRICS = [
    step(1, 101.0, 1.0),
    step(2, 102.0, 1.0),
    step(3, 105.0, 1.0),
    step(4, 106.0, 1.0),
]
EVENTS = [
    {"kind": "started", "text": "4 workers", "time": 99.0},
    {"kind": "generation", "generation": 1, "workers": [0, 1, 2, 3], "time": 99.5},
    {"kind": "lost", "worker": 2, "time": 102.0},
    {"kind": "lost", "worker": 3, "time": 102.01},
    {"kind": "generation", "generation": 2, "workers": [0, 1], "pause_s": 3.0, "time": 104.999},
    {"kind": "joined", "worker": 4, "time": 105.5},
]


def test_the_lines_of_a_run_folder_become_steps_workers_marks_and_pauses():
    found = history_of(METRICS, EVENTS)
    assert found.steps == ((0.0, 1.0, 8.0), (1.0, 2.0, 8.0), (4.0, 5.0, 8.0), (5.0, 6.0, 8.0))
    assert [(round(at, 2), count) for at, count in found.workers] == [(0.0, 4), (2.0, 3), (2.01, 2)]
    assert found.marks == (ChartMark(2.0, "lost", "workers 2, 3 lost"), ChartMark(5.5, "joined", "worker 4 joined"))
    assert found.pauses == (pytest.approx((2.0, 5.0), abs=0.01),) and found.end_s == 6.0


def test_a_resumed_run_is_drawn_whole_without_the_time_in_which_nobody_was_at_it():
    workers = [{"worker": number} for number in (0, 1, 2)]
    more = [
        {"kind": "end", "end": "stopped", "time": 106.5},
        {"kind": "started", "text": "", "workers": workers, "time": 9006.5},
        {"kind": "lost", "worker": 1, "time": 9007.5},
    ]
    found = history_of([*METRICS, step(5, 9008.0, 1.0)], EVENTS + more)
    assert len(found.steps) == 5 and found.steps[-1] == pytest.approx((7.0, 8.0, 8.0))
    assert found.marks[2:] == (
        ChartMark(6.5, "started", "run resumed, 2 h 28 min later"),
        ChartMark(7.5, "lost", "worker 1 lost"),
    )
    assert [count for _, count in found.workers] == [4, 3, 2, 3, 2] and len(found.pauses) == 1


def test_a_lost_worker_without_a_seat_does_not_train_less():
    found = history_of(METRICS, [*EVENTS, {"kind": "lost", "worker": 4, "time": 105.9}])
    assert [count for _, count in found.workers] == [4, 3, 2]


def test_many_marks_are_numbers_in_the_picture_and_say_there_what_they_are_but_keep_their_names():
    many = [{"kind": "lost", "worker": number, "time": 101.0 + number / 4} for number in range(12)]
    found = history_of(METRICS, [*many, {"kind": "draining", "worker": 1, "node": "a74b0000c", "time": 105.0}])
    assert [mark.shown for mark in found.marks[:3]] == ["0", "1", "2"] and found.marks[2].label == "worker 2 lost"
    assert (found.marks[-1].shown, found.marks[-1].label) == ("a74b", "node a74b0000 will leave")
    drawing = throughput_svg(found, title="t")
    assert "numbers: workers; beside a drain: beginnings of nodes' ids" in drawing.replace("&#x27;", "'")
    assert "<title>worker 2 lost, at" in drawing
    assert "numbers:" not in throughput_svg(history_of(METRICS, EVENTS), title="t")


def test_no_samples_come_in_a_pause_and_none_get_lost():
    found = history_of(METRICS, EVENTS)
    bins = throughput_bins(found.steps, found.end_s)
    assert sum((end - start) * rate for start, end, rate in bins) == pytest.approx(32)
    assert any(rate == 0 and start >= 2 and end <= 4 for start, end, rate in bins)


def lines_and_labels(drawing):
    """[(x, highest y)] of the marks' lines, [(x, y, width, text)] of their labels."""
    lines, labels = [], []
    for group in ET.fromstring(drawing).iter(f"{SVG}g"):
        if group.find(f"{SVG}title") is None:
            continue
        x, y = re.match(r"M([\d.]+) ([\d.]+)V", group.find(f"{SVG}path").get("d")).groups()
        lines.append((float(x), float(y)))
        text = group.find(f"{SVG}text")
        if text is not None:
            labels.append((float(text.get("x")), float(text.get("y")), 0.56 * _LABEL * len(text.text), text.text))
    return lines, labels


@pytest.mark.parametrize("seed", range(20))
def test_no_label_lies_on_another_or_on_a_line_or_outside_the_picture(seed):
    chance = random.Random(seed)
    marks = [
        ChartMark(chance.uniform(0, 60), chance.choice([*MARK_KINDS]), "x" * chance.randrange(1, 25))
        for _ in range(chance.randrange(1, 40))
    ]
    lines, labels = lines_and_labels(throughput_svg(RunHistory((), (), marks, (), 60.0), title="t"))
    assert len(lines) == len(marks) and labels
    for i, (x, y, width, _) in enumerate(labels):
        assert x + width <= 1280 and y > 80
        for at, highest in lines:
            assert not (x < at < x + width and highest < y), "a line goes through a label"
        for other_x, other_y, other_width, _ in labels[i + 1 :]:
            assert abs(other_y - y) >= _LABEL or other_x >= x + width or x >= other_x + other_width


def test_the_drawing_tells_pauses_and_kinds_in_its_legend():
    drawing = throughput_svg(history_of(METRICS, EVENTS), title="tiny <4 steps>")
    shown = ["".join(text.itertext()) for text in ET.fromstring(drawing).iter(f"{SVG}text")]
    assert {"tiny <4 steps>", "worker lost", "worker joined", "samples/s", "workers", "time, s"} <= set(shown)
    assert "1 pause, 3.00 of 6.0 s" in shown and "driver lost" not in shown
    assert "workers 2, 3 lost" in shown


def loss_panel(losses, validation=()):
    """The drawing of a run with these losses, and the points of each line in its panel."""
    metrics = [{**step(n, 100.0 + n, 1.0), "loss": loss} for n, loss in enumerate(losses, 1)]
    metrics += [{"step": n, "validation_loss": loss, "time": 100.0 + n, "seconds": 0.1} for n, loss in validation]
    drawing = throughput_svg(history_of(metrics, []), title="t")
    paths = [
        path.get("d") for path in ET.fromstring(drawing).iter(f"{SVG}path") if path.get("stroke") in ("#3B4CA0", "#B8336A")
    ]
    return drawing, [[tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) ([\d.]+)", path)] for path in paths]


def test_the_loss_has_a_panel_of_its_own_below_the_throughput_on_the_same_time_axis():
    drawing, (line, validation) = loss_panel([4.0, 2.0, 1.0, 2.0], validation=[(2, 3.0), (4, 2.5)])
    shown = ["".join(text.itertext()) for text in ET.fromstring(drawing).iter(f"{SVG}text")]
    assert {"samples/s", "loss", "workers", "loss validation"} <= set(shown)
    assert [x for x, _ in line] == sorted(x for x, _ in line) and len(line) == 4 and len(validation) == 2
    heights = [y for _, y in line]
    assert heights[0] < heights[1] < heights[2] > heights[3], "down is less"
    assert validation[-1][0] == pytest.approx(line[-1][0], abs=0.1), "after the same step, at the same time"
    assert "<title>validation, at 2.0 s: 3</title>" in drawing


def test_a_run_without_a_finite_loss_has_no_such_panel_and_huge_ones_are_left_out():
    for losses in ([float("nan"), None], [float("inf")], [1e301]):
        drawing, lines = loss_panel(losses)
        assert not lines and ">loss<" not in drawing
    assert len(loss_panel([1.0, 1e301, 2.0])[1][0]) == 2


def test_losses_over_many_decades_are_drawn_on_a_logarithmic_axis():
    drawing, _ = loss_panel([100.0, 1.0, 0.01])
    assert ">loss (log)<" in drawing


def test_the_loss_of_thousands_of_steps_is_drawn_within_bounds_and_its_peak_stays():
    losses = [2.0] * 20_000
    losses[14_000] = 9.0
    drawing, lines = loss_panel(losses)
    assert len(drawing) < 150_000 and len(lines) == 2
    faint, mean = lines
    assert len(faint) <= 800 and len(mean) <= 82
    assert min(y for _, y in faint) < min(y for _, y in mean) - 50


def test_the_report_has_a_chart_of_its_own_for_the_loss_and_does_not_draw_it_twice():
    from raypar.console.run_report import RunFiles, build_run_report
    from raypar.console.run_status import build_run_status

    metrics = [{**step(n, 100.0 + n, 1.0), "loss": 1 / n} for n in range(1, 9)]
    more = {"steps": 8, "plan": None, "members": None, "cluster": None, "now": 109.0}
    view = view_of(metrics)
    status = build_run_status("tiny", "runs/tiny", view, **more)
    report = build_run_report(status, RunFiles(view, None, None, None, None), 109.0)
    assert report.loss_chart and ">loss<" not in report.throughput_chart and ">samples/s<" in report.throughput_chart


def test_a_run_without_steps_is_still_a_drawing_and_the_command_writes_it(tmp_path, capsys):
    folder = RunFolder.create(tmp_path, "tiny")
    folder.job.write_text("steps: 4\n")
    assert main(["status", str(folder.path), "--svg", str(tmp_path / "empty.svg")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"picture: {tmp_path / 'empty.svg'}"
    ET.fromstring((tmp_path / "empty.svg").read_text())
    for line in METRICS:
        folder.append_line(folder.metrics, line)
    assert main(["status", str(folder.path), "--svg", str(tmp_path / "x.svg")]) == 0
    assert "tiny: 4 of 4 steps" in (tmp_path / "x.svg").read_text()
    assert main(["status", str(folder.path), "--svg", str(tmp_path / "no" / "x.svg")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_run_that_was_resumed_thousands_of_times_is_drawn_too():
    """Others may have written the folder. The time must not be that of every start beside every line."""
    count = 20_000
    starts = [{"kind": "started", "time": 1000.0 + 10 * number} for number in range(count)]
    steps = [
        {"step": number + 1, "loss": 1.0, "seconds": 1.0, "samples_per_s": 8.0, "time": 1003.0 + 10 * number}
        for number in range(count)
    ]
    began_s = time.process_time()
    found = history_of(steps, starts)
    assert time.process_time() - began_s < 5
    assert len(found.between_starts_s) <= MOST_MARKS and set(found.between_starts_s) == {7.0}, (
        "7 s between an end and the next start"
    )
