"""How processes leave a job of `jax.distributed`: in step where all are there, and none ends by a signal.

JAX's own way is a barrier. When it times out, or a process has died before it, all that are connected are
ended by SIGABRT, those at the barrier and those that come later; so are all others when process 0 ends, which
has the service. A process that is stopped while it is at the barrier comes out of it as the others do.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable
from dataclasses import replace

from ckpttools.sharding.service import Service

# For those who are late: stopped, swapped out, or on a busy machine. After 100 s JAX takes them for dead.
_LATE_SECONDS = 60.0
# For those who are to hear that the job has failed: when a task of theirs ends.
_FAILED_SECONDS = 10.0
# For what is left to a process that has said that it goes: what happened, on stderr.
_GRACE_SECONDS = 2.0
_LOOK_SECONDS = 0.1
# Topics of what each process says of itself.
_READY, _AWAY = "ready to leave", "away"


def left_job(job: Service) -> None:
    """Takes leave of the others, who do the same; of those who do not come after a minute, without them."""
    import jax

    job.note(_READY, "yes")
    if job.number == 0:
        job.put("leave", "together" if _all_say(job, _READY, _LATE_SECONDS) else "alone")
    if job.get("leave") == "together":
        shutdown: Callable[[], None] = jax.distributed.shutdown
        shutdown()
    else:
        abandoned_job(job)


def abandoned_job(job: Service) -> None:
    """Ends without the barrier: of a job that has failed nobody waits for the others, who may be gone."""
    from jax._src import distributed

    with contextlib.suppress(Exception):  # process 0 may be gone
        job.note(_AWAY, "yes")
        if job.number == 0:
            _all_say(job, _AWAY, _FAILED_SECONDS)
            time.sleep(_GRACE_SECONDS)
    state = distributed.global_state
    for item in (state.client, state.service):
        if item is not None:
            # What is destroyed takes leave, too, and ends the process by a signal if nobody answers.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))
    state.client = state.service = None


def is_gone(job: Service, number: int) -> None:
    """Says of another process that it has gone: nobody waits for it to leave."""
    replace(job, number=number).note(_AWAY, "yes")


def _all_say(job: Service, topic: str, seconds: float) -> bool:
    """Whether all processes say this within so many seconds."""
    until = time.monotonic() + seconds
    while len(job.noted(topic)) < job.count:
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK_SECONDS)
    return True
