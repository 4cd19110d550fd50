"""Names runs by the parts of their strategies and jobs in which they differ, and writes figures as text."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dure.core.spec_text import MemberSpec, parse_member
from dure.errors import StrategyError
from dure.report.record import RunRecord

NOTHING = "\N{EN DASH}"
_AXES = ("sync", "topology", "codec", "partition")
_DEFAULTS = ("", "none", "fp32")
_LONG_GRAPH = re.compile(r"((?:\d+-\d+/){3})[\d/-]{20,}")
_RATES = ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def strategies(runs: Sequence[RunRecord], figures: Sequence[Mapping[str, Any]]) -> list[str]:
    """The strategy of each run as text, without the axes that all runs share and without defaults.

    If runs of different jobs share a strategy, the parts in which their jobs differ come first.
    """
    parts = [_axes(run, values) for run, values in zip(runs, figures, strict=True)]
    jobs = _jobs(runs, parts)
    shown = _shown_axes(parts, jobs)
    texts = [
        " ".join([*filter(None, [job]), *(v[axis] for axis in _AXES if axis in shown and v[axis] not in _DEFAULTS)])
        for job, v in zip(jobs, parts, strict=True)
    ]
    names = [run.path.name if run.path else f"run {number}" for number, run in enumerate(runs, start=1)]
    return [text or name for text, name in zip(texts, names, strict=True)]


def shared_strategy(runs: Sequence[RunRecord]) -> str:
    """The parts that all strategies share, which the labels of the runs leave out."""
    parts = [_axes(run, run.summary()) for run in runs]
    shown = _shown_axes(parts, _jobs(runs, parts))
    return " ".join(parts[0][axis] for axis in _AXES if axis not in shown and parts[0][axis] not in _DEFAULTS)


def shared_job(runs: Sequence[RunRecord]) -> str:
    """The job of all runs; if only its parameters differ, the name and the parameters that all runs share."""
    texts = [_job(run) for run in runs]
    if len(set(texts)) == 1:
        return texts[0]
    first, *others = [_parsed(text) for text in texts]
    if any(other.name != first.name for other in others):
        return ""
    alike = [f"{key}={text}" for key, text in first.given.items() if all(o.given.get(key) == text for o in others)]
    return ":".join(filter(None, [first.name, ",".join(alike)]))


def unique(strategies: Sequence[str], places: Sequence[str]) -> list[str]:
    """Unique labels of runs: the strategy, the place if it is named, and a number if needed."""
    labels = [f"{text} ({place})" if place else text for text, place in zip(strategies, places, strict=True)]
    total, seen = Counter(labels), Counter[str]()
    for place, label in enumerate(labels):
        seen[label] += 1
        labels[place] = f"{label} #{seen[label]}" if total[label] > 1 else label
    return labels


def _axes(run: RunRecord, figures: Mapping[str, Any]) -> dict[str, str]:
    strategy = figures.get("strategy") or run.config.get("strategy") or run.config
    if isinstance(strategy, str):
        strategy = {"sync": strategy}
    texts = {axis: " ".join(str(strategy.get(axis) or "").split()) for axis in _AXES}
    return {axis: _LONG_GRAPH.sub(r"\1...", text) for axis, text in as_written(texts, run.config).items()}


def as_written(texts: Mapping[str, str], config: Mapping[str, Any]) -> Mapping[str, str]:
    """Members in the words of the configuration, and only those that it names, with the method in any case."""
    written = " ".join(str(config.get(key) or "") for key in ("strategy", *_AXES))
    words = {_name(word): word for word in written.split()}
    if not words:
        return texts
    found = {axis: words.get(_name(text), "") for axis, text in texts.items()}
    return {**found, "sync": found["sync"] or _name(texts["sync"])}


def _name(member: str) -> str:
    """The name of a member: "ssp" of "ssp:bound=3", "FILE.py:CLASS" of a user's own."""
    found = re.match(r"[^:+]*\.py:\w+|[^:+]*", member)
    return found[0] if found else ""


def _shown_axes(parts: Sequence[Mapping[str, str]], jobs: Sequence[str]) -> set[str]:
    """The axes in labels: those in which the runs differ, and the method, unless the jobs are in the labels."""
    differ = {axis for axis in _AXES if len(parts) == 1 or len({values[axis] for values in parts}) > 1}
    return differ if any(jobs) else differ | {"sync"}


