"""Timelines as a swimlane drawing (SVG): one lane per worker, several timelines on one sheet and one time axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

from raypar.draw.svg_style import (
    CHARACTER_WIDTH,
    INK,
    LINE,
    QUIET,
    estimate_text_width,
    mix_with_white,
    readable_text_colour,
)
from raypar.draw.text_grid import format_activation_count, format_milliseconds, round_tick_step
from raypar.schedule.data_flow import MessageRoute
from raypar.schedule.instructions import INSTRUCTIONS, Compute, Instruction, drawing_style
from raypar.schedule.step_timeline import Timeline, TimelineSpan

_SMALLEST_NUMBER = 7.0
_MARGIN, _TITLE_SIZE, _NOTE_SIZE, _SEMI_BOLD = 24.0, 22.0, 12.0, 1.1
_NOTE = "numbers: microbatches; busy: share of the makespan; peak: activations held, in microbatches"
_LEAST_SHARE = 0.5
"""Share of the longest timeline below which a shorter one is drawn to a scale of its own."""
_MOST_LANES, _MOST_ARROWS, _MOST_TOOLTIPS = 96, 400, 4000


def swimlane_svg(
    timeline: Timeline, *, title: str, subtitle: str = "", routes: Sequence[MessageRoute] = (), width: int = 0
) -> str:
    """One timeline as a complete SVG document; see `swimlanes_svg`."""
    return swimlanes_svg([(subtitle, timeline)], title=title, routes=routes, width=width)


def swimlanes_svg(
    panels: Sequence[tuple[str, Timeline]],
    *,
    title: str,
    routes: Sequence[MessageRoute] = (),
    width: int = 0,
) -> str:
    """An SVG document of timelines (heading, timeline) below each other, to one scale; e.g. predicted and measured. One that is
    much shorter than the longest, and would be too narrow to read, has a scale of its own, and says so.

    `routes`: those of the messages that are drawn as arrows, left out where there are more than a few hundred.
    `width` in pixels; 0: from 1280 to 1920, so that microbatch numbers fit where possible. Of more than 96 workers, evenly
    chosen ones are drawn, and the drawing says so.
    """
    drawn = [_Panel.of(heading, timeline) for heading, timeline in panels]
    extent = max((p.timeline.makespan_ms for p in drawn), default=0.0) or 1.0
    left = 28 + max((estimate_text_width(name, p.font) for p in drawn for name in p.names), default=0.0)
    right = 132.0
    width = width or _width(drawn, extent, left + right)
    sheet = _Sheet(left, (width - left - right) / extent, width, extent)
    body, top = _title(title, width)
    legend, top = _legend(drawn, top + 30, width)
    body += legend
    top += 20
    for panel in drawn:
        body += panel.draw(sheet.of(panel.timeline.makespan_ms), top, routes)
        top += panel.height
    height = round(top + 12)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f"font-family=\"Inter, 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif\" fill=\"{INK}\">\n"
        f"<title>{escape(title)}</title>\n"
        '<defs><pattern id="idle" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="7" height="7" fill="#F7F8FA"/><path d="M0 0V7" stroke="#E1E6EB" stroke-width="2"/></pattern>'
        '<marker id="tip" viewBox="0 0 6 6" refX="5.4" refY="3" markerWidth="5" markerHeight="5" orient="auto">'
        f'<path d="M0 0.6L5.6 3L0 5.4z" fill="{INK}"/></marker></defs>\n'
        f'<rect width="{width}" height="{height}" fill="#FFFFFF"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


@dataclass(frozen=True)
class _Sheet:
    """A time scale: x = left + ms * per_ms, in pixels."""

    left: float
    per_ms: float
    width: int
    extent: float
    stretched: float = 1.0
    """How many times as wide as on the scale of the other panels."""

    def of(self, makespan_ms: float) -> _Sheet:
        """The scale of a timeline: this one, or, if it is much shorter, one on which it is as wide as the longest."""
        if not 0 < makespan_ms < _LEAST_SHARE * self.extent:
            return self
        times = self.extent / makespan_ms
        return replace(self, per_ms=self.per_ms * times, extent=makespan_ms, stretched=times)

    def x(self, ms: float) -> float:
        return self.left + ms * self.per_ms


@dataclass(frozen=True)
class _Panel:
    """One timeline and the ranks of it that are drawn. Sizes in pixels."""

    heading: str
    timeline: Timeline
    ranks: range
    lane: float
    gap: float
    font: float
    digits: int

    @staticmethod
    def of(heading: str, timeline: Timeline) -> _Panel:
        world = len(timeline.spans)
        step = max(1, -(-world // _MOST_LANES))
        while world % step:  # an even step picks the same replica of every position of a uniform plan
            step += 1
        count = world // step
        lane, gap, font = (32, 6, 13) if count <= 12 else (22, 4, 12) if count <= 32 else (13, 3, 10)
        digits = max(
            (len(str(getattr(s.instruction, "microbatch", 0))) for row in timeline.spans[::step] for s in row), default=1
        )
        return _Panel(heading, timeline, range(0, world, step), lane, gap, font, digits)

    @property
    def names(self) -> list[str]:
        return [self.timeline.names[rank] for rank in self.ranks]

    @property
    def top_margin(self) -> float:
        return 42.0

    @property
    def height(self) -> float:
        return self.top_margin + len(self.ranks) * (self.lane + self.gap) + 48

    def draw(self, sheet: _Sheet, top: float, routes: Sequence[MessageRoute]) -> list[str]:
        timeline = self.timeline
        lanes_top = top + self.top_margin
        bottom = lanes_top + len(self.ranks) * (self.lane + self.gap)
        out = [_caption(self, sheet, top + 18)]
        end = sheet.x(timeline.makespan_ms)
        out += [
            f'<g font-size="11" fill="{QUIET}" text-anchor="end">'
            f'<text x="{sheet.width - 70}" y="{lanes_top - 7:g}">busy</text>'
            f'<text x="{sheet.width - 24}" y="{lanes_top - 7:g}">peak</text></g>'
        ]
        ys = {rank: lanes_top + i * (self.lane + self.gap) for i, rank in enumerate(self.ranks)}
        for rank, y in ys.items():
            out.append(
                f'<rect x="{sheet.left:g}" y="{y:g}" width="{end - sheet.left:.2f}" height="{self.lane:g}" fill="url(#idle)"/>'
            )
            middle = y + self.lane / 2 + self.font * 0.36
            out.append(
                f'<g font-size="{self.font:g}"><text x="{sheet.left - 10:g}" y="{middle:g}" text-anchor="end">'
                f"{escape(timeline.names[rank])}</text>"
                f'<g text-anchor="end" fill="{QUIET}"><text x="{sheet.width - 70}" y="{middle:g}">'
                f'{1 - timeline.bubbles[rank]:.0%}</text><text x="{sheet.width - 24}" y="{middle:g}">'
                f"{format_activation_count(timeline.peak_activations[rank])}</text></g></g>"
            )
        out += _axis(sheet, timeline.makespan_ms, lanes_top, bottom)
        tooltips = sum(len(timeline.spans[rank]) for rank in self.ranks) <= _MOST_TOOLTIPS
        for rank, y in ys.items():
            out += self._boxes(sheet, timeline.spans[rank], y, tooltips)
        out += self._arrows(sheet, ys, routes)
        return out

    def _boxes(self, sheet: _Sheet, row: Sequence[TimelineSpan], y: float, tooltips: bool) -> list[str]:
        """Boxes with room for a number one by one; the rest of a lane as one path per colour, neighbours melted together."""
        out: list[str] = []
        computed = (s for s in row if s.instruction.role == "compute" and not s.instruction.runs_beside)
        widths = sorted((s.end_ms - s.start_ms) * sheet.per_ms for s in computed)
        largest = self._number_size(widths[len(widths) // 10]) if widths else 0.0
        if largest < _SMALLEST_NUMBER:  # the short boxes go without a number, the long ones need not
            largest = self.font
        small: dict[str, list[tuple[float, float]]] = {}
        last_colour = ""
        for span in sorted(filter(_takes_time, row), key=lambda span: span.instruction.runs_beside):
            colour = self._colour(span.instruction)
            x, w = sheet.x(span.start_ms), (span.end_ms - span.start_ms) * sheet.per_ms
            top, height = self._extent(span.instruction, y)
            text = str(getattr(span.instruction, "microbatch", ""))
            size = min(largest, self._number_size(w)) if text else 0.0
            if span.instruction.transfer == "read":
                text = ""
            elif size < _SMALLEST_NUMBER and span.instruction.role == "compute":
                boxes = small.setdefault(colour, [])
                if boxes and last_colour == colour and x - boxes[-1][1] < 0.2 and w < 3:
                    boxes[-1] = (boxes[-1][0], x + w)
                else:
                    boxes.append((x, x + w))
                last_colour = colour
                continue
            last_colour = ""
            tip = f"<title>{span.instruction}: {span.start_ms:.6g} to {span.end_ms:.6g} ms</title>" if tooltips else ""
            inset = min(0.6, w * 0.08)
            out.append(
                f'<rect x="{x + inset:.2f}" y="{top:g}" width="{max(w - 2 * inset, 0.3):.2f}" height="{height:g}" '
                f'rx="{min(3.0, w / 8, height / 3):.1f}" fill="{colour}"' + (f">{tip}</rect>" if tip else "/>")
            )
            if text:
                out.append(
                    f'<text x="{x + w / 2:.2f}" y="{y + self.lane / 2 + size * 0.36:.2f}" font-size="{size:.3g}" '
                    f'text-anchor="middle" pointer-events="none" fill="{readable_text_colour(colour)}">{text}</text>'
                )
        for colour, boxes in small.items():
            path = "".join(
                f"M{x + min(0.3, (end - x) * 0.1):.2f} {y:g}H{end - min(0.3, (end - x) * 0.1):.2f}v{self.lane:g}"
                f"H{x + min(0.3, (end - x) * 0.1):.2f}z"
                for x, end in boxes
            )
            out.append(f'<path d="{path}" fill="{colour}"/>')
        return out

    def _extent(self, instruction: Instruction, y: float) -> tuple[float, float]:
        """(top, height) of an instruction's box in a lane at y. What runs beside compute is a strip over it: gathers of
        parameters at the head of the lane, reductions and reads of offloaded activations at its foot."""
        if not instruction.runs_beside:
            return y, self.lane
        return (y, self.lane * 0.22) if instruction.role == "communication" else (y + self.lane * 0.7, self.lane * 0.3)

    def _number_size(self, width: float) -> float:
        """Font size at which the panel's longest microbatch number fits into a box of this width."""
        return min(self.font, width * 0.86 / (CHARACTER_WIDTH * self.digits))

    def _colour(self, instruction: Instruction) -> str:
        colour = drawing_style(type(instruction)).colour
        if not isinstance(instruction, Compute):
            return colour
        chunks = max(self.timeline.chunk_of.values(), default=0) + 1
        return mix_with_white(colour, 0.55 * self.timeline.chunk_of[instruction.stage] / max(1, chunks - 1))

    def _arrows(self, sheet: _Sheet, ys: dict[int, float], routes: Sequence[MessageRoute]) -> Iterable[str]:
        """Arrows from the instruction that made a bundle to the one that used it, if both lanes are drawn."""
        made: dict[tuple[str, int, int], tuple[int, TimelineSpan]] = {}
        for rank in ys:
            for span in self.timeline.spans[rank]:
                i = span.instruction
                if isinstance(i, Compute):
                    made.update(((what, i.stage, i.microbatch), (rank, span)) for what in i.makes)
        lines: list[str] = []
        for (what, stage, microbatch), (rank, span) in made.items():
            for carried, source, target in routes:
                other = made.get((what, target, microbatch))
                if carried != what or source != stage or other is None or other[0] == rank:
                    continue
                down = ys[other[0]] > ys[rank]
                y0 = ys[rank] + (self.lane - 3 if down else 3)
                y1 = ys[other[0]] + (1 if down else self.lane - 1)
                lines.append(f"M{sheet.x(span.end_ms) - 1:.1f} {y0:g}L{sheet.x(other[1].start_ms) + 2:.1f} {y1:g}")
        if not lines or len(lines) > _MOST_ARROWS:
            return []
        arrows = "".join(f'<path d="{line}"/>' for line in lines)
        return [f'<g fill="none" stroke="{INK}" stroke-width="0.9" opacity="0.55" marker-end="url(#tip)">{arrows}</g>']


