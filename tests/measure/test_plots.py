"""Bars: as long as their values, each in its row, with a line at the level."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from outrider.measure.plots import Axes, Point, Series, bars


def test_bars_are_as_long_as_their_values_and_stand_in_their_rows() -> None:
    series = [Series("one", [Point(0, 1.0), Point(1, 3.0)]), Series("two & more", [Point(1, 2.0)])]
    picture = ElementTree.fromstring(bars(Axes("speeds", "times plain", "", level=1.0), ["code", "chat <b>"], series))
    drawn = [rect for rect in picture.iter("rect") if rect.find("title") is not None]
    widths = {rect.findtext("title"): float(rect.get("width", 0)) for rect in drawn}
    unit = widths["one, code: 1"]
    expected = {"one, code: 1": unit, "one, chat <b>: 3": 3 * unit, "two & more, chat <b>: 2": 2 * unit}
    assert widths == pytest.approx(expected, abs=0.3)  # tenths of a pixel
    level = next(line for line in picture.iter("line") if line.get("class") == "level")
    assert float(level.get("x1", 0)) == pytest.approx(float(drawn[0].get("x", 0)) + unit, abs=0.2)
    tops = [float(rect.get("y", 0)) for rect in drawn]
    assert tops[0] < tops[1] < tops[2]  # one, code; one, chat; two, chat
    assert max(tops) + 13 < float(picture.get("viewBox", "").split()[3])
    assert [text.text for text in picture.iter("text") if text.get("class") == "value"] == ["1.00", "3.00", "2.00"]
