"""What process 0 of a job makes of what the others say, and of what the destination shows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.internals import Publishing

from ckpttools import OtherProcessError
from ckpttools.api.distributed import _are_done, _check_failed, _stop_when_job_ends
from ckpttools.api.plan_status import PartStatus
from ckpttools.sharding.loading import JobProgress, ProgressReporter
from ckpttools.sharding.processes import Processes, Service

ONE = PartStatus(7, 7, 70, 70, 1.0, None, "1/3", "process 1 on pod-1", "done", 3.0, "a")
TWO = replace(ONE, part="2/3", process="process 1 on pod-2", token="b")
HERE = {1: ONE.process, 2: TWO.process}


class Notes:
    """A coordination service of one process."""

    def __init__(self) -> None:
        self.declared: dict[str, str] = {}

    def key_value_dir_get(self, topic):
        return [(key, value) for key, value in self.declared.items() if key.startswith(topic)]

    def key_value_set(self, key, value, allow_overwrite=False):
        self.declared[key] = value


@pytest.fixture
def job():
    return Service(0, 3, Notes())


def other(job, number):
    return Service(number, 3, job.client)


def test_finished_process_reports_before_it_exits(job):
    assert not _are_done(job, [ONE], HERE, ())
    assert _are_done(job, [ONE, TWO], HERE, ())
    other(job, 2).set_status("done", "yes")
    assert _are_done(job, [ONE, replace(TWO, state="gone")], HERE, ())
    assert not _are_done(job, [replace(ONE, state="at work")], HERE, ())


def test_ended_process_is_named(job):
    with pytest.raises(OtherProcessError, match="process 1 of 3 is gone") as failed:
        _are_done(job, [replace(ONE, state="the disk is full", tasks_done=3)], HERE, ())
    assert "with 3 of 7 tasks done, ended by: the disk is full" in str(failed.value.got)


def test_process_of_an_earlier_job_is_not_confused(job):
    """An Indexed Job starts pods again with the same host names, in which it is process 1 again."""
    gone = replace(ONE, state="gone")
    with pytest.raises(OtherProcessError):
        _are_done(job, [gone], HERE, ())
    assert not _are_done(job, [gone], HERE, {gone.token})
    assert not _are_done(job, [replace(gone, part="1/4")], HERE, ())


def test_loading_reports_progress_of_all_processes(job):
    """Asked while process 0 waits for what another is to say."""
    declared: list[JobProgress] = []
    others = [
        ProgressReporter(Processes(item.number, item.count, item.client), 100, declared.append)
        for item in (other(job, 1), other(job, 2))
    ]
    for item, nbytes in zip(others, (100, 40), strict=True):
        item.add(nbytes)
    assert declared == []
    first = ProgressReporter(Processes(0, 3, job.client), 100, declared.append)
    first.add(100)
    first.on_wait("read w/2")
    assert [process.bytes_done for process in declared[-1].processes] == [100, 100, 40]
    assert declared[-2].waiting_for is None and declared[-1].waiting_for == 2
    assert "80% of 300 bytes" in repr(declared[-1])
    assert "process 2 is last, waiting for process 2" in repr(declared[-1])


def test_process_0_stops_if_another_process_fails(job, monkeypatch):
    from ckpttools.api import distributed as together

    monkeypatch.setattr(together, "_POLL_SECONDS", 0.0)
    seen: list[object] = []
    observe = _stop_when_job_ends(lambda: _check_failed(job), seen.append)
    observe(Publishing())
    other(job, 2).set_status("failed", "the disk is full")
    with pytest.raises(OtherProcessError, match="process 2 of 3 could not do its part"):
        observe(Publishing())
    assert len(seen) == 1
