"""Chrome trace events of timelines."""

import itertools
import json

from raypar.draw.chrome_trace import chrome_trace, chrome_trace_of_run
from raypar.draw.run_history_chart import ChartMark, RunHistory
from raypar.schedule.step_timeline import Timeline

MEASURED = Timeline.from_spans(
    [[("0F0", 0.0, 1.5), ("0B0", 4.0, 6.0), ("0G", 5.0, 7.0), ("V", 7.0, 7.5)], [("1F0", 1.5, 2.5), ("1B0", 2.5, 4.0)]],
    names=["worker 0 (stage 0, replica 0)", "worker 1 (stage 1, replica 0)"],
)


def events(trace, phase):
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_every_span_is_a_complete_event_in_microseconds_with_its_place():
    trace = json.loads(json.dumps(chrome_trace(MEASURED)))
    found = {event["name"]: event for event in events(trace, "X")}
    assert set(found) == {"0F0", "0B0", "0G", "V", "1F0", "1B0"}
    assert (found["0B0"]["ts"], found["0B0"]["dur"]) == (4000, 2000)
    assert found["1B0"]["args"] == {"stage": 1, "microbatch": 0, "rank": 1}
    assert found["1B0"]["cat"] == "backward"
    assert trace["otherData"] == {"makespan_ms": 7.5}


def test_nodes_are_processes_and_workers_are_named_threads():
    trace = chrome_trace(MEASURED, nodes=["n1", "n2"])
    names = {(e["pid"], e["args"]["name"]) for e in events(trace, "M") if e["name"] == "process_name"}
    assert names == {(0, "n1"), (1, "n2")}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events(trace, "M") if e["name"] == "thread_name"}
    for event in events(trace, "X"):
        assert threads[event["pid"], event["tid"]].startswith(MEASURED.names[event["args"]["rank"]])


def test_complete_events_of_one_thread_do_not_overlap():
    by_thread: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events(chrome_trace(MEASURED), "X"):
        by_thread.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_thread.values():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_held_activations_are_a_counter_that_returns_to_zero():
    counts = [(e["ts"], e["args"]["held"]) for e in events(chrome_trace(MEASURED), "C") if "worker 0" in e["name"]]
    assert counts == [(0.0, 1), (6000.0, 0)]


def test_the_trace_of_a_run_shows_the_gap_between_two_steps():
    history = RunHistory(
        steps=((0.0, 0.5, 8.0), (1.7, 2.2, 8.0)),
        workers=((0.0, 4), (0.6, 3)),
        marks=(ChartMark(0.6, "lost", "worker 2 lost"),),
        pauses=((0.6, 1.7),),
        end_s=2.2,
    )
    events = chrome_trace_of_run(history, first=41)["traceEvents"]
    slices = [(e["name"], round(e["ts"]), round(e["dur"])) for e in events if e["ph"] == "X"]
    assert slices == [("step 41", 0, 500_000), ("step 42", 1_700_000, 500_000), ("nobody trains", 600_000, 1_100_000)]
    assert [(e["name"], e["ts"]) for e in events if e["ph"] == "i"] == [("worker 2 lost", 600_000.0)]
    assert [e["args"]["workers"] for e in events if e["ph"] == "C"] == [4, 3]


def test_gathers_and_reductions_have_threads_of_their_own_since_they_overlap():
    rows = [[("0A", 0.0, 1.0), ("0F0", 1.0, 3.0), ("2A", 1.0, 6.0), ("0B0", 3.0, 4.0), ("0G", 4.0, 5.0)]] * 2
    trace = chrome_trace(Timeline.from_spans(rows))
    named = {e["tid"]: e["args"]["name"] for e in events(trace, "M") if e["name"] == "thread_name"}
    assert sorted(named.values()) == [
        f"worker {rank}{what}" for rank in (0, 1) for what in ("", ": gather of parameters", ": reduction")
    ]
    for event in events(trace, "X"):
        what = {"gather": ": gather of parameters", "reduction": ": reduction"}.get(event["cat"], "")
        assert named[event["tid"]] == f"worker {event['args']['rank']}{what}"
