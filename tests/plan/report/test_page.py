"""The report file: whole in itself, well-formed, and nothing a person wrote can break it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from support.recipes.small_plans import MEMORY, answer, layout, prediction
from trainshed.errors import InputError
from trainshed.plan.report.page import html_page, svg_sheet, write_report
from trainshed.plan.search.scaling import ScalingCurve, ScalingPoint

CURVE = ScalingCurve(
    (
        ScalingPoint(64, None, None, "does not fit"),
        ScalingPoint(128, prediction(layout(tp=8)), 1.0),
        ScalingPoint(256, prediction(layout(tp=8)), 0.75),
    ),
    256,
    "waiting grew",
)


def test_an_svg_is_well_formed_and_every_bar_says_what_it_is() -> None:
    root = ElementTree.fromstring(svg_sheet(replace(answer(), scaling=CURVE), top=5))
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "activations: 30.0 GiB" in titles
    assert "compute: 30.2 s" in titles
    assert "micro-batch 0, chunk 4, forward: 12 ms" in titles
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "Efficiency breaks at 256 GPUs: waiting grew." in words
    assert "no layout" in words


def test_a_page_needs_nothing_but_itself_and_has_a_dark_side() -> None:
    page = html_page(answer(), top=5)
    links = re.findall(r"""(?:src|href)=|https?://[^"' )]+|url\(|@import""", page)
    assert set(links) == {"http://www.w3.org/2000/svg"}
    assert "prefers-color-scheme: dark" in page
    for words in ("Why this layout", "Rejected", "The best layouts side by side", "tp 8 instead of 4"):
        assert words in page


def test_a_name_cannot_break_the_page() -> None:
    named = answer()
    named = replace(named, request=replace(named.request, name='<script>"&'))
    assert "<script>" not in html_page(named, top=5)
    ElementTree.fromstring(svg_sheet(named, top=5))


def test_too_much_memory_is_drawn_beyond_the_card() -> None:
    full = prediction(layout(tp=8, pp=4), memory=replace(MEMORY, activations=60.0))
    assert "103.3 (+23.7)" in svg_sheet(replace(answer(), chosen=full), top=1)
    assert "of 79.6 GiB: too much" in html_page(replace(answer(), chosen=full), top=1)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"`plan.pdf` is neither") as refused:
        write_report(answer(), tmp_path / "plan.pdf", top=5)
    assert refused.value.hint == "write plan.html or plan.svg"
    with pytest.raises(InputError, match="cannot be written: No such file"):
        write_report(answer(), tmp_path / "none" / "plan.svg", top=5)
