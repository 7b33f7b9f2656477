"""Compiles one part of a training step for an H100 that is not there: python -m tests.codegen NAME FOLDER.

Prints JSON: how many kernels there are, those that failed, and the code that calls them.
"""

import json
import os
import sys
from pathlib import Path

from tests.codegen.fake_gpu import fake_tensors, install


def main():
    name, folder = sys.argv[1:]
    compiled = install(Path(folder))
    from tests.codegen.programs import PROGRAMS  # imports torch

    with fake_tensors():
        PROGRAMS[name]()
    found = {"kernels": compiled.kernels.total(), "failures": compiled.failures, "code": compiled.code}
    print(json.dumps(found), flush=True)
    os._exit(0)  # torch 2.11 sometimes aborts while its compiler's threads end with the interpreter


if __name__ == "__main__":
    main()
