"""`--report FILE`: a plan as one HTML page or one SVG file that needs no other file."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path

from trainshed.errors import InputError
from trainshed.plan.layout import describe_layout, format_layout
from trainshed.plan.planner import Plan
from trainshed.plan.report.charts import (
    DRAWING_STYLE,
    DRAWING_WIDTH,
    SvgDrawing,
    layouts_chart,
    memory_chart,
    scaling_chart,
    step_chart,
    step_timeline,
    timeline_chart,
)
from trainshed.plan.report.text import describe_run, describe_trained, format_seconds

_MARGIN = 28
_PAGE_STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def write_report(plan: Plan, path: Path, *, top: int) -> None:
    """Write the page or the picture, by the suffix of the file's name."""
    check_report_path(path)
    text = html_page(plan, top=top) if path.suffix == ".html" else svg_sheet(plan, top=top)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", where=str(path)) from None


def check_report_path(path: Path) -> None:
    """Refuse a suffix that is neither .html nor .svg, before any work is done."""
    if path.suffix not in (".html", ".svg"):
        raise InputError(
            f"a report is a page or a picture, and `{path.name}` is neither",
            where="--report",
            hint=f"write {path.stem}.html or {path.stem}.svg",
        )


def plan_charts(plan: Plan, *, top: int) -> list[tuple[str, SvgDrawing]]:
    """Return the charts of a plan with their titles, top to bottom."""
    chosen = plan.chosen
    timeline = step_timeline(chosen, plan.request.training.global_batch)
    count = f"{timeline.micro_batches:,} micro-batch" + ("es" if timeline.micro_batches > 1 else "")
    if not timeline.is_whole:
        count = f"{timeline.shown} of {count} drawn: the middle repeats"
    charts = [
        ("Memory by pipeline stage" if len(chosen.stages) > 1 else "Memory", memory_chart(chosen)),
        (f"One step: {format_seconds(chosen.step_seconds)}", step_chart(chosen)),
        (f"The step in time, {count}", timeline_chart(timeline)),
    ]
    if plan.runners_up:
        charts.append(("The best layouts side by side", layouts_chart([chosen, *plan.runners_up][:top])))
    if plan.scaling is not None:
        charts.append(("Scaling: the best layout at each number of GPUs", scaling_chart(plan.scaling)))
    return charts


def svg_sheet(plan: Plan, *, top: int) -> str:
    """Draw everything on one sheet."""
    sheet = SvgDrawing(width=DRAWING_WIDTH + 2 * _MARGIN)
    title, subtitle = plan_headline(plan)
    y = float(_MARGIN)
    body = SvgDrawing()
    body.text(0, 20, title, "head")
    body.text(0, 42, subtitle, "soft")
    body.text(0, 68, describe_layout(plan.chosen.layout), "accent")
    body.text(0, 90, " · ".join(f"{figure} {word}" for figure, word, _ in key_figures(plan)))
    sheet.place(body, _MARGIN, y)
    y += 128
    for words, chart in plan_charts(plan, top=top):
        name = SvgDrawing()
        name.text(0, 0, words, "title")
        sheet.place(name, _MARGIN, y)
        sheet.place(chart, _MARGIN, y + 18)
        y += 18 + chart.height + 36
    sheet.height = y
    paper = SvgDrawing()
    paper.rect(0, 0, sheet.width, sheet.height, css="paper")
    sheet.elements = [*paper.elements, *sheet.elements]
    return sheet.svg(style=DRAWING_STYLE, label=title)


