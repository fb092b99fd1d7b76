"""Writes a run's report as one HTML page that needs nothing beside it: no script, no font, no picture from elsewhere. Pure.

A policy in the page forbids the reader's browser to run scripts and to load anything, whatever texts the report has.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from html import escape

from raypar.console.run_report import FIRST_LINES, RunReport, StageRow, WorkerRow
from raypar.plan.ownership import STATE_KIND_NOUNS
from raypar.plan.wording import count_noun
from raypar.planner.memory_sheet import KEPT_NOUNS
from raypar.planner.plan_search import format_mib

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""The page's content security policy."""

MEMORY_NOUNS: dict[str, str] = {**{str(k): noun for k, noun in STATE_KIND_NOUNS.items()}, **KEPT_NOUNS}
"""Kind of memory -> its name."""
MEMORY_COLOURS = {
    "parameter": "#2B7BBA", "gradient": "#7FB2DC", "widened": "#7FB2DC", "master": "#1F5A8A",
    "optimizer": "#7A4FA3", "buffer": "#6B7480",
    "average": "#B07CC6", "buckets": "#A8C66C", "gather": "#CBDDA5", "gathered": "#8FB3C9", "mirror": "#C25B56",
    "activations": "#2FA584", "kept inputs": "#8ACDB7", "stash": "#D9861A",
}  # fmt: skip
"""Kind of memory -> its colour in bars."""

STYLE = """
:root{color-scheme:light dark;--page:#F4F6F8;--card:#FFFFFF;--ink:#1F2933;--quiet:#5B6773;--line:#DDE2E7;--soft:#EEF1F4;
--good:#1B7F5F;--warn:#A65F00;--bad:#B3261E;--accent:#2B7BBA}
@media (prefers-color-scheme:dark){:root{--page:#12161B;--card:#1A2027;--ink:#E4E9EE;--quiet:#9AA7B4;--line:#323B45;
--soft:#232B34;--good:#5CC7A2;--warn:#E5A24A;--bad:#F0857C;--accent:#6CB2E6}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);line-height:1.5;
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,"DejaVu Sans",sans-serif}
main{max-width:1400px;margin:0 auto;padding:36px 24px 56px}
header{margin:0 0 22px}
h1{font-size:32px;line-height:1.2;margin:0;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:18px;margin:0 0 4px}
.head{display:flex;flex-wrap:wrap;gap:6px 14px;align-items:center}
.chip{font-size:13px;font-weight:600;padding:2px 12px;border-radius:999px;border:1.5px solid currentColor;white-space:nowrap}
.good{color:var(--good)}.warn{color:var(--warn)}.bad{color:var(--bad)}
.sub{color:var(--quiet);margin:6px 0 0;overflow-wrap:anywhere}
nav{margin:12px 0 0;display:flex;flex-wrap:wrap;gap:2px 16px;font-size:14px}
a{color:var(--accent);text-decoration:none}a:hover{text-decoration:underline}
section{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:20px 22px;margin:0 0 16px}
section>p{margin:0 0 12px;color:var(--quiet);font-size:14px;max-width:100ch;overflow-wrap:anywhere}
.facts{display:grid;grid-template-columns:repeat(4,1fr);gap:1px;padding:0;overflow:hidden}
.fact{box-shadow:0 0 0 1px var(--line);padding:15px 20px 13px}
.fact dt{color:var(--quiet);font-size:13px}
.fact dd{margin:0}
.fact .value{font-size:24px;white-space:nowrap;font-weight:600;
line-height:1.3;font-variant-numeric:tabular-nums;letter-spacing:-.01em}
.fact .note{color:var(--quiet);font-size:12.5px}
.scroll{overflow-x:auto}
.drawing svg{display:block;width:100%;min-width:760px;height:auto}
.wide svg{min-width:1180px}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th{text-align:left;font-weight:600;color:var(--quiet);font-size:13px;white-space:nowrap}
th,td{padding:6px 14px 6px 0;border-bottom:1px solid var(--line);vertical-align:top}
tr:last-child td{border-bottom:0}
td.number,th.number{text-align:right}
td.name{overflow-wrap:anywhere;min-width:9em}
section>.scroll+.scroll{margin-top:18px}
.bar{display:flex;height:14px;border-radius:3px;overflow:hidden;background:var(--soft);min-width:180px;margin-top:4px}
.bar i{display:block;height:100%}
.keys{display:flex;flex-wrap:wrap;gap:2px 18px;color:var(--quiet);font-size:13px;margin:0 0 10px;padding:0;list-style:none}
.keys i{display:inline-block;width:11px;height:11px;border-radius:2.5px;margin-right:6px}
.story{list-style:none;margin:6px 0 0;padding:0;font-size:14px}
.story .day{display:block;font-weight:600;color:var(--quiet)}
.story li{display:grid;grid-template-columns:5em 1fr;gap:12px;padding:4px 0;border-bottom:1px solid var(--soft)}
.story li:last-child{border-bottom:0}
.story time{color:var(--quiet);font-variant-numeric:tabular-nums;white-space:nowrap}
.story span{white-space:pre-line;overflow-wrap:anywhere;padding-left:17px;text-indent:-17px}
.story span::before{content:"";display:inline-block;width:8px;height:8px;border-radius:50%;margin-right:9px;
background:var(--line);vertical-align:1px}
.story .good::before{background:var(--good)}.story .warn::before{background:var(--warn)}
.story .bad::before{background:var(--bad)}
.story span{color:var(--ink)}
pre{margin:0;font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre-wrap;
overflow-wrap:anywhere;background:var(--soft);border-radius:8px;padding:14px 16px}
footer{color:var(--quiet);font-size:13px;margin-top:22px}
@media screen and (prefers-color-scheme:dark){.drawing svg{filter:invert(.88) hue-rotate(180deg)}}
@media (max-width:640px){main{padding:20px 12px}section{padding:16px 14px}
.facts{grid-template-columns:repeat(2,1fr)}.fact{padding:12px 14px}
.fact .value{font-size:20px}.story li{grid-template-columns:1fr;gap:0}}
@page{margin:14mm}
@media print{:root{color-scheme:light;--page:#FFFFFF;--card:#FFFFFF;--ink:#1F2933;--quiet:#4A5560;--line:#C9D0D7;--soft:#F4F6F8;
--good:#1B7F5F;--warn:#A65F00;--bad:#B3261E;--accent:#2B7BBA}
h1{font-size:24px}h2{font-size:15px}section>p,table,.story{font-size:11px}pre{font-size:10px}p{orphans:3;widows:3}
body{font-size:12px;-webkit-print-color-adjust:exact;print-color-adjust:exact}main{padding:0;max-width:none}nav{display:none}
section{border:0;border-radius:0;padding:6px 0;margin:0 0 12px}.facts{border:1px solid var(--line)}
.fact .value{font-size:18px}.fact{padding:8px 10px}.drawing svg{min-width:0}.scroll{overflow:visible}
.facts{grid-template-columns:repeat(4,1fr)}
.drawing,tr,.story li,.fact,p{break-inside:avoid}h2,h2+p{break-after:avoid}}
"""


