"""A disk whose flushes take as long as those of a network file system: imported by every Python of a faulty job.

Without it a save of the tests' small model is over in the time that a busy machine takes to wake the one who kills.
"""

import os
import time

FLUSH_SECONDS = 0.02

_flush = os.fsync


def flush(descriptor):
    time.sleep(FLUSH_SECONDS)
    _flush(descriptor)


os.fsync = flush
