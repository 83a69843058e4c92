"""What a matplotlib figure says, as data: the charts of E2B's code interpreter SDKs."""

from __future__ import annotations

import math
import re
from typing import Any

from matplotlib import dates
from matplotlib.category import StrCategoryConverter
from matplotlib.collections import PathCollection
from matplotlib.container import BarContainer
from matplotlib.patches import PathPatch, Wedge

MOST_POINTS = 50_000
SCALES = {"linear", "datetime", "categorical", "log", "symlog", "logit", "function", "functionlog", "asinh"}


def chart_of(figure: Any) -> dict[str, Any] | None:
    """None for a figure with nothing drawn, or with more points than are worth sending."""
    charts = [c for c in (_axes(a) for a in figure.axes if a.get_visible() and a.get_label() != "<colorbar>") if c is not None]
    if not charts or sum(len(e.get("points", ())) for c in charts for e in c["elements"]) > MOST_POINTS:
        return None
    if len(charts) == 1:
        return charts[0]
    title = figure.get_suptitle() if hasattr(figure, "get_suptitle") else ""
    return {"type": "superchart", "title": title or None, "elements": charts}


def _axes(ax: Any) -> dict[str, Any] | None:
    title = ax.get_title() or None
    wedges = [p for p in ax.patches if isinstance(p, Wedge)]
    if wedges:
        return {"type": "pie", "title": title, "elements": [_slice(w) for w in wedges]}
    for kind, elements in (("bar", _bars(ax)), ("box_and_whisker", _boxes(ax))):
        if elements is not None:
            turned, found = elements
            x, y = ("y", "x") if turned else ("x", "y")
            return {"type": kind, "title": title, **_labels(ax, "x", x), **_labels(ax, "y", y), "elements": found}
    for kind, found in (("line", _lines(ax)), ("scatter", _scatters(ax))):
        if found:
            return {"type": kind, "title": title, **_labels(ax, "x", "x"), **_labels(ax, "y", "y"), **_scale(ax, "x"), **_scale(ax, "y"), "elements": found}
    if ax.has_data() or ax.patches or ax.artists or ax.images or ax.collections or ax.texts:
        return {"type": "unknown", "title": title, "elements": []}
    return None


UNIT = re.compile(r"[(\[]([^()\[\]]+)[)\]]\s*$")


def _labels(ax: Any, name: str, axis: str) -> dict[str, Any]:
    """The label of an axis, and its unit: what stands in brackets at the end."""
    label = getattr(ax, f"get_{axis}label")() or None
    unit = UNIT.search(label) if label else None
    return {f"{name}_label": label, f"{name}_unit": unit.group(1) if unit else None}


def _number(value: Any) -> float | None:
    if value is None:  # masked
        return None
    value = float(value)
    return value if math.isfinite(value) else None


def _kind(axis: Any) -> str:
    converter = axis.get_converter() if hasattr(axis, "get_converter") else axis.converter
    if isinstance(converter, StrCategoryConverter):
        return "categorical"
    if isinstance(converter, (dates.DateConverter, dates.ConciseDateConverter, dates._SwitchableDateConverter)):
        return "datetime"
    scale = axis.get_scale()
    return scale if scale in SCALES else "unknown"


def _value(axis: Any, kind: str, value: Any) -> Any:
    if kind == "datetime":
        number = _number(value) if isinstance(value, (int, float)) or hasattr(value, "dtype") else value
        return None if number is None else dates.num2date(number).isoformat()
    if kind == "categorical":
        names = {v: k for k, v in axis.units._mapping.items()} if axis.units is not None else {}
        return names.get(round(float(value)), _number(value))
    return _number(value)


def _scale(ax: Any, name: str) -> dict[str, Any]:
    axis = getattr(ax, f"{name}axis")
    kind = _kind(axis)
    ticks = [t for t in axis.get_majorticklocs()]
    labels = axis.get_major_formatter().format_ticks(ticks)
    return {f"{name}_scale": kind, f"{name}_ticks": [_value(axis, kind, t) for t in ticks], f"{name}_tick_labels": [str(t) for t in labels]}


def _points(ax: Any, xs: Any, ys: Any) -> list[list[Any]]:
    x, y = _kind(ax.xaxis), _kind(ax.yaxis)
    return [[_value(ax.xaxis, x, a), _value(ax.yaxis, y, b)] for a, b in zip(xs, ys)]