def _width(panels: Sequence[_Panel], extent: float, margins: float) -> int:
    """A width that leaves room for two digits in nearly all boxes, between 1280 and 1920 pixels."""
    sizes = sorted(s.end_ms - s.start_ms for p in panels for r in p.ranks for s in p.timeline.spans[r])
    short = sizes[len(sizes) // 10] if sizes else extent
    return round(min(1920.0, max(1280.0, margins + 16 * extent / max(short, extent / 1e4))))


def _caption(panel: _Panel, sheet: _Sheet, y: float) -> str:
    timeline, world = panel.timeline, len(panel.timeline.spans)
    peak = max(timeline.peak_activations, default=0)
    facts = [
        f"makespan {format_milliseconds(timeline.makespan_ms)}",
        f"bubble {timeline.bubble_of_total:.1%} of total ({timeline.bubble_of_ideal:.1%} of ideal)",
        f"peak activations {format_activation_count(peak)} microbatches",
    ]
    if sheet.stretched > 1:
        facts.append(f"time scale of its own, {sheet.stretched:.3g} times as wide")
    if len(panel.ranks) < world:
        facts.append(f"{len(panel.ranks)} of {world:,} workers drawn")
    heading = f'<tspan font-weight="600">{escape(panel.heading)}</tspan>  ' if panel.heading else ""
    return (
        f'<text x="24" y="{y:g}" font-size="14" xml:space="preserve">{heading}'
        f'<tspan fill="{QUIET}">{escape("  ·  ".join(facts))}</tspan></text>'
    )


def _axis(sheet: _Sheet, makespan_ms: float, top: float, bottom: float) -> list[str]:
    step = round_tick_step(sheet.extent, max(2, int((sheet.width - sheet.left) / 90)))
    out = []
    for tick in range(int(makespan_ms / step + 1e-9) + 1):
        x = sheet.x(tick * step)
        out.append(
            f'<path d="M{x:.2f} {top - 3:g}V{bottom + 4:g}" stroke="{LINE}"/>'
            f'<text x="{x:.2f}" y="{bottom + 18:g}" font-size="11" text-anchor="middle" fill="{QUIET}">{tick * step:g}</text>'
        )
    x = sheet.x(makespan_ms)
    out.append(f'<path d="M{x:.2f} {top - 3:g}V{bottom + 4:g}" stroke="{INK}" stroke-dasharray="4 3"/>')
    out.append(
        f'<text x="{sheet.width - 24}" y="{bottom + 18:g}" font-size="11" text-anchor="end" fill="{QUIET}">time, ms</text>'
    )
    return out


def _takes_time(span: TimelineSpan) -> bool:
    return span.end_ms > span.start_ms


def _title(title: str, width: float) -> tuple[list[str], float]:
    """The title, with the note on numbers beside it or, where there is no room, below it; and the y of the lowest line."""
    y, room = 44.0, width - 2 * _MARGIN
    wide = _SEMI_BOLD * estimate_text_width(title, _TITLE_SIZE)
    size = min(_TITLE_SIZE, _TITLE_SIZE * room / max(wide, 1.0))
    body = [f'<text x="{_MARGIN:g}" y="{y:g}" font-size="{size:.3g}" font-weight="600">{escape(title)}</text>']
    place = f'x="{width - _MARGIN:g}" text-anchor="end"'
    if wide + _MARGIN + estimate_text_width(_NOTE, _NOTE_SIZE) > room:
        y, place = y + 22, f'x="{_MARGIN:g}"'
    body.append(f'<text {place} y="{y:g}" font-size="{_NOTE_SIZE:g}" fill="{QUIET}">{_NOTE}</text>')
    return body, y


def _legend(panels: Sequence[_Panel], y: float, width: float) -> tuple[list[str], float]:
    """The colours of what is drawn, in as many lines as they need, the first at y; and the y of the last line."""
    kinds = {type(s.instruction) for p in panels for r in p.ranks for s in p.timeline.spans[r] if _takes_time(s)}
    chunks = max((max(p.timeline.chunk_of.values(), default=0) + 1 for p in panels), default=1)
    noun = "role" if any(p.timeline.stage_noun == "role" for p in panels) else "chunk"
    ordered = [kind for kind in INSTRUCTIONS.values() if kind in kinds]
    items = [(drawing_style(kind).colour, drawing_style(kind).legend) for kind in ordered]
    if chunks > 1:
        text = f"second {noun} (lighter)" if chunks == 2 else f"{chunks} {noun}s, each lighter than the one before"
        items.append((mix_with_white("#2B7BBA", 0.55), text))
    items.append(("url(#idle)", "idle"))
    out, x = [f'<g font-size="13" fill="{QUIET}">'], 24.0
    for colour, text in items:
        if x > _MARGIN and x + 22 + estimate_text_width(text, 13) > width - _MARGIN:
            x, y = _MARGIN, y + 20
        out.append(
            f'<rect x="{x:.0f}" y="{y - 11:g}" width="16" height="13" rx="2.5" fill="{colour}" stroke="{LINE}"/>'
            f'<text x="{x + 22:.0f}" y="{y:g}">{text}</text>'
        )
        x += 22 + estimate_text_width(text, 13) + 26
    out.append("</g>")
    return out, y
