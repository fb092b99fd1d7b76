"""`raypar report`: a run as one HTML page. It loads nothing, escapes all texts, tells no secrets, stays small."""

import json
import random
import re
import time
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers.recorded_runs import view_of

from raypar.actors.worker_and_generation_events import training_facts
from raypar.cli import main
from raypar.console.run_report import RunFiles, build_run_report
from raypar.console.run_report_html import run_report_html
from raypar.console.run_status import build_run_status
from raypar.draw.chrome_trace import chrome_trace
from raypar.draw.line_chart import ChartSeries, bucket_means, downsample_min_max, line_chart_svg
from raypar.draw.run_history_chart import RunHistory, throughput_svg
from raypar.draw.swimlane_as_json import draw_step_of_trace, draw_swimlane_data, swimlane_data
from raypar.draw.swimlane_svg import swimlanes_svg
from raypar.files.redact_secrets import REMOVED, is_secret_name, redact_text, redact_value, secrets_of_environment
from raypar.record.totals import RunTotals
from raypar.schedule.step_timeline import Timeline

BEGAN = 1_795_475_862.0
TAGS = {
    "html", "head", "meta", "title", "style", "body", "main", "header", "div", "h1", "h2", "span", "p", "nav", "a", "section",
    "dl", "dt", "dd", "table", "thead", "tbody", "tr", "th", "td", "ul", "ol", "li", "i", "time", "pre", "footer",
    "svg", "g", "path", "rect", "circle", "text", "tspan", "defs", "pattern", "marker",
}  # fmt: skip
HOSTILE = "</svg></style></pre><script>alert(1)</script><img src=x onerror=alert(2)>"


def step_line(step, loss=None, seconds=0.5, at_s=None, workers=4):
    return {
        "time": BEGAN + (step * seconds if at_s is None else at_s), "step": step, "loss": 3.0 / step if loss is None else loss,
        "norm": 1.0, "count": 4096.0, "seconds": seconds, "samples_per_s": 32 / seconds, "bubble": 0.25,
        "peak_rss_bytes": [400 << 20] * (workers - 1) + [500 << 20],
    }  # fmt: skip


METRICS = [step_line(step) for step in range(1, 51)]
METRICS.insert(25, {"time": BEGAN + 12.6, "step": 25, "validation_loss": 0.5, "count": 100, "seconds": 0.1})
METRICS.append({"time": BEGAN + 25.2, "step": 50, "validation_loss": 0.75, "count": 100, "seconds": 0.1})
EVENTS = [
    {
        "kind": "started",
        "time": BEGAN,
        "text": "4 workers on 1 node",
        "fingerprint": {"torch": "2.13.0+cpu", "processor": "AMD 25"},
    },
    {"kind": "checkpoint", "time": BEGAN + 5, "step": 10, "path": "a"},
    {"kind": "checkpoint", "time": BEGAN + 10, "step": 20, "path": "b"},
    {"kind": "lost", "time": BEGAN + 15, "worker": 3, "why": "it died"},
    {"kind": "generation", "time": BEGAN + 16, "generation": 2, "workers": [0, 1, 2], "step": 30, "pause_s": 0.8, "again": 1},
    {"kind": "end", "time": BEGAN + 25.3, "end": "done", "why": "all 50 steps are done", "step": 50},
]
PLAN = {
    "schedule": "1f1b",
    "stages": [
        {"first": 0, "last": 2, "position": 0, "replicas": 2, "shards": 1},
        {"first": 2, "last": 3, "position": 1, "replicas": 2, "shards": 1},
    ],
    "layers": [{"name": n, "parameters": 1000, "parameter_bytes": 4000} for n in ("embed", "block0", "head")],
    "predicted_ms": 480.0,
    "predicted_bubble": 0.2,
    "predicted_for": "4 workers on 4 processors",
    "predicted_memory_bytes": [{"parameter": 8 << 20, "gradient": 8 << 20, "optimizer": 16 << 20, "activations": 9 << 20}] * 4,
}
JOB = "name: tiny\nsteps: 50\nmodel: {function: m:layers, args: {width: 8}}\n"


