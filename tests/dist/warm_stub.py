"""A warm process without the imports, and a worker that tells what it is: started by test_warm_start.py.

`python warm_stub.py SOCKET` is the warm process. Its worker answers each line on a socket, and ends as it is told.
"""

import json
import os
import time
from pathlib import Path

import torch

from echelon.run.lifecycle import warm_worker


def main(arguments):
    """The worker: writes what it is to a file, then does what it is told."""
    place, order = arguments
    facts = {
        "environment": dict(os.environ),
        "threads": torch.get_num_threads(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "files": sorted(os.readlink(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")[:-1]),
    }
    Path(f"{place}.writing").write_text(json.dumps(facts))
    os.rename(f"{place}.writing", place)
    if order == "sleep":
        time.sleep(600)
    raise SystemExit(int(order))


if __name__ == "__main__":
    warm_worker.import_all = lambda: None
    warm_worker.main()
