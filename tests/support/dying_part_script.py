"""`ckpt` in a process that is killed when it has done so many tasks, of which all but the last are durable.

python -m support.dying_part_script TASKS WORDS...
"""

import os
import signal
import sys
import time

from ckpttools.cli.main import main
from ckpttools.run import executor

MAKE = executor.make
LEFT = [int(sys.argv[1])]


def make(*arguments, **options):
    if LEFT[0] == 0:
        time.sleep(5 * executor._SYNC_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)
    LEFT[0] -= 1
    return MAKE(*arguments, **options)


executor.make = make
executor._SYNC_SECONDS = 0.02
main(sys.argv[2:])
