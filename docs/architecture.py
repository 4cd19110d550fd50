"""Draw `architecture.svg` from the contract of imports (`.importlinter`): `python docs/architecture.py`.

Each line of the contract is a floor. A package may import what lies below it, and nothing beside or above it.
"""

from __future__ import annotations

import configparser
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
WIDTH, HEIGHT, GAP, MARGIN = 820, 44, 14, 16
MEANINGS = {
    "cli": "the command: options, tables",
    "planner": "probe, rank of strategies",
    "user_loop": "attach and the DDP hook",
    "integrations": "trainers of others",
    "run": "one run, put together",
    "rl": "actors, learners, replay",
    "runtime": "virtual time and processes",
    "report": "records, tables, pictures",
    "sync": "when replicas agree",
    "topology": "which workers talk to which",
    "partition": "how a model is split",
    "codec": "what goes on the wire",
    "job": "model, data, gradients",
    "core": "nodes, operations, names, costs",
    "errors": "the exceptions",
}


def floors() -> list[list[str]]:
    """The packages of each floor that exist, the top first."""
    contract = configparser.ConfigParser()
    contract.read(ROOT / ".importlinter", encoding="utf-8")
    lines = contract["importlinter:contract:floors"]["layers"].split("\n")
    names = [[part.strip(" ()").removeprefix("dure.") for part in line.replace("|", ":").split(":")] for line in lines]
    source = ROOT / "src" / "dure"
    found = [[name for name in floor if name and any(source.glob(f"{name}*"))] for floor in names]
    return [floor for floor in found if floor]


def picture() -> str:
    """The picture as SVG."""
    rows, shapes = floors(), []
    for number, floor in enumerate(rows):
        top = MARGIN + number * (HEIGHT + GAP)
        width = (WIDTH - 2 * MARGIN - (len(floor) - 1) * GAP) / len(floor)
        for place, name in enumerate(floor):
            left = MARGIN + place * (width + GAP)
            shapes.append(
                f'<rect x="{left:.0f}" y="{top}" width="{width:.0f}" height="{HEIGHT}" rx="5" fill="#EEF3F8" '
                'stroke="#33475B"/>'
            )
            text = f'<tspan font-weight="bold">{name}</tspan> <tspan fill="#55697D">{escape(MEANINGS[name])}</tspan>'
            shapes.append(
                f'<text x="{left + width / 2:.0f}" y="{top + HEIGHT / 2 + 5:.0f}" text-anchor="middle">{text}</text>'
            )
    height = 2 * MARGIN + len(rows) * (HEIGHT + GAP) - GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif"'
    return "\n".join([f'{head} font-size="13">', *shapes, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
