"""The choices that the paper of IT-signSGD leaves open, varied one at a time: `dure reproduce it-signsgd --sweep`.

    lead        accuracy of the weighted vote minus that of the majority under the same choice, in points
    ranking     the vote is ahead in mode 4, and further ahead there than in mode 1

Choices of the weighted vote alone (`start`, `least`, `granularity`) share the runs of the majority.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from dure_studies.it_signsgd_modes import MANY, METHODS, MODES, batch_sizes
from dure_studies.output import Columns, table_of
from dure_studies.vote_rounds import Learned, VoteTrial, learn

if TYPE_CHECKING:
    from rich.table import Table

    from dure.job.job import Job

EVEN, UNEQUAL = min(MODES), max(MODES)
"""The modes that are compared."""

PAPER = "it-sign:granularity=coordinate,zeros=random"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenChoice:
    """Both votes under one choice. `lr` is a factor of the figure's rate, `many` the batch of the strong workers."""

    vote: str = PAPER
    majority: str = METHODS["signSGD-MV"].codec
    lr: float = 1.0
    many: int = MANY
    split: str = "iid"

    @property
    def is_per_coordinate(self) -> bool:
        """Whether the vote has the paper's weights."""
        return "granularity=coordinate" in self.vote


CHOICES: Mapping[str, OpenChoice] = {
    "as in the figure": OpenChoice(),
    "start 10": OpenChoice(vote=f"{PAPER},start=10"),
    "start 100": OpenChoice(vote=f"{PAPER},start=100"),
    "error rates >= 0.2": OpenChoice(vote=f"{PAPER},least=0.2"),
    "weights per worker": OpenChoice(vote="it-sign:zeros=random"),
    "rate / 3": OpenChoice(lr=1 / 3),
    "rate x 3": OpenChoice(lr=3),
    "zeros positive": OpenChoice(vote="it-sign:granularity=coordinate,zeros=positive", majority="sign"),
    "few labels a worker": OpenChoice(split="dirichlet:alpha=0.1"),
    "strong batches of 256": OpenChoice(many=256),
    "zeros abstain": OpenChoice(vote="it-sign:granularity=coordinate", majority="ternary"),
    "start 100, batches of 256": OpenChoice(vote=f"{PAPER},start=100", many=256),
}


def swept(jobs: Mapping[str, Job], rounds: int, seeds: int) -> dict[str, Any]:
    """Rows of all choices; by data set, the largest lead in mode 4 first."""
    rows = [row for name, job in jobs.items() for row in _rows(name, job, rounds, seeds)]
    return {"choices": len(CHOICES), "rows": rows}


def table(result: dict[str, Any]) -> Table:
    """A line for each choice, and the paper's statements below."""
    columns: Columns = [
        ("data", "{dataset}"),
        ("choice", "{choice}"),
        ("majority", "{majority:.1%}"),
        (f"lead, mode {EVEN}", lambda row: f"{100 * row['lead_even']:+.2f}"),
        (f"mode {UNEQUAL}", lambda row: f"{100 * row['lead']:+.2f}"),
        ("ahead", f"{{ahead}} of {result['seeds']}"),
        ("ranking", f"{{ranking}} of {result['seeds']}"),
        ("p small", "{error_small:.2f}"),
        ("p large", "{error_large:.2f}"),
        ("largest weight", "{leading:.0%}"),
    ]
    caption = (
        f"points by which the weighted vote leads the majority after {result['rounds']} rounds, means of "
        f"{result['seeds']} seeds. largest weight: share of coordinates in which the weight of a worker with large "
        f"batches is the largest, mode {UNEQUAL}\n\n" + "\n".join(counted(result))
    )
    return table_of(result["rows"], columns, caption, texts=("data", "choice"))


def counted(result: dict[str, Any]) -> list[str]:
    """For each form of the weights, the choices under which the ranking appears, in all seeds and in most."""
    lines = []
    for form, is_paper in (("per coordinate, as in the paper", True), ("per worker", False)):
        rows = [row for row in result["rows"] if row["per_coordinate"] is is_paper]
        always = sum(row["ranking"] == result["seeds"] for row in rows)
        mostly = sum(2 * row["ranking"] > result["seeds"] for row in rows)
        lines.append(
            f"weights {form}: ahead in mode {UNEQUAL}, and further than in mode {EVEN}, in all seeds under {always} of "
            f"{len(rows)} choices, in most seeds under {mostly}"
        )
    return lines


def _rows(name: str, job: Job, rounds: int, seeds: int) -> list[dict[str, Any]]:
    rate = METHODS["signSGD-MV"].lr[name]

    @cache
    def run(codec: str, mode: int, seed: int, lr: float, many: int, split: str) -> Learned:
        trial = VoteTrial(codec=codec, lr=lr * rate, batch_sizes=batch_sizes(mode, many), split=split)
        return learn(job, trial, rounds=rounds, every=rounds, seed=seed)

    def pairs(choice: OpenChoice, mode: int) -> list[tuple[Learned, Learned]]:
        rest = (choice.lr, choice.many, choice.split)
        return [(run(choice.vote, mode, seed, *rest), run(choice.majority, mode, seed, *rest)) for seed in range(seeds)]

    rows = [_row(name, title, choice, pairs(choice, EVEN), pairs(choice, UNEQUAL)) for title, choice in CHOICES.items()]
    return sorted(rows, key=lambda row: row["lead"], reverse=True)


def _row(
    name: str,
    title: str,
    choice: OpenChoice,
    even: Sequence[tuple[Learned, Learned]],
    unequal: Sequence[tuple[Learned, Learned]],
) -> dict[str, Any]:
    """`even` and `unequal` have the weighted vote and the majority, by seed."""
    leads_even, leads = ([_last(vote) - _last(majority) for vote, majority in pairs] for pairs in (even, unequal))
    votes, few = [vote for vote, _ in unequal], MODES[UNEQUAL]
    return {
        "dataset": name,
        "choice": title,
        "per_coordinate": choice.is_per_coordinate,
        "majority": statistics.mean(_last(majority) for _, majority in unequal),
        "lead_even": statistics.mean(leads_even),
        "lead": statistics.mean(leads),
        "leads_even": leads_even,
        "leads": leads,
        "ahead": sum(lead > 0 for lead in leads),
        "ranking": sum(lead > max(before, 0) for before, lead in zip(leads_even, leads, strict=True)),
        "error_small": statistics.mean(rate for vote in votes for rate in vote.errors[:few]),
        "error_large": statistics.mean(rate for vote in votes for rate in vote.errors[few:]),
        "leading": statistics.mean(sum(vote.leading[few:]) for vote in votes),
    }


def _last(learned: Learned) -> float:
    return list(learned.accuracies.values())[-1]
