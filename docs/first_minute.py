"""Runs the command at the top of the README in virtual time, draws its picture and prints its table.

python docs/first_minute.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.sax.saxutils import escape

import dure
from dure.core.target import Target
from dure.report import figures
from dure.report.comparison import Entry, entries
from dure.report.labels import bytes_text, ratio_text, seconds_text

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "first-minute.svg"
TARGET = Target(0.95)
WIDTH, HEAD = 720, 74
FONT = 'font-family="system-ui, -apple-system, Segoe UI, Roboto, Arial, sans-serif" fill="#1f2933"'


def runs() -> list[Entry]:
    """The runs of `dure compare digits-mlp --on examples/lab.yaml --steps 300`."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.html"
        done = dure.compare("digits-mlp", on=str(ROOT / "examples" / "lab.yaml"), steps=300, report=report)
    return entries(done.runs, target=TARGET)


def table(found: Sequence[Entry]) -> str:
    """The table of the README."""
    lines = [
        "| strategy | to 95 % | speed-up | sent, all workers | computing | communicating |",
        "|---|---|---|---|---|---|",
    ]
    for entry in found:
        shares = [f"{100 * (entry.figure('time_share', part) or 0):.0f} %" for part in ("compute", "communicate")]
        sent = bytes_text(entry.figure("bytes_sent"))
        cells = [f"`{entry.label}`", seconds_text(entry.reached), ratio_text(entry.speedup), sent, *shares]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def picture(found: Sequence[Entry]) -> str:
    """The accuracies over the predicted time, up to a little after the last run has reached the target."""
    end = 1.3 * max(entry.reached or 0.0 for entry in found)
    looks = figures.looks(found)
    cut = [
        replace(entry, run=replace(entry.run, history=[row for row in entry.run.history if row["seconds"] <= end]))
        for entry in found
    ]
    curves = figures.curves(cut, looks, x="seconds", y="accuracy", target=TARGET) or ""
    height = HEAD + round(WIDTH * 3.3 / 5.6)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {WIDTH} {height}" role="img">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="14" y="26" font-size="17" font-weight="600" {FONT}>'
        "Eight machines at 100 Mbit/s, two of them slower: time to 95 % test accuracy</text>",
    ]
    x = 14
    for entry, look in zip(found, looks, strict=True):
        text = f"{entry.label}: {seconds_text(entry.reached)}"
        lines += [
            f'<line x1="{x}" y1="52" x2="{x + 24}" y2="52" stroke="{look.color}" stroke-width="4"/>',
            f'<text x="{x + 30}" y="56" font-size="12" {FONT}>{escape(text)}</text>',
        ]
        x += 48 + round(6.6 * len(text))
    curves = curves.replace("<svg ", f'<svg x="0" y="{HEAD}" width="{WIDTH}" height="{height - HEAD}" ', 1)
    return "\n".join([*lines, curves.strip(), "</svg>"]) + "\n"


if __name__ == "__main__":
    compared = runs()
    PICTURE.write_text(picture(compared), encoding="utf-8")
    sys.stdout.write(table(compared))
