"""Swimlane drawings: well-formed, complete, to scale, and of a sensible size."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from raypar.draw.svg_style import estimate_text_width
from raypar.draw.swimlane_as_json import draw_swimlane_data, swimlane_data
from raypar.draw.swimlane_svg import swimlane_svg, swimlanes_svg
from raypar.draw.text_grid import text_grid
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan, StageConnections
from raypar.schedule import registry
from raypar.schedule.data_flow import message_routes
from raypar.schedule.instructions import INSTRUCTIONS
from raypar.schedule.simulate import SimulationCosts, simulate_schedule
from raypar.schedule.step_timeline import Timeline

SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(name, stages, microbatches, replicas=1, **costs):
    chunks = registry.resolve_chunks_per_worker(name)
    plan = ParallelPlan.mesh(pp=stages, dp=replicas, chunks=chunks, placement=registry.placement_of_schedule(name))
    routing = MicrobatchRouting(plan, Microbatches(microbatches, blocks=microbatches))
    n = stages * chunks
    return simulate_schedule(
        registry.build_schedule(name, routing),
        routing,
        StageConnections.chain(n),
        SimulationCosts((1,) * n, (1,) * n, (1,) * n, **costs),
    )


def boxes(root):
    """Instruction -> (x, width) of its box, from the tooltips."""
    return {
        box.find(f"{SVG}title").text.split(":")[0]: (float(box.get("x")), float(box.get("width")))
        for box in root.iter(f"{SVG}rect")
        if box.find(f"{SVG}title") is not None
    }


def texts(root):
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


def test_every_instruction_has_a_box_to_scale_with_its_microbatch():
    timeline = timeline_of("1f1b", 4, 8)
    root = ET.fromstring(swimlane_svg(timeline, title="1F1B <4 stages>"))
    found = boxes(root)
    assert set(found) == {str(span.instruction) for row in timeline.spans for span in row}
    per_ms = (found["0F1"][0] - found["0F0"][0]) / 1
    for row in timeline.spans:
        for instruction, start, end in row:
            x, width = found[str(instruction)]
            assert x == pytest.approx(found["0F0"][0] + start * per_ms, abs=1)
            assert width == pytest.approx((end - start) * per_ms, abs=2)
    assert "1F1B <4 stages>" in texts(root)
    assert texts(root).count("7") == 8
    assert any("makespan 33 ms" in text and "27.3% of total" in text for text in texts(root))


def test_lanes_are_labelled_with_coordinates_busy_share_and_peak():
    shown = texts(ET.fromstring(swimlane_svg(timeline_of("1f1b", 2, 3, replicas=2), title="t")))
    assert "worker 3 (stage 1, replica 1)" in shown
    assert {"busy", "peak", "forward (F)", "backward (B)", "idle", "time, ms"} <= set(shown)
    assert "input gradient (I)" not in shown


def test_chunks_and_zero_bubble_kinds_have_colours_of_their_own():
    drawing = swimlane_svg(timeline_of("zb-v", 2, 4), title="t")
    root = ET.fromstring(drawing)
    fills = {box.get("fill") for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None}
    assert len(fills) == 6
    assert "second chunk (lighter)" in texts(root)


def test_stages_that_placements_give_a_worker_are_called_roles():
    rows = [[("0F0", 0.0, 1.0), ("1F0", 1.0, 2.0)], [("1F0", 1.0, 2.0)]]
    hybrid = [
        "worker 0 (stage 0, replica 0; stage 1, replica 0, shard 0)",
        "worker 1 (stage 0, replica 1; stage 1, replica 0, shard 1)",
    ]
    for spans, names in ((rows, []), (rows[:1] * 2, hybrid)):
        shown = texts(ET.fromstring(swimlane_svg(Timeline.from_spans(spans, names), title="t")))
        assert "second role (lighter)" in shown and not any("chunk" in text for text in shown)
        assert "lower case: second role" in text_grid(Timeline.from_spans(spans, names))


def test_predicted_and_measured_share_one_axis():
    predicted = timeline_of("gpipe", 2, 2)
    measured = Timeline.from_spans([[("0F0", 10.0, 12.0), ("0B0", 15.0, 25.0), ("0G", 25.0, 26.0), ("V", 26.0, 28.0)]])
    root = ET.fromstring(swimlanes_svg([("predicted", predicted), ("measured", measured)], title="step 7"))
    shown = " ".join(texts(root))
    assert "predicted" in shown and "measured" in shown and "makespan 18 ms" in shown
    wide = [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    by_title = {box.find(f"{SVG}title").text: float(box.get("width")) for box in wide}
    assert by_title["0B0: 5 to 15 ms"] == pytest.approx(5 * by_title["0F0: 0 to 2 ms"], rel=0.05)


def test_a_much_shorter_timeline_has_an_axis_of_its_own_and_says_so():
    predicted, measured = timeline_of("gpipe", 2, 4), timeline_of("gpipe", 2, 4, overhead_ms=20)
    assert measured.makespan_ms > 5 * predicted.makespan_ms
    root = ET.fromstring(swimlanes_svg([("predicted", predicted), ("measured", measured)], title="step 7"))
    times = measured.makespan_ms / predicted.makespan_ms
    first, second = (text for text in texts(root) if text.startswith(("predicted", "measured")))
    assert f"time scale of its own, {times:.3g} times as wide" in first and "scale" not in second
    rects = [rect for rect in root.iter(f"{SVG}rect") if rect.get("fill") == "url(#idle)" and rect.get("stroke") is None]
    assert len({rect.get("width") for rect in rects}) == 1, "both are as wide as the sheet"


def test_messages_are_drawn_where_their_routes_are_given_and_there_are_few():
    few = timeline_of("1f1b", 2, 2, latency_ms=1)
    root = ET.fromstring(swimlane_svg(few, title="t", routes=message_routes(StageConnections.chain(2))))
    arrows = [g for g in root.iter(f"{SVG}g") if g.get("marker-end")]
    assert len(arrows) == 1 and len(arrows[0]) == 4
    assert 'marker-end="' not in swimlane_svg(
        timeline_of("1f1b", 4, 96), title="t", routes=message_routes(StageConnections.chain(4))
    )


def test_a_thousand_workers_make_a_drawing_of_one_replica_under_two_megabytes():
    drawing = swimlane_svg(timeline_of("1f1b", 32, 512, replicas=8), title="large")
    assert len(drawing) < 2_000_000
    shown = texts(ET.fromstring(drawing))
    assert any("64 of 256 workers drawn" in text for text in shown)
    assert "worker 4 (stage 0, replica 4)" in shown


def test_an_empty_timeline_is_still_a_drawing():
    ET.fromstring(swimlane_svg(Timeline.from_spans([[]]), title="nothing"))


def placed_texts(root):
    """(text, left, right, y) of all texts outside boxes, widths by the estimate that the drawing uses."""
    found = []

    def walk(node, size, anchor):
        size, anchor = float(node.get("font-size", size)), node.get("text-anchor", anchor)
        if node.tag == f"{SVG}text":
            text = "".join(node.itertext())
            width, x = estimate_text_width(text, size), float(node.get("x"))
            left = x - width if anchor == "end" else x - width / 2 if anchor == "middle" else x
            found.append((text, left, left + width, float(node.get("y"))))
        for child in node:
            walk(child, size, anchor)

    walk(root, 16, "start")
    return found


def test_numbers_and_titles_do_not_touch():
    """With recomputation peaks are no whole numbers; with shards the title is long."""
    timeline = replace(timeline_of("1f1b", 2, 4), peak_activations=(1.04745, 12.3456))
    title = "job: 8 workers = 2 stages x 2 replicas x 2 shards, schedule 1f1b, " + "recomputing 8 of 8 layers " * 4
    placed = placed_texts(ET.fromstring(swimlane_svg(timeline, title=title)))
    shown = [text for text, *_ in placed]
    assert {"1.05", "12.3"} <= set(shown) and any("peak activations 12.3 microbatches" in text for text in shown)
    for i, (text, left, right, y) in enumerate(placed):
        assert left >= 0 and right <= 1280, text
        touched = [t for t, a, b, line in placed[i + 1 :] if line == y and a < right + 4 and left < b + 4]
        assert not (touched and (text == title or "%" in text)), (text, touched)


def test_the_legend_names_what_is_drawn_in_colours_of_their_own():
    spans = [("0F0", 0.0, 2.0), ("0B0", 2.0, 4.0), ("T", 4.0, 4.0), ("V", 4.0, 5.0)]
    shown = texts(ET.fromstring(swimlane_svg(Timeline.from_spans([spans]), title="t")))
    assert "end of step: all workers agree" in shown and not any("tied" in text for text in shown)
    colours = [kind.drawing.colour for kind in INSTRUCTIONS.values() if kind.drawing is not None]
    assert len(set(colours)) == len(colours)


@pytest.mark.parametrize("name", registry.NAMES)
def test_a_simulated_step_is_drawn_again_from_its_data_as_it_was(name):
    timeline = timeline_of(name, 4, 8)
    routes = message_routes(StageConnections.chain(len(timeline.chunk_of)))
    data = json.loads(json.dumps(swimlane_data([("predicted", timeline)], title=name, routes=routes)))
    assert draw_swimlane_data(data, str) == swimlanes_svg([("predicted", timeline)], title=name, routes=routes)


def gathering():
    """Workers of three stages each, two replicas, whose gathers take longer than a forward."""
    plan = ParallelPlan.mesh(pp=2, dp=2, chunks=3).with_zero(3).with_gather("microbatch")
    routing, crossing = MicrobatchRouting(plan, Microbatches(8, blocks=8)), StageConnections.chain(6)
    costs = SimulationCosts((1,) * 6, (1,) * 6, (1,) * 6, gather_ms=(1.5,) * 6, reduce_ms=(2,) * 6, step_ms=1)
    return simulate_schedule(registry.build_schedule("interleaved", routing), routing, crossing, costs)


def test_gathers_are_strips_at_the_head_of_the_lane_over_what_computes_meanwhile():
    timeline = gathering()
    root = ET.fromstring(swimlane_svg(timeline, title="gathers"))
    assert "gather of parameters" in texts(root)
    lanes = [box for box in root.iter(f"{SVG}rect") if box.get("fill") == "url(#idle)" and box.get("height") == "32"]
    drawn, order = {}, []
    for box in root.iter(f"{SVG}rect"):
        if (title := box.find(f"{SVG}title")) is not None:
            letter, y = title.text.split(":")[0].strip("0123456789"), float(box.get("y"))
            lane = next(top for top in (float(one.get("y")) for one in lanes) if top <= y < top + 32)
            drawn.setdefault(letter, set()).add((round(y - lane, 1), float(box.get("height"))))
            order += [letter] if lane == float(lanes[0].get("y")) else []
    assert drawn["F"] == drawn["B"] == {(0, 32)} and drawn["A"] == {(0, 7.04)} and drawn["G"] == {(22.4, 9.6)}
    assert {*order[order.index("A") :]} == {"A", "G"}, "over the others"
    assert any(str(span.instruction) == "0A" and span.start_ms > 0 for span in timeline.spans[0]), "again"


def test_a_step_with_gathers_is_drawn_again_from_its_data():
    timeline = gathering()
    data = json.loads(json.dumps(swimlane_data([("predicted", timeline)], title="t", routes=[])))
    assert draw_swimlane_data(data, str) == swimlanes_svg([("predicted", timeline)], title="t", routes=[])
