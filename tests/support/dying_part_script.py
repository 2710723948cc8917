"""`ckpt` in a process that is killed when it has done so many tasks, of which all but the last are durable.

python -m support.dying_part_script TASKS WORDS...
"""

import os
import signal
import sys
import time

from ckpttools.cli.main import main
from ckpttools.run import task_runner, threads

MAKE = task_runner.run_task
LEFT = [int(sys.argv[1])]
SYNC = threads.JournaledThreads._sync
SYNCS = [0]


def make(*arguments, **options):
    if LEFT[0] == 0:
        # Of two that end from now on the second began after all that is done.
        until = SYNCS[0] + 2
        while SYNCS[0] < until:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    LEFT[0] -= 1
    return MAKE(*arguments, **options)


def sync(execution):
    SYNC(execution)
    SYNCS[0] += 1


task_runner.run_task = make
threads.JournaledThreads._sync = sync
threads._SYNC_SECONDS = 0.02
main(sys.argv[2:])
