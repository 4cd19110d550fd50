"""The configuration of a resumed run: that of its record, with the few options that may change, or another split.

A record keeps the path and the SHA-256 of each file of code. Without `--trust`, a file is executed only if its path and
its content are those of the record. A file inside the run's own folder needs `--trust` in any case: the author of the
folder could have written the record too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from dure.core import user_code
from dure.core.spec_text import parse_member, parse_members, value_text
from dure.errors import StrategyError, UsageError
from dure.partition.mesh import parts_of
from dure.report.run import read_run
from dure.run.config import OptionUse, TrainConfig
from dure.run.places import is_real, is_started_outside
from dure.run.split_again import MAY_DIFFER, can_split_again
from dure.run.strategy import AXES, DEFAULTS, make, member_text
from dure.runtime.virtual.cluster import Cluster

CLUSTER = "cluster.yaml"
"""File of the virtual cluster in the folder of a run, read when the run is resumed."""


def resumed(config: TrainConfig, cluster: Cluster | None = None) -> TrainConfig:
    """Read the configuration of the run in `config.resume`; `config` may replace options of `OptionUse.CHANGES`.

    `cluster` is the object that was given as the place, if any. An option counts as given if it has not its default.

    Raises:
        UsageError: a given option differs from that of the run, or the code that the run names has changed
            (`check_code`).
    """
    folder = config.resume
    assert folder is not None
    record = read_run(folder)
    if not config.trust:
        check_code(folder, record.config, record.code)
    saved = TrainConfig.of({**record.config, "resume": folder, "out": folder, "trust": config.trust})
    asked = ((option, getattr(config, option.name)) for option in fields(config))
    given = {option.name: value for option, value in asked if value != option.default}
    changes = {name: given.pop(name) for name in TrainConfig.used(OptionUse.CHANGES) if name in given}
    if saved.elastic is not None and isinstance(given.get("workers"), int):
        changes["workers"] = saved.elastic.beginning(given.pop("workers"))
    given = {**given, **config.members()}
    for name in ("strategy", "resume", "trust"):
        given.pop(name, None)
    if given:
        changes |= _other_split(given, saved, cluster)
    return TrainConfig.of({**saved.plain(), **changes, "trust": config.trust})


def _other_split(given: Mapping[str, Any], saved: TrainConfig, cluster: Cluster | None) -> dict[str, Any]:
    """The options of another split of the model, if `given` asks for one; a run may go on with it.

    Raises `UsageError` if another option in `given` differs from that of the run with the configuration `saved`.
    """
    has = _facts(saved)
    wrong = {name: value for name, value in given.items() if not _agrees(name, value, has, cluster)}
    split = {} if wrong.keys() - {*MAY_DIFFER, *SIZES} else _split_of(given, wrong, saved, has)
    if wrong and not split:
        raise UsageError(_refusal(saved, wrong, has))
    return split


SIZES = ("batch_size", "batch_sizes")
"""Options that may differ too where the number of copies of the model does: the samples of a step can so stay."""


def _split_of(
    given: Mapping[str, Any], wrong: Mapping[str, Any], saved: TrainConfig, has: Mapping[str, Any]
) -> dict[str, Any]:
    """The partition in `given` and its number of workers, if a run goes on with them; else nothing.

    Without a number of workers, that of copies of the model stays.
    """
    members = {axis: str(has[axis]) for axis in AXES}
    partition = given.get("partition", members["partition"])
    if given.keys().isdisjoint(MAY_DIFFER) or not can_split_again(members, partition) or is_started_outside(saved.on):
        return {}
    parts, copies = parts_of(make(partition)), has["workers"] // parts_of(make(members["partition"]))
    workers = given.get("workers", copies * parts)
    sizes = {name: wrong[name] for name in SIZES if name in wrong}
    kept, uniform = has["cluster"], Cluster.uniform(has["workers"])
    described = kept is not None and kept.to_yaml() != uniform.to_yaml()
    if not isinstance(workers, int) or (sizes and workers == copies * parts):
        return {}
    if described and workers != has["workers"]:
        return {}
    if "batch_size" in sizes:
        sizes = {"batch_sizes": (), **sizes}
    return {"partition": partition, "workers": workers, **sizes}


def cluster_of(folder: Path) -> Cluster | None:
    """Read the virtual cluster of the run in `folder`; None if it has none."""
    return Cluster.from_yaml(folder / CLUSTER) if (folder / CLUSTER).exists() else None


def _facts(saved: TrainConfig) -> dict[str, Any]:
    """The options of a run, with the defaults that are known here in place of those that were left out."""
    assert saved.resume is not None
    try:
        members = saved.chosen().text()
    except StrategyError:  # the method was an object, whose text no catalogue has
        members = {**DEFAULTS, **saved.members()}
    cluster = cluster_of(saved.resume) if saved.virtual else None
    options = {option.name: getattr(saved, option.name) for option in fields(saved)}
    workers = saved.workers or (cluster.workers if cluster is not None else 4)
    return {**options, **members, "workers": workers, "dtype": saved.dtype or "float32", "cluster": cluster}


def _agrees(name: str, value: Any, has: Mapping[str, Any], cluster: Cluster | None) -> bool:
    """Whether `value`, given for an option, agrees with that of the run; `cluster` is the object behind a place."""
    if name in AXES:
        return has[name] is not None and _in_full(name, value) == _in_full(name, has[name])
    if name == "on":
        return _same_place(value, has, cluster)
    if name == "job":
        return _whole(value) == _whole(has["job"])
    return bool(value.resolve() == has[name].resolve()) if name == "out" else bool(value == has[name])


def _in_full(axis: str, text: str) -> str:
    try:
        return member_text(axis, make(text, axis))
    except StrategyError:  # as in `_facts`; or it names nothing, and then it differs from the run's
        return text


def _same_place(on: str, has: Mapping[str, Any], cluster: Cluster | None) -> bool:
    """Whether a place is that of the run: in virtual time, the same cluster. "virtual" agrees with any cluster."""
    kept = has["cluster"]
    if is_real(on) or kept is None:
        return bool(on == has["on"])
    given = cluster if on == "virtual" else Cluster.described(on)
    return given is None or given.to_yaml() == kept.to_yaml()


def _whole(job: str) -> str:
    """A job's text; the text of a job in a file with the absolute path."""
    own = user_code.split(parse_member(job).name)
    return job if own is None else job.replace(own[0], str(Path(own[0]).resolve()), 1)