class Page(HTMLParser):
    """Tags, attributes and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.words = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def step_panels(name: str) -> list[tuple[str, Timeline]]:
    """A predicted and a measured step of two workers."""
    rows = [[("0F0", 0.0, 1.0), ("0B0", 3.0, 5.0)], [("1F0", 1.0, 2.0), ("1B0", 2.0, 3.0)]]
    return [
        (heading, Timeline.from_spans(rows, [name, "worker 1"])) for heading in ("predicted before the run", "measured: step 5")
    ]


def drawn_step(name: str) -> str:
    """A trace.json with the data of a drawn step."""
    data = swimlane_data(step_panels(name), title=name, routes=[("activation", 0, 1)])
    return json.dumps({"traceEvents": [], "otherData": {"swimlane": data}})


def is_closed(page: Page) -> None:
    """It has elements and attributes of ours only, runs nothing, and refers to nothing but places within itself."""
    assert page.tags <= TAGS, page.tags - TAGS
    for name, value in page.attributes:
        assert not name.startswith("on") and name not in ("src", "srcset", "action", "data", "xlink:href", "background"), name
        assert name != "href" or re.fullmatch(r"#[a-z]+", value), value
        assert "url(" not in (value or "") or re.fullmatch(r"url\(#(idle|tip)\)", value), value


@pytest.fixture
def write_run(tmp_path):
    """`write_run(job=..., ...)` writes a run folder, and returns the text of its report."""

    def write(name="tiny", job=JOB, metrics=METRICS, events=EVENTS, plan=PLAN, **more) -> str:
        folder = tmp_path / "runs" / name
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        (folder / "job.yaml").write_text(job)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
        (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
        (folder / "plan.json").write_text(json.dumps(plan))
        for file, text in more.items():
            (folder / file.replace("_", ".")).write_text(text)
        assert main(["report", str(folder), "--out", str(tmp_path / "out.html")]) == 0
        return (tmp_path / "out.html").read_text()

    return write


def test_a_report_says_what_was_trained_how_fast_and_what_happened(write_run):
    text = Page(write_run()).text
    for said in (
        "tiny", "done", "2 stages x 2 replicas, schedule 1f1b", "all 50 steps are done", "steps 50 of 50",
        "goodput 100.0 %", "bubble 25.0 % predicted 20.0 %", "recoveries 1 0.8 s of pauses, 1 step again",
        "loss 0.0600 first 3.0000", "validation loss 0.7500 best 0.5000 at step 25",
        "A step was predicted to take 480 ms with 4 workers on 4 processors; the median of all steps is 500 ms.",
        "0 embed .. block0 2 2,000 2 1", "stage 1, replica 1", "41.0", "500.0", "lost worker 3: it died",
        "generation 2: 3 workers", "step 20: checkpoint saved", "torch 2.13.0+cpu", "args: {width: 8}",
        "drawing of a step: none of those that are measured",
    ):  # fmt: skip
        assert said in text, said
    assert "batch size" not in text and "learning rate" not in text, "an earlier release did not write them"
    contract = {"optimizer": {"function": "torch.optim:AdamW", "args": {"lr": 0.001}, "groups": [["norm", {"lr": 0}]]}}
    started = EVENTS[0] | training_facts(contract | {"batch_size": 64, "microbatches": 8})
    rates = [{**line, "lr": 0.001 / line["step"]} if "loss" in line else line for line in METRICS]
    text = Page(write_run(events=[started, *EVENTS[1:]], metrics=rates)).text
    for said in (
        "optimizer AdamW lr=0.001, 1 group with other arguments", "batch size 64 in 8 microbatches",
        "learning rate 2e-05 first 0.001, largest 0.001",
    ):  # fmt: skip
        assert said in text, said
    assert "step 10: checkpoint" not in text, "of a row of checkpoints the last one"


def test_a_page_loads_nothing_runs_nothing_and_names_no_address(write_run):
    page = write_run()
    is_closed(Page(page))
    assert not re.search(r"https?:|@import|//\w|javascript:|data:", page)
    assert "default-src 'none'" in page and "prefers-color-scheme:dark" in page and "@media print" in page


def test_a_run_that_has_just_begun_has_a_report_too(write_run, tmp_path):
    page = Page(write_run(metrics=[], events=[{**EVENTS[0], "time": time.time()}], plan={}))
    is_closed(page)
    assert "No step has been finished yet" in page.text and "tiny starting" in page.text
    assert "no drawing of a step yet: it is written when the run ends" in page.text
    (tmp_path / "runs/bare/checkpoints").mkdir(parents=True)
    assert main(["report", str(tmp_path / "runs/bare"), "--out", str(tmp_path / "bare.html")]) == 0
    is_closed(Page((tmp_path / "bare.html").read_text()))


def test_a_run_under_way_a_failed_one_and_losses_that_are_not_finite_are_told(write_run):
    members = json.dumps({"phase": "waiting", "time": BEGAN + 30, "why": "2 workers of 4"})
    text = Page(write_run(events=EVENTS[:-1], members_json=members)).text
    assert "no news for" in text and "drawing of a step: the run's driver did not come to its end" in text
    end = {**EVENTS[-1], "end": "failed", "why": "the disk is gone"}
    text = Page(write_run("bad", events=[*EVENTS[:-1], end], metrics=[{**line, "loss": None} for line in METRICS[:9]])).text
    assert "failed" in text and "the disk is gone" in text and "loss not finite 9 steps" in text


def test_hostile_names_and_values_are_texts_and_nothing_else(write_run):
    plan = {**PLAN, "schedule": HOSTILE, "layers": [{"name": HOSTILE, "parameters": 1} for _ in range(3)]}
    events = [
        {"kind": "started", "time": BEGAN, "text": HOSTILE, "precision": HOSTILE, "fingerprint": {HOSTILE: HOSTILE}},
        {"kind": "lost", "time": BEGAN + 3, "worker": 3, "why": HOSTILE, "coordinate": HOSTILE, "node": HOSTILE},
        {"kind": "draining", "time": BEGAN + 4, "worker": 3, "why": HOSTILE, "node": HOSTILE},
        {"kind": HOSTILE, "time": BEGAN + 5, "text": HOSTILE},
        {"kind": "end", "time": BEGAN + 90, "end": HOSTILE, "why": HOSTILE, "step": 50},
    ]
    members = {"phase": HOSTILE, "plan": HOSTILE, "members": [{"worker": i, "node": HOSTILE, "pid": 1} for i in range(4)]}
    lane = drawn_step(HOSTILE)
    page = write_run(
        "a'><script>b(1)<", job=f"name: '{HOSTILE}'\n'{HOSTILE}': 1\nsteps: 50\n", plan=plan, events=events,
        members_json=json.dumps(members), trace_json=lane,
    )  # fmt: skip
    is_closed(Page(page))
    assert "<script" not in page and page.count("</svg>") == page.count("<svg") and "alert(1)" in page


def test_plans_of_any_size_and_damaged_files_leave_a_report(write_run):
    huge = {**PLAN, "stages": [{"first": 0, "last": 3, "position": 0, "replicas": 2**31, "shards": 2**31}]}
    wrong = {**PLAN, "stages": [{"first": 5, "last": 1, "position": 7, "replicas": 1}]}
    wide = {"schedule": "x", "stages": [{"first": 0, "last": 3, "position": 0, "replicas": 5000, "shards": 1}]}
    assert "seat" not in Page(write_run(plan=huge)).text and "seat" not in Page(write_run(plan=wrong)).text
    assert "And 4,872 workers more" in Page(write_run(plan=wide)).text
    assert "cannot be read" in Page(write_run(job="a: [")).text
    assert main(["report", "/nowhere/at/all"]) == 2


SECRETS = {
    "url": "s3cretPassw0rd", "query": "sigv4deadbeefcafe", "key": "hunter2hunter2", "aws": "AKIAABCDEFGHIJKLMNOP",
    "hub": "hf_abcdefghijklmnopqrstuv", "event": "ghp_abcdefghijklmnopqrst0123", "env": "ray-token-0123456789abcdef",
    "bearer": "abcdefgh12345678", "number": "31415926", "lane": "glpat-abcdefghijklmnopqrst",
    "print": "sk-abcdefghijklmnopqrstuvwx",
}  # fmt: skip


def test_no_secret_is_in_a_report(write_run, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", SECRETS["env"])
    job = {
        "name": "tiny", "steps": 50, "note": f"the cluster has {SECRETS['env']}",
        "data": {"function": "m:data", "args": {
            "source": f"postgres://me:{SECRETS['url']}@db:5432/x", "api_key": SECRETS["key"],
            "db_password": int(SECRETS["number"]),
            "links": [f"https://store/a?X-Amz-Signature={SECRETS['query']}&n=1"], "hub": SECRETS["hub"], "id": SECRETS["aws"],
            "headers": {"Authorization": [f"Bearer {SECRETS['bearer']}"]},
        }},
        "plan": {"styles": {"embed.token": "vocabulary"}}, "model": {"args": {"max_tokens": 77, "tokenizer": "byte-pairs"}},
    }  # fmt: skip
    events = [
        {"kind": "started", "time": BEGAN, "text": "ok", "fingerprint": {"settings": f"HF_TOKEN={SECRETS['print']}"}},
        {"kind": "warning", "time": BEGAN + 1, "text": f"cannot clone with {SECRETS['event']} --password {SECRETS['url']}"},
        {"kind": "end", "time": BEGAN + 90, "end": "failed", "why": f"token={SECRETS['key']} {SECRETS['env']}", "step": 50},
    ]
    lane = drawn_step(f"run {SECRETS['lane']}")
    page = write_run(job=json.dumps(job), events=events, trace_json=lane)
    assert {name for name, secret in SECRETS.items() if secret in page} == set()
    for kept in ("embed.token: vocabulary", "max_tokens: 77", "byte-pairs", "db:5432/x", "n=1", "run [removed]"):
        assert kept in Page(page).text, kept


@pytest.mark.ci
def test_thousands_of_steps_and_events_make_a_small_page_with_its_peaks():
    chance = random.Random(7)
    metrics = [step_line(s, loss=2 + chance.random(), seconds=0.05) for s in range(1, 20_001)]
    metrics[14_320]["loss"] = 987.5
    events = [EVENTS[0]]
    for i in range(1500):
        at = BEGAN + 0.6 * i
        events.append({"kind": "lost", "worker": i, "time": at, "why": "it died " * 9})
        events.append({"kind": "generation", "generation": i + 2, "workers": [i], "time": at + 0.3, "pause_s": 0.1, "step": i})
    view = view_of(metrics, events)
    status = build_run_status("long", "runs/long", view, steps=20_000, plan=PLAN, members=None, cluster=None, now=BEGAN + 1000)
    files = RunFiles(view, PLAN, None, None, None)
    page = run_report_html(build_run_report(status, files, BEGAN + 1000))
    assert len(page) < 600_000
    text = Page(page).text
    assert "2,701 lines left out" in text and "20,000" in text
    loss = next(d for d in re.findall(r'<path d="([^"]+)"[^>]*opacity="0.35"', page))
    heights = [float(y) for _, y in re.findall(r"([\d.]+) ([\d.]+)", loss)]
    assert min(heights) < 70 < sorted(heights)[1], "the one peak is drawn"


def test_downsampling_keeps_least_and_largest_values_and_order():
    points = [(float(i), 0.0) for i in range(10_000)]
    points[1234], points[9999], points[5000] = (1234.0, 5.0), (9999.0, -3.0), (5000.0, 1.0)
    few = downsample_min_max(points, 100)
    assert len(few) <= 200 and few == sorted(few)
    assert {(1234.0, 5.0), (9999.0, -3.0), (5000.0, 1.0)} <= set(few)
    assert downsample_min_max(points[:200], 100) == points[:200]
    assert bucket_means([(0.0, 1.0), (1.0, 3.0), (10.0, 5.0)], 2) == [(0.5, 2.0), (10.0, 5.0)]
    assert downsample_min_max([(1.0, float(i)) for i in range(999)], 10) == [(1.0, 0.0), (1.0, 998.0)]


@pytest.mark.parametrize(
    "values",
    [[], [0.0], [5.0] * 3, [1e-12, 2e-12], [1e300, -1e300], [1e-300, 1e30], [1e-5, 1e5],
     [float("nan"), 1.0], [float("inf")], [-1.0, 1.0],
     [1.7e308, -1.7e308], [5e-324, 1e-323]],
)  # fmt: skip
@pytest.mark.parametrize("zero", [False, True])
def test_a_line_chart_draws_any_values(values, zero):
    series = [ChartSeries("a<b", "#2B7BBA", [(float(i), v) for i, v in enumerate(values)], noisy=True, dots=True)]
    drawn = line_chart_svg(series, title="t<", x_name="step", y_name="loss", zero=zero)
    assert "nan" not in drawn and "inf" not in drawn and "a<b" not in drawn
    ET.fromstring(drawn)


def test_a_step_is_drawn_again_from_its_data_as_it_was():
    panels = step_panels("worker & 0")
    data = json.loads(json.dumps(swimlane_data(panels, title="a < b", routes=[("activation", 0, 1)])))
    assert draw_swimlane_data(data, str) == swimlanes_svg(panels, title="a < b", routes=[("activation", 0, 1)])
    assert "removed" in (draw_swimlane_data(data, lambda text: "removed") or "")


@pytest.mark.parametrize("change", [
    lambda data: {}, lambda data: [data], lambda data: None, lambda data: data | {"panels": []},
    lambda data: data | {"panels": data["panels"] * 5}, lambda data: data | {"title": 3},
    lambda data: data | {"title": "x" * 9999}, lambda data: data | {"routes": [["a", -1, 0]]},
    lambda data: data | {"routes": [["a"]]}, lambda data: data | {"routes": "abc"},
    *(lambda data, key=key, value=value: data | {"panels": [data["panels"][0] | {key: value}]} for key, value in (
        ("rows", [[["0F0", 0.0, float("nan")]]]), ("rows", [[["0F0", 2.0, 1.0]]]), ("rows", [[["<script>", 0.0, 1.0]]]),
        ("rows", [[["0F" + "9" * 30, 0.0, 1.0]]]), ("rows", [[["0F0", 0.0, 1e300]]]), ("rows", [[[0, 0, 0]]]), ("rows", [7]),
        ("rows", []), ("names", ["a"]), ("names", [1, 2]), ("busy_ms", ["x", "y"]), ("peak_activations", [-1, 0]),
        ("makespan_ms", None), ("heading", {}),
    )),
])  # fmt: skip
def test_data_that_are_none_of_raypars_are_not_drawn(change):
    data = swimlane_data(step_panels("worker 0"), title="t", routes=[])
    assert draw_swimlane_data(data, str) is not None and draw_swimlane_data(change(data), str) is None


def test_of_a_trace_without_data_the_measured_step_is_drawn_and_said_where_the_prediction_is():
    """An older release, which kept the drawing alone."""
    ((_, step), *_) = step_panels("worker 0")
    drawn = draw_step_of_trace(json.loads(json.dumps(chrome_trace(step))), str)
    assert drawn == swimlanes_svg([("measured (the prediction: see swimlane.svg)", step)], title="")
    for rank in (-7, 10**9, 1.0, "a", None):
        events = [{"ph": "X", "name": "0F0", "args": {"rank": rank}, "ts": 0, "dur": 0}]
        assert draw_step_of_trace({"traceEvents": events}, str) is None
    for odd in ({}, {"traceEvents": 3}, {"traceEvents": [{"ph": "M", "name": "thread_name", "args": {}, "tid": []}]}):
        assert draw_step_of_trace(odd, str) is None


def test_a_step_with_very_many_instructions_leaves_no_data(monkeypatch):
    monkeypatch.setattr("raypar.draw.swimlane_as_json.MOST_SPANS", 3)
    assert swimlane_data(step_panels("worker 0"), title="t", routes=[]) is None


def test_a_report_draws_the_step_and_says_where_the_drawing_of_an_older_run_is(write_run):
    page = write_run(trace_json=drawn_step("worker 0"))
    is_closed(Page(page))
    assert "measured: step 5" in Page(page).text and "drawing of a step" not in Page(page).text
    assert "is swimlane.svg in the run folder" in Page(write_run("old", swimlane_svg="<svg><script/></svg>")).text


def test_many_pauses_and_changes_of_workers_are_drawn_within_bounds():
    pauses = tuple((i * 0.1, i * 0.1 + 0.05) for i in range(20_000))
    workers = tuple((i * 0.1, i % 5) for i in range(20_000))
    drawn = throughput_svg(RunHistory(((0.0, 2000.0, 8.0),), workers, (), pauses, 2000.0), title="")
    assert len(drawn) < 150_000 and "20000 pauses" in drawn
    assert 'font-size="22"' not in drawn, "without a title"


@pytest.mark.parametrize(
    "name",
    ["token", "RAY_AUTH_TOKEN", "apiKey", "api-key", "dbpassword", "DB_PASSWORD", "Authorization", "aws_secret_access_key"],
)
def test_names_of_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["tokenizer", "author", "key", "keys", "heads", "lr", "monkey", "passes"])
def test_names_of_no_secrets(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "before, after",
    [
        ("https://me:pw@host/x", f"https://{REMOVED}@host/x"),
        ("redis://:p@ss@host:6379", f"redis://{REMOVED}@host:6379"),
        ("see https://host/a?b=1&token=abc&c=2", f"see https://host/a?b=1&token={REMOVED}&c=2"),
        ("password: 'a b', x", f"password: {REMOVED}, x"),
        ("cure: install both, step 3: loss 2.0", "cure: install both, step 3: loss 2.0"),
        ("worker 3 (stage 1, replica 1; pid 5901, node b09ad58f)", "worker 3 (stage 1, replica 1; pid 5901, node b09ad58f)"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY----- x", f"{REMOVED} x"),
    ],
)
def test_secrets_in_texts(before, after):
    assert redact_text(before) == after


def test_redacting_a_long_text_takes_no_long_time():
    for letter in "-_.a:@/?&=":
        redact_text(letter * 20_000 + "\n")
    redact_text("://" * 7_000)
    redact_text("a://b@" * 3_000)


def test_values_of_the_environment_that_are_secret():
    given = {"RAY_AUTH_TOKEN": "abcdefghij", "RAY_AUTH_MODE": "disabled", "TOKEN": "short", 
             "SSH_AUTH_SOCK": "/tmp/a/b/c-socket",
             "RAY_AUTH_TOKEN_PATH": "/home/me/.ray/auth_token", "PATH": "/usr/bin"}  # fmt: skip
    assert secrets_of_environment(given) == ["abcdefghij"]
    assert redact_value({"a": ["x abcdefghij"]}, ["abcdefghij"]) == {"a": [f"x {REMOVED}"]}


def test_a_report_needs_no_torch(tmp_path):
    import subprocess
    import sys

    run = tmp_path / "runs/tiny"
    (run / "checkpoints").mkdir(parents=True)
    code = f"import sys; from raypar.cli import main; main(['report', {str(run)!r}, '--out', {str(tmp_path / 'x.html')!r}])"
    code += "; print(sorted({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert found.stdout.splitlines()[-1] == "[]", found.stdout


def test_the_goodput_is_that_of_the_runs_totals_as_in_raypar_top():
    metrics = [{"step": i, "loss": 1.0, "seconds": 0.5, "samples_per_s": 8.0, "time": BEGAN + i} for i in (1, 2, 3)]
    view = view_of(metrics)
    status = build_run_status("run", "runs/run", view, steps=3, plan=PLAN, members=None, cluster=None, now=BEGAN + 9)
    totals = RunTotals(steps=3, useful_worker_s=3.0, worker_s=6.0, startup_worker_s=1.0)
    files = RunFiles(view, PLAN, None, None, None, totals.as_document())
    facts = {fact.name: fact.value for fact in build_run_report(status, files, BEGAN + 9).facts}
    assert facts["goodput"] == f"{100 * totals.goodput:.1f} %" == "60.0 %"


def test_what_workers_hold_stands_below_what_they_were_predicted_to_hold():
    view = view_of(METRICS)
    status = build_run_status("run", "runs/run", view, steps=50, plan=PLAN, members=None, cluster=None, now=BEGAN + 30)
    held = {"rss": 350 << 20, "empty": 300 << 20, "peak_rss": 400 << 20, "parameter": 8 << 20, "optimizer": 17 << 20}
    files = RunFiles(view, PLAN, None, None, None, {"worker_memory_bytes": [held] * 4})
    report = build_run_report(status, files, BEGAN + 30)
    assert report.workers[0].above_empty_bytes == 50 << 20
    page = run_report_html(report)
    text = Page(page).text
    for words in ("predicted and measured", "measured, MiB", "measured peak, MiB", "everything else", "50.0"):
        assert words in text, words
    assert 'title="optimizer state: 17.0 MiB"' in page and 'title="everything else: 25.0 MiB"' in page
    for damaged in ([held] * 3, "x", [{"rss": "x", "empty": True}] * 4, [{}] * 4):
        files = RunFiles(view, PLAN, None, None, None, {"worker_memory_bytes": damaged})
        assert "measured, MiB" not in Page(run_report_html(build_run_report(status, files, BEGAN + 30))).text