def html_page(plan: Plan, *, top: int) -> str:
    """Write a page that needs nothing but itself."""
    title, subtitle = plan_headline(plan)
    boxes = "".join(
        f'<div class="figure{" bad" if bad else ""}"><b>{escape(figure)}</b><span>{escape(word)}</span></div>'
        for figure, word, bad in key_figures(plan)
    )
    charts = "".join(
        f"<section><h2>{escape(words)}</h2>\n{chart.svg(label=words)}</section>\n"
        for words, chart in plan_charts(plan, top=top)
    )
    rejected = "".join(
        f"<tr><td><code>{escape(str(entry.layout))}</code></td><td>{escape(entry.reason)}</td>"
        f"<td>{entry.alike:,}</td></tr>"
        for entry in plan.rejected
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<style>\n{DRAWING_STYLE}{_PAGE_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="asked">{escape(subtitle)}</p>\n'
        f'<p class="layout">{escape(describe_layout(plan.chosen.layout))}</p>\n'
        f"<p><code>--layout {escape(format_layout(plan.chosen.layout))}</code></p>\n"
        f'<div class="figures">{boxes}</div>\n{charts}'
        f"{_html_run(plan)}{_html_list('Why this layout', plan.explanation)}{_html_list('Notes', plan.notes)}"
        + (
            f"<section><h2>Rejected</h2>\n<table><tr><th>layout<th>reason<th>alike</tr>{rejected}</table></section>\n"
            if rejected
            else ""
        )
        + "</main>\n</body>\n</html>\n"
    )


def notebook_html(plan: Plan) -> str:
    """Return a plan as a notebook shows it: the figures as a table, the charts as a picture below."""
    title, subtitle = plan_headline(plan)
    figures = "".join(f"<th>{escape(figure)}</th>" for figure, _, _ in key_figures(plan))
    words = "".join(f"<td>{escape(word)}</td>" for _, word, _ in key_figures(plan))
    notes = "".join(f"<li>{escape(note)}</li>" for note in plan.notes)
    # As an image: the style of the charts would otherwise be that of every cell.
    picture = base64.b64encode(svg_sheet(plan, top=5).encode()).decode()
    return (
        f"<div><b>{escape(title)}</b><br>{escape(subtitle)}<br><code>{escape(describe_layout(plan.layout))}</code>"
        f"<table><tr>{figures}</tr><tr>{words}</tr></table>"
        + (f"<details><summary>{len(plan.notes)} notes</summary><ul>{notes}</ul></details>" if notes else "")
        + f'<details><summary>charts</summary><img alt="{escape(title)}" src="data:image/svg+xml;base64,{picture}">'
        "</details></div>"
    )


def plan_text(plan: Plan) -> str:
    """Return a plan in a few lines of text."""
    title, subtitle = plan_headline(plan)
    figures = ", ".join(f"{figure} {word}" for figure, word, _ in key_figures(plan))
    return "\n".join([title, subtitle, describe_layout(plan.layout), figures])


def plan_headline(plan: Plan) -> tuple[str, str]:
    """Return a title, and a line below it."""
    training = plan.request.training
    machine = f" ({training.hardware.machine})" if training.hardware.machine else ""
    trained = describe_trained(training, plan.chosen.memory)
    return (
        f"{plan.request.name} on {training.gpus:,} × {training.hardware.gpu_name}{machine}",
        f"{training.sequence_length:,} tokens × {training.global_batch:,} sequences a step, {training.precision}, "
        f"{plan.request.engine}" + ("" if trained is None else f"; trains {trained}"),
    )


def key_figures(plan: Plan) -> list[tuple[str, str, bool]]:
    """Return the figures that matter most, each with its label and whether it is bad."""
    chosen, memory = plan.chosen, plan.chosen.memory
    return [
        (format_seconds(chosen.step_seconds), "a step", False),
        (f"{chosen.mfu:.1%}", "MFU", False),
        (f"{chosen.tokens_per_second_per_gpu:,.0f}", "tokens/s/GPU", False),
        (f"{chosen.tflops_per_gpu:,.0f}", "TFLOP/s/GPU", False),
        (
            f"{memory.total:.1f}",
            f"of {memory.capacity:.1f} GiB" + ("" if chosen.fits else ": too much"),
            not chosen.fits,
        ),
    ]


def _html_list(title: str, sentences: tuple[str, ...]) -> str:
    if not sentences:
        return ""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<section><h2>{title}</h2>\n<ul>{items}</ul></section>\n"


def _html_run(plan: Plan) -> str:
    if plan.budget is None:
        return ""
    lines = describe_run(plan.budget)
    rows = "".join(f"<tr><td>{escape(label)}</td><td>{escape(words)}</td></tr>" for label, words in lines)
    return f'<section><h2>The run</h2>\n<table class="run">{rows}</table></section>\n'
