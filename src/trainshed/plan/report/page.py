"""`--report FILE`: a plan as one HTML page or one SVG, with nothing outside the file."""

from __future__ import annotations

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
from trainshed.plan.report.text import describe_run, format_seconds

_MARGIN = 28
_PAGE_STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def write_report(answer: Plan, path: Path, *, top: int) -> None:
    """Write the page or the picture, whichever the file's name asks for."""
    check_report_path(path)
    text = html_page(answer, top=top) if path.suffix == ".html" else svg_sheet(answer, top=top)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", where=str(path)) from None


def check_report_path(path: Path) -> None:
    """Refuse a file of a kind that is not written, before any work is done."""
    if path.suffix not in (".html", ".svg"):
        raise InputError(
            f"a report is a page or a picture, and `{path.name}` is neither",
            where="--report",
            hint=f"write {path.stem}.html or {path.stem}.svg",
        )


def plan_charts(answer: Plan, *, top: int) -> list[tuple[str, SvgDrawing]]:
    """Return the pictures of an answer with their titles, top to bottom."""
    chosen = answer.chosen
    drawn = step_timeline(chosen, answer.question.job.global_batch)
    count = f"{drawn.micro_batches:,} micro-batch" + ("es" if drawn.micro_batches > 1 else "")
    if not drawn.is_whole:
        count = f"{drawn.shown} of {count} drawn: the middle repeats"
    found = [
        ("Memory by pipeline stage" if len(chosen.stages) > 1 else "Memory", memory_chart(chosen)),
        (f"One step: {format_seconds(chosen.step_seconds)}", step_chart(chosen)),
        (f"The step in time, {count}", timeline_chart(drawn)),
    ]
    if answer.runners_up:
        found.append(("The best layouts side by side", layouts_chart([chosen, *answer.runners_up][:top])))
    if answer.scaling is not None:
        found.append(("Scaling: the best layout at each number of GPUs", scaling_chart(answer.scaling)))
    return found


def svg_sheet(answer: Plan, *, top: int) -> str:
    """Draw everything on one sheet."""
    sheet = SvgDrawing(width=DRAWING_WIDTH + 2 * _MARGIN)
    title, asked = plan_headline(answer)
    y = float(_MARGIN)
    body = SvgDrawing()
    body.text(0, 20, title, "head")
    body.text(0, 42, asked, "soft")
    body.text(0, 68, describe_layout(answer.chosen.layout), "accent")
    body.text(0, 90, " · ".join(f"{figure} {word}" for figure, word, _ in key_figures(answer)))
    sheet.place(body, _MARGIN, y)
    y += 128
    for words, chart in plan_charts(answer, top=top):
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


def html_page(answer: Plan, *, top: int) -> str:
    """Write a page that needs nothing but itself."""
    title, asked = plan_headline(answer)
    boxes = "".join(
        f'<div class="figure{" bad" if bad else ""}"><b>{escape(figure)}</b><span>{escape(word)}</span></div>'
        for figure, word, bad in key_figures(answer)
    )
    drawn = "".join(
        f"<section><h2>{escape(words)}</h2>\n{chart.svg(label=words)}</section>\n"
        for words, chart in plan_charts(answer, top=top)
    )
    rejected = "".join(
        f"<tr><td><code>{escape(str(each.layout))}</code></td><td>{escape(each.reason)}</td>"
        f"<td>{each.alike:,}</td></tr>"
        for each in answer.rejected
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<style>\n{DRAWING_STYLE}{_PAGE_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="asked">{escape(asked)}</p>\n'
        f'<p class="layout">{escape(describe_layout(answer.chosen.layout))}</p>\n'
        f"<p><code>--layout {escape(format_layout(answer.chosen.layout))}</code></p>\n"
        f'<div class="figures">{boxes}</div>\n{drawn}'
        f"{_html_run(answer)}{_html_list('Why this layout', answer.explanation)}{_html_list('Notes', answer.notes)}"
        + (
            f"<section><h2>Rejected</h2>\n<table><tr><th>layout<th>reason<th>alike</tr>{rejected}</table></section>\n"
            if rejected
            else ""
        )
        + "</main>\n</body>\n</html>\n"
    )


def plan_headline(answer: Plan) -> tuple[str, str]:
    """What was asked: a title, and a line below it."""
    job = answer.question.job
    machine = f" ({job.hardware.machine})" if job.hardware.machine else ""
    return (
        f"{answer.question.name} on {job.gpus:,} × {job.hardware.gpu_name}{machine}",
        f"{job.sequence_length:,} tokens × {job.global_batch:,} sequences a step, {job.precision}, "
        f"{answer.question.engine}",
    )


def key_figures(answer: Plan) -> list[tuple[str, str, bool]]:
    """Return the figures that matter most, each with its word and whether it is bad news."""
    chosen, memory = answer.chosen, answer.chosen.memory
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
    items = "".join(f"<li>{escape(each)}</li>" for each in sentences)
    return f"<section><h2>{title}</h2>\n<ul>{items}</ul></section>\n"


def _html_run(answer: Plan) -> str:
    if answer.budget is None:
        return ""
    lines = describe_run(answer.budget)
    rows = "".join(f"<tr><td>{escape(label)}</td><td>{escape(words)}</td></tr>" for label, words in lines)
    return f'<section><h2>The run</h2>\n<table class="run">{rows}</table></section>\n'
