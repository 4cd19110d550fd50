"""The loop that resumes tasks, apart from any runtime."""

import gc

from dure.core.node import Loop, Operation


def test_where_a_loop_ends_nothing_is_left_that_has_not_begun():
    """A coroutine that is forgotten before its first step makes Python warn; here a warning is an error."""
    loop, seen = Loop(), []

    async def work(name):
        seen.append(f"{name} begins")
        try:
            await Operation(loop)
        finally:
            seen.append(f"{name} is closed")

    begun = loop.spawn(work("one"), "one")
    loop.run_ready()
    late = loop.spawn(work("two"), "two")
    loop.end()
    assert begun.done
    assert late.done
    assert seen == ["one begins", "one is closed"]
    assert not loop.tasks
    assert not loop.ready
    del late
    gc.collect()