def _refusal(saved: TrainConfig, wrong: Mapping[str, Any], has: Mapping[str, Any]) -> str:
    was = [f"{name} left out" if has[name] is None else f"{name}={value_text(has[name])}" for name in wrong]
    given = [
        f"{name}={value_text(value)}" if value != has[name] else f"another {'cluster' if name == 'on' else name}"
        for name, value in wrong.items()
    ]
    return (
        f"{saved.resume} is a run with {_listed(was)}; {_listed(given)} cannot change that: "
        f"leave {'it' if len(wrong) == 1 else 'them'} out."
    )


def _listed(words: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


MEMBERS = ("strategy", *AXES)
"""Options whose texts name members, and so may name code as FILE.py:NAME."""


def fingerprints(options: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The absolute `path` and the `sha256` of each file that the `options` of a run name, by its text there."""
    return {
        file: {"path": str(Path(file).resolve()), "sha256": _sha256(Path(file))}
        for file in _named(options)
        if Path(file).is_file()
    }


def check_code(folder: Path, options: Mapping[str, Any], recorded: Any) -> None:
    """Raise `UsageError` if the run in `folder` with its `options` would execute code that differs from `recorded`."""
    for file in _named(options):
        path = Path(file).resolve()
        problem = _problem(folder.resolve(), path, recorded.get(file) if isinstance(recorded, Mapping) else None)
        if problem:
            raise UsageError(
                f"resuming {folder} runs the code in {path}, and {problem}. Look at the file; to run it as it is, "
                "give --trust (trust=True in Python)."
            )


def _problem(folder: Path, path: Path, recorded: Any) -> str:
    if not isinstance(recorded, Mapping):
        return "the run's record has no hash of it"
    if recorded.get("path") != str(path):
        return f"when the run began it was {recorded.get('path')}"
    if path.is_relative_to(folder):
        return "the file lies in the folder of the run, whose author may have written it too"
    if not path.is_file():
        return ""  # the loader reports it
    found = _sha256(path)
    if recorded.get("sha256") != found:
        return f"it has changed since the run began: its SHA-256 was {recorded.get('sha256')} and is {found}"
    return ""


def _named(options: Mapping[str, Any]) -> Iterator[str]:
    """The files in texts such as "lab/job.py:make" and "lab/sync.py:Mine:period=2 ps"."""
    texts = [str(options.get(option) or "") for option in MEMBERS]
    members = [call.name for text in texts for word in text.split() for call in parse_members(word)]
    files = {own[0] for name in members if (own := user_code.split(name)) is not None}
    if options.get("job"):
        job = parse_member(str(options["job"]))
        named = [job.name.rpartition(":")[0], *(user_code.file_of(value) for value in job.given.values())]
        files |= {file for file in named if file.endswith(".py")}
    yield from sorted(files)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