def run_report_html(report: RunReport) -> str:
    """The report as a complete HTML document."""
    parts = [(title, anchor, body) for title, anchor, body in _sections(report) if body]
    links = "".join(f'<a href="#{anchor}">{title}</a>' for title, anchor, _ in parts)
    sections = "\n".join(f'<section id="{anchor}"><h2>{title}</h2>\n{body}\n</section>' for title, anchor, body in parts)
    started = f"started {format_utc_time(report.started_at)}, " if report.started_at else ""
    why = f'<p class="sub">{escape(report.why)}</p>' if report.why else ""
    facts = "".join(
        f'<div class="fact"><dt>{escape(fact.name)}</dt><dd><div class="value {fact.tone}">{escape(fact.value)}</div>'
        f'<div class="note">{escape(fact.note)}</div></dd></div>'
        for fact in report.facts
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{escape(report.run)}: {escape(report.result)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<header>
<div class="head"><h1>{escape(report.run)}</h1><span class="chip {report.tone}">{escape(report.result)}</span></div>
<p class="sub">{escape(report.subtitle)}</p>
{why}
<p class="sub">{started}report of {format_utc_time(report.made_at)}</p>
<nav>{links}</nav>
</header>
<section class="facts">{facts}</section>
{sections}
<footer>Written by raypar from the files of the run folder. Goodput is the share of the time since the first step that was spent
in steps that count, without pauses, validations and checkpoints. The bubble is the share of the workers' time within a step in
which they compute nothing. Passwords, tokens and keys are removed where their names or shapes give them away.</footer>
</main>
</body>
</html>
"""


def _sections(report: RunReport) -> list[tuple[str, str, str]]:
    """(title, anchor, content) of each section; without content it is left out."""
    nothing = "<p>No step has been finished yet.</p>"
    lane = f"<p>{escape(report.swimlane_missing)}</p>"
    about_step = f"<p>{escape(report.step_prediction)}</p>" if report.step_prediction else ""
    survived = f"<p>Survived: {escape(report.survived)}.</p>" if report.survived else ""
    return [
        ("Loss", "loss", _drawing(report.loss_chart) or nothing),
        ("Metrics", "metrics", "".join(_drawing(chart) for chart in report.metric_charts)),
        (
            "Throughput and events",
            "throughput",
            survived + _drawing(report.throughput_chart) if report.throughput_chart else "",
        ),
        ("One step: predicted and measured", "step", about_step + (_drawing(report.swimlane, "wide") or lane)),
        ("Plan", "plan", _plan_tables(report)),
        ("Memory", "memory", _memory(report)),
        ("What happened", "story", _story(report)),
        ("Job", "job", f"<pre>{escape(report.job)}</pre>" if report.job else ""),
        ("Computed with", "environment", _environment(report)),
    ]


def _drawing(svg: str, kind: str = "") -> str:
    """One of our own drawings as a part of the page, without a size of its own. `kind`: wide for one with small texts."""
    inline = re.sub(r'^<svg xmlns="[^"]*" (viewBox="[^"]*") width="\d+" height="\d+"', r'<svg \1 role="img"', svg, count=1)
    return f'<div class="scroll"><div class="drawing {kind}">{inline}</div></div>' if svg else ""


def format_utc_time(at: float) -> str:
    """A time in UTC, which means the same to every reader: `2026-11-23 23:19:20 UTC`."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = (), names: Sequence[int] = ()) -> str:
    """A table of cells that are HTML already. `numbers`: columns to the right; `names`: columns that may break anywhere."""

    def kind(column: int) -> str:
        return ' class="number"' if column in numbers else ' class="name"' if column in names else ""

    head = "".join(f"<th{kind(i)}>{escape(text)}</th>" for i, text in enumerate(heads))
    body = "".join("<tr>" + "".join(f"<td{kind(i)}>{cell}</td>" for i, cell in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _plan_tables(report: RunReport) -> str:
    """The stages, and who had which seat."""
    if not report.stages:
        return ""
    chunks = any(stage.position != stage.stage for stage in report.stages)
    heads = ["stage", "layers", "number of layers", "parameters", "replicas", "shards", *["position"] * chunks]
    rows = [_stage_cells(stage, chunks) for stage in report.stages]
    text = _table(heads, rows, numbers=(2, 3, 4, 5, 6), names=(1,))
    known = any(worker.process for worker in report.workers)
    seats = [(escape(w.seat), *[escape(w.process) or "not recorded"] * known, escape(w.layers)) for w in report.workers]
    more = report.all_workers - len(report.workers)
    text += _table(["seat", *["worker"] * known, "layers"], seats, names=(2 if known else 1,))
    return text + (f"<p>And {count_noun(more, 'worker')} more.</p>" if more > 0 else "")


def _stage_cells(stage: StageRow, chunks: bool) -> tuple[str, ...]:
    parameters = f"{stage.parameters:,}" if stage.parameters is not None else "not recorded"
    numbers = (f"{stage.count:,}", parameters, f"{stage.replicas:,}", f"{stage.shards:,}")
    return (f"{stage.stage}", escape(stage.layers), *numbers, *[f"{stage.position}"] * chunks)


def _memory(report: RunReport) -> str:
    """Predicted and measured memory by worker, and over time."""
    text = ""
    if any(worker.predicted or worker.peak_bytes for worker in report.workers):
        bars = [(w, part) for w in report.workers for part in (dict(w.predicted), measured_parts(w)) if part]
        kinds = [kind for kind in (*MEMORY_NOUNS, REST) if any(part.get(kind) for _, part in bars)]
        above = any(worker.above_empty_bytes for worker in report.workers)
        if kinds:
            named = ((_memory_colour(kind), escape(MEMORY_NOUNS.get(kind, kind))) for kind in kinds)
            keys = "".join(f'<li><i style="background:{colour}"></i>{name}</li>' for colour, name in named)
            text += f'<p>{BOTH_MEASURED if above else PEAK_MEASURED}</p><ul class="keys">{keys}</ul>'
        most = max((sum(part.values()) for _, part in bars), default=0)
        peak = any(worker.peak_bytes for worker in report.workers)
        rows = [_memory_cells(worker, kinds, most, above=above, peak=peak) for worker in report.workers]
        heads = ["seat", *["predicted and measured" if above else "predicted", "MiB"] * bool(kinds)]
        heads += [*["measured, MiB"] * above, *["measured peak, MiB"] * peak]
        first = 2 if kinds else 1
        text += _table(heads, rows, numbers=tuple(range(first, len(heads))))
        more = report.all_workers - len(report.workers)
        text += f"<p>And {count_noun(more, 'worker')} more.</p>" if more > 0 else ""
    return text + _drawing(report.memory_chart)


PEAK_MEASURED = (
    "Predicted: what the job keeps. Measured: the largest resident memory of the whole process, in which Python, PyTorch and "
    "Ray have several hundred MiB of their own."
)
BOTH_MEASURED = (
    "Upper bars: what the job is predicted to keep at most. Lower bars: the resident memory of the process above that before "
    "it held anything of the model, with the tensors that it held between two steps; gradients and activations come and go "
    "within a step. The peak is of the whole process, in which Python, PyTorch and Ray have several hundred MiB of their own."
)
"""What the table of memory says."""
REST = "everything else"
"""What a process holds beside the tensors that are told apart."""


def measured_parts(worker: WorkerRow) -> dict[str, int]:
    """What a worker holds above its start: the tensors by kind, as it has reported them, and the rest; empty if not known."""
    if (above := worker.above_empty_bytes) is None:
        return {}
    parts = {kind: nbytes for kind, nbytes in worker.held.items() if kind in MEMORY_NOUNS}
    return {**parts, REST: max(0, above - sum(parts.values()))}


def _memory_cells(worker: WorkerRow, kinds: Sequence[str], most: int, *, above: bool, peak: bool) -> tuple[str, ...]:
    """A worker's row: its seat, bars of what it is predicted to hold and of what it holds, and the numbers that are known."""

    def bar(sizes: Mapping[str, int]) -> str:
        parts = "".join(
            f'<i style="width:{100 * sizes.get(kind, 0) / most:.2f}%;background:{_memory_colour(kind)}" '
            f'title="{escape(MEMORY_NOUNS.get(kind, kind))}: {format_mib(sizes.get(kind, 0))}"></i>'
            for kind in kinds
            if most
        )
        return f'<div class="bar">{parts}</div>'

    def mib(nbytes: int | None) -> str:
        return f"{nbytes / 2**20:,.1f}" if nbytes else "not recorded"

    measured = measured_parts(worker)
    drawn = bar(worker.predicted) + (bar(measured) if measured else "")
    predicted = (drawn, mib(sum(worker.predicted.values()))) if kinds else ()
    return (escape(worker.seat), *predicted, *[mib(worker.above_empty_bytes)] * above, *[mib(worker.peak_bytes)] * peak)


def _memory_colour(kind: str) -> str:
    return MEMORY_COLOURS.get(kind, "#6B7480")


def _story(report: RunReport) -> str:
    """The events as a list with their times; the day is told where it changes."""
    lines: list[str] = []
    day = ""
    for number, (at, tone, text) in enumerate(report.story):
        if report.lines_left_out and number == len(report.story) - _last_lines(report):
            lines.append(
                f"<li><time></time><span>{count_noun(report.lines_left_out, 'line')} left out: events.jsonl has all</span></li>"
            )
        when = format_utc_time(at) if at is not None else ""
        if when and when[:10] != day:
            day = when[:10]
            lines.append(f'<li class="day">{day}</li>')
        lines.append(f'<li><time>{when[11:19]}</time><span class="{tone}">{escape(text)}</span></li>')
    return f'<p>Times are in UTC.</p><ol class="story">{"".join(lines)}</ol>' if lines else ""


def _last_lines(report: RunReport) -> int:
    return len(report.story) - FIRST_LINES


def _environment(report: RunReport) -> str:
    """What a worker computed with."""
    if not report.environment:
        return "<p>The run folder does not say: it was written by an older raypar.</p>"
    rows = [(escape(name.replace("_", " ")), escape(value)) for name, value in report.environment]
    return (
        "<p>What the first worker of the last start has reported of itself; workers that differ are warnings above.</p>"
        + _table(("", ""), rows, names=(1,))
    )
