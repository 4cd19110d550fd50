"""Which workers take part: what a checkpoint keeps of it."""

from __future__ import annotations

import json
from dataclasses import fields

from dure.run.virtual_membership import Attendance


def test_a_checkpoint_keeps_all_of_it():
    attendance = Attendance(
        crashed={3, 1},
        joined={4},
        finished={0, 5},
        deaths={"worker 3": "three in a row"},
        refused=3,
        done=41,
        at={0: 9, 2: 7},
        passed=23,
        away={2},
        steps={1: 4, 3: 6},
    )
    plain = json.loads(json.dumps(attendance.plain()))
    assert all(getattr(attendance, each.name) for each in fields(Attendance))
    assert Attendance.of(plain) == attendance
    assert Attendance.of({}) == Attendance()
