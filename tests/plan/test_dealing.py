"""Dealing tasks out: parts tile them exactly, and none is larger than it must be."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools import UsageError
from ckpttools.plan.parts import Part, dealt, detect_part, parse_part

SIZES = st.lists(st.integers(0, 1000), max_size=40)


def least_most(sizes, count):
    """The least that the largest of so many stretches can have, by trying all limits."""

    def parts(limit):
        used, room = 1, limit
        for size in sizes:
            if size > room:
                used, room = used + 1, limit
            room -= size
        return used

    return next(m for m in range(max(sizes, default=0), sum(sizes) + 1) if parts(m) <= count)


@given(SIZES, st.integers(1, 60))
def test_parts_cover_all_tasks_and_are_balanced(sizes, count):
    cuts = dealt(sizes, count)
    assert len(cuts) == count + 1 and cuts == sorted(cuts)
    assert (cuts[0], cuts[-1]) == (0, len(sizes))
    assert max(sum(sizes[a:b]) for a, b in pairwise(cuts)) == least_most(sizes, count)


def test_tasks_of_a_large_model_are_split_evenly():
    # As 671 billion parameters are planned: nearly all tasks have two matrices of experts.
    sizes = [*[2 * 58_720_256] * 23_000, *[3 * 16_777_216] * 600, *[4096] * 36]
    for count in (2, 64, 256, 1024):
        parts = [sum(sizes[a:b]) for a, b in pairwise(dealt(sizes, count))]
        even = sum(sizes) / count
        assert max(parts) <= (1.01 if count <= 256 else 1.04) * even, count
        assert min(parts) >= 0.9 * even, count


@pytest.mark.parametrize("text", ["4/4", "0/0", "3", "a/4", "1/b", "-1/4", "1/", "/4", "1/2/3", "³/4"])
def test_invalid_part_is_refused(text):
    with pytest.raises(UsageError):
        parse_part(text)


def array(number, first, last, step=1, count=None):
    """The variables of a task of `sbatch --array=FIRST-LAST:STEP`, or of a list of so many numbers."""
    declared = {"ID": number, "MIN": first, "MAX": last, "STEP": step}
    declared["COUNT"] = len(range(first, last + 1, step)) if count is None else count
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in declared.items()}


SLURM = array(7, 1, 7, 2)
STEP = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}


@pytest.mark.parametrize(
    ("environment", "count", "part"),
    [
        ({"JOB_COMPLETION_INDEX": "3"}, 8, Part(3, 8)),
        ({"CLOUD_RUN_TASK_INDEX": "2", "CLOUD_RUN_TASK_COUNT": "5"}, None, Part(2, 5)),
        ({"AWS_BATCH_JOB_ARRAY_INDEX": "0", "AWS_BATCH_JOB_ARRAY_SIZE": "2"}, None, Part(0, 2)),
        (SLURM, None, Part(3, 4)),
        (array(16, 1, 16), None, Part(15, 16)),
        (array(15, 0, 15), 16, Part(15, 16)),
        (array(11, 3, 11, count=2), 16, Part(11, 16)),  # --array=3,11: two of 16 that are done again
        (array(7, 7, 7), 64, Part(7, 64)),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "8"}, None, Part(3, 8)),
        ({**SLURM, **STEP, "SLURM_STEP_NUM_TASKS": "1"}, 8, Part(7, 8)),
        ({**SLURM, "JOB_COMPLETION_INDEX": "7"}, 8, Part(7, 8)),
    ],
)
def test_part_is_detected_from_the_environment(environment, count, part):
    assert detect_part(count, environment) == part


@pytest.mark.parametrize(
    ("environment", "count", "says"),
    [
        ({}, None, "cannot detect which part"),
        ({"JOB_COMPLETION_INDEX": "3"}, None, "the number of parts is unknown"),
        ({"JOB_COMPLETION_INDEX": "8"}, 8, "part 8 of 8 does not exist"),
        ({"JOB_COMPLETION_INDEX": "x"}, 8, "is not a number"),
        ({**SLURM, **STEP, "SLURM_STEP_NUM_TASKS": "8"}, None, "number this process"),
        (array(1, 1, 16), 16, "does not number its tasks from 0"),
        (array(0, 0, 30, 2), 16, "does not number its tasks from 0"),
        (array(11, 3, 11, count=2), None, "skips some numbers"),
        (array(5, 0, 8, 4, count=3), None, "skips some numbers"),
        (array(17, 3, 17, count=2), 16, "part 17 of 16 does not exist"),
        ({**SLURM, "JOB_COMPLETION_INDEX": "3"}, 8, "JOB_COMPLETION_INDEX=3 and SLURM_ARRAY_TASK_ID=7"),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "8", "JOB_COMPLETION_INDEX": "3"}, 8, "number this process"),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "0"}, None, "SLURM_PROCID=3, SLURM_STEP_NUM_TASKS=0"),
        ({"CLOUD_RUN_TASK_INDEX": "0", "CLOUD_RUN_TASK_COUNT": "0"}, None, "without processes"),
        (STEP, None, "cannot detect which part"),  # a batch script, not a step of srun
    ],
)
def test_undetectable_part_is_refused(environment, count, says):
    with pytest.raises(UsageError, match=says):
        detect_part(count, environment)


def test_error_names_the_required_job_indices():
    for environment, numbers in (
        (array(5, 0, 8, 4, count=3), "3 tasks, 0 to 8 by steps of 4, of which this is 5"),
        (array(11, 3, 11, count=2), "2 tasks, 3 to 11, of which this is 11"),
    ):
        with pytest.raises(UsageError, match="skips some numbers") as error:
            detect_part(None, environment)
        assert error.value.got == numbers