def _job(run: RunRecord) -> str:
    return str(run.config.get("job") or "")


def _parsed(text: str) -> MemberSpec:
    try:
        return parse_member(text)
    except StrategyError:  # the name of a job object is any text
        return MemberSpec(text, {})


def _jobs(runs: Sequence[RunRecord], parts: Sequence[Mapping[str, str]]) -> list[str]:
    """The parts of each job that tell it from the others; empty if each strategy has one job only.

    Parameters are compared between jobs of one name.
    """
    texts = [_job(run) for run in runs]
    of_strategies = {(tuple(values.values()), text) for values, text in zip(parts, texts, strict=True)}
    if len(of_strategies) == len({strategy for strategy, _ in of_strategies}):
        return [""] * len(texts)
    found = [_parsed(text) for text in texts]
    several = len({each.name for each in found}) > 1
    return [_difference(each, [other for other in found if other.name == each.name], several) for each in found]


def _difference(job: MemberSpec, of_name: Sequence[MemberSpec], several: bool) -> str:
    """The parameters that not all jobs `of_name` share, after the name if there are `several` or none is given."""
    differ = [f"{key}={text}" for key, text in job.given.items() if any(o.given.get(key) != text for o in of_name)]
    return ":".join(filter(None, [job.name if several or not differ else "", ",".join(differ)]))


# --- figures as text


def seconds_text(seconds: float | None) -> str:
    """Three digits in a suitable unit: "3.20 ms", "12.4 s", "7 min 05 s", "2 h 10 min"."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (120.0, 1.0, "s")):
        if abs(seconds) < limit:
            return f"{_digits(seconds * factor)} {unit}" if seconds else "0 s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 120 else f"{minutes} min {rest:02d} s"


def bytes_text(nbytes: float | None) -> str:
    """Three digits in decimal units: "1.50 MB"."""
    if nbytes is None:
        return NOTHING
    for factor, unit in _BYTES:
        if nbytes >= factor:
            return f"{_digits(nbytes / factor)} {unit}"
    return f"{nbytes:.0f} B"


def rate_text(bandwidth: float) -> str:
    """Bytes per second as bits per second of a link: "1.25 Gbit/s"."""
    if not math.isfinite(bandwidth):
        return "any"
    factor, unit = next((pair for pair in _RATES if 8 * bandwidth >= pair[0]), _RATES[-1])
    return f"{float(f'{8 * bandwidth / factor:.3g}'):g} {unit}"


def compact_text(value: float) -> str:
    """A short text of a round number: "0.05", "200", "5k", "2M"."""
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def digits_text(value: float | None) -> str:
    """Three digits, and all of a larger number: "0.0123", "1.23", "12.3", "12,345"."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:#.3g}"


def count_text(count: float | None) -> str:
    """A whole number: "12,345"."""
    return NOTHING if count is None else f"{count:,.0f}"


def samples_text(rate: float) -> str:
    """Samples per second: "12,345", or three digits of a small rate: "9.41"."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def number_text(value: float | None) -> str:
    """Four digits: "0.1234"."""
    if value is None:
        return NOTHING
    return f"{value:.4f}" if 1e-3 <= abs(value) < 100 or value == 0 else f"{value:.4g}"


def return_text(value: float | None) -> str:
    """A return: "9.7", "195.3", "12,346"."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if math.isfinite(value) and abs(value) >= 1000 else f"{value:.4g}"


def mean_text(value: float | None) -> str:
    """Two places: "3.05"."""
    return NOTHING if value is None else f"{value:.2f}"


def percent_text(fraction: float | None) -> str:
    """A fraction as "96.4 %"."""
    return NOTHING if fraction is None or not math.isfinite(fraction) else f"{100 * fraction:.1f} %"


def error_text(error: float | None) -> str:
    """The error of a prediction in per cent of the measured value; "-12 %" is predicted too fast."""
    return NOTHING if error is None else f"{100 * error:+.0f} %"


def ratio_text(ratio: float | None) -> str:
    """A speed-up as a factor."""
    return NOTHING if ratio is None else f"{ratio:.2f}\N{MULTIPLICATION SIGN}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