def _lines(ax: Any) -> list[dict[str, Any]]:
    """Lines of data. One across the whole axes (axhline, a diagonal) is drawn in other coordinates."""
    lines = [line for line in ax.lines if line.get_transform() == ax.transData and len(line.get_xdata())]
    return [{"label": str(line.get_label()), "points": _points(ax, line.get_xdata(orig=False), line.get_ydata(orig=False))} for line in lines]


def _scatters(ax: Any) -> list[dict[str, Any]]:
    return [
        {"label": str(c.get_label()), "points": _points(ax, *zip(*c.get_offsets().tolist()))}
        for c in ax.collections
        if isinstance(c, PathCollection) and len(c.get_offsets())
    ]


def _slice(wedge: Any) -> dict[str, Any]:
    return {"label": str(wedge.get_label()), "angle": round(float(abs(wedge.theta2 - wedge.theta1)), 4), "radius": _number(wedge.r)}


def _names(axis: Any) -> dict[float, str]:
    """The labels of an axis by where they stand."""
    ticks = axis.get_majorticklocs()
    return {round(float(t), 6): s for t, s in zip(ticks, axis.get_major_formatter().format_ticks(ticks)) if s}


def _bars(ax: Any) -> tuple[bool, list[dict[str, Any]]] | None:
    groups = [c for c in ax.containers if isinstance(c, BarContainer) and len(c.patches)]
    if not groups:
        return None
    turned = groups[0].orientation == "horizontal"
    names = _names(ax.yaxis if turned else ax.xaxis)
    found = []
    for group in groups:
        for bar in group.patches:
            at = bar.get_y() + bar.get_height() / 2 if turned else bar.get_x() + bar.get_width() / 2
            label = names.get(round(float(at), 6))
            if label is None:  # one of several beside each other: the nearest
                near = min(names, key=lambda t: abs(t - at), default=None)
                label = names[near] if near is not None and abs(near - at) < 0.5 else f"{at:g}"
            value = bar.get_width() if turned else bar.get_height()
            found.append({"label": label, "group": str(group.get_label()), "value": _number(value)})
    return turned, found


def _boxes(ax: Any) -> tuple[bool, list[dict[str, Any]]] | None:
    """Box plots leave nothing but their lines: a box is a closed rectangle with a line across it."""
    rectangles = [p.get_path().vertices for p in ax.patches if isinstance(p, PathPatch) and len(p.get_path().vertices) >= 5]
    rectangles += [line.get_xydata() for line in ax.lines if len(line.get_xydata()) >= 5 and tuple(line.get_xydata()[0]) == tuple(line.get_xydata()[-1])]
    lines = [line.get_xydata() for line in ax.lines if len(line.get_xydata()) == 2 and line.get_linestyle() != "None"]
    dots = [line.get_xydata() for line in ax.lines if line.get_linestyle() == "None"]
    for turned in (False, True):
        along = 0 if turned else 1  # the coordinate of the values
        found = [b for b in (_box(r, lines, dots, along, _names(ax.yaxis if turned else ax.xaxis)) for r in rectangles) if b is not None]
        if found:
            return turned, found
    return None


def _box(rectangle: Any, lines: Any, dots: Any, along: int, names: dict[float, str]) -> dict[str, Any] | None:
    across = 1 - along
    low, high = rectangle[:, along].min(), rectangle[:, along].max()
    left, right = rectangle[:, across].min(), rectangle[:, across].max()
    middle = (left + right) / 2

    def near(a: float, b: float) -> bool:
        return abs(a - b) <= 1e-6 * max(1.0, abs(a), abs(b))

    median = [s[0, along] for s in lines if near(s[0, along], s[1, along]) and low <= s[0, along] <= high and near(s[:, across].min(), left) and near(s[:, across].max(), right)]
    whiskers = [s[:, along] for s in lines if near(s[0, across], middle) and near(s[1, across], middle)]
    if not median or len(whiskers) < 2:
        return None
    outliers = [_number(v) for d in dots for v in d[[near(x, middle) for x in d[:, across]]][:, along]] if dots else []
    return {
        "label": names.get(round(float(middle), 6), f"{middle:g}"),
        "min": _number(min(w.min() for w in whiskers)),
        "first_quartile": _number(low),
        "median": _number(median[0]),
        "third_quartile": _number(high),
        "max": _number(max(w.max() for w in whiskers)),
        "outliers": outliers,
    }
