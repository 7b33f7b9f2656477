"""The warm process that workers are forked from: `python -m echelon.run.lifecycle.warm_worker SOCKET`.

See `run/supervise/workers.py` for its other side. Each request is a line of JSON, {"command", "env"},
and each answer the pid of a worker, or null. The process ends with the agent, or when the agent closes the socket.
"""

import ctypes
import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from echelon.ground.errors import render_traceback
from echelon.ground.launch_environment import begin_process, find_thread_count
from echelon.ground.quiet_imports import garbage_kept

_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 0.001
_ADOPTION_SECONDS = 10.0


def main() -> None:
    """Import what workers need, then fork one for each request, until the agent closes the socket."""
    agent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent:
        return
    channel = socket.socket(fileno=int(sys.argv[1]))
    with _output_discarded(), garbage_kept():
        import_all()
    # A lock that a thread holds, also one of a native library, would stay locked in the workers.
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        return
    gc.collect()
    gc.freeze()  # so that workers do not copy these objects' memory only to look through it
    with channel.makefile("r", encoding="ascii") as requests:
        for line in requests:
            request = json.loads(line)
            pid = _fork_for_agent(agent, channel, request["command"], request["env"])
            channel.sendall(f"{json.dumps(pid)}\n".encode("ascii"))


def import_all() -> None:
    """Import the modules of a worker that most recipes need; with a Llama, all that the decoders have in common."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    import echelon.learn.engines.native
    import echelon.learn.sync.every_step
    import echelon.run.lifecycle.kept_rank
    import echelon.run.lifecycle.rank_run
    import echelon.run.lifecycle.setup
    import echelon.run.lifecycle.worker  # noqa: F401


@contextmanager
def _output_discarded() -> Iterator[None]:
    """Discard what packages print as they are imported; the workers' output is for the user."""
    kept = [os.dup(stream) for stream in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, stream)
        for stream in (*kept, nowhere):
            os.close(stream)


def _fork_for_agent(agent: int, channel: socket.socket, command: Sequence[str], env: Mapping[str, str]) -> int | None:
    """Fork a worker that is a child of the agent, its grandparent, which adopts it when the process between them ends.

    Returns the worker's pid once it leads a session of its own; None if the system allows no further process.
    """
    reading, writing = os.pipe()
    try:
        between = os.fork()
    except OSError:
        os.close(reading)
        os.close(writing)
        return None
    if between == 0:
        try:
            if os.fork() == 0:
                os.setsid()
                os.write(writing, str(os.getpid()).encode("ascii"))
                for descriptor in (reading, writing, channel.detach()):
                    os.close(descriptor)
                _work(agent, command, env)
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(between, 0)
    with os.fdopen(reading, encoding="ascii") as pipe:
        return int(pipe.read() or 0) or None


def _work(agent: int, command: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Be the worker that `command`, `python -m MODULE ARGUMENTS`, would start with this environment."""
    code = 1
    try:
        deadline = time.monotonic() + _ADOPTION_SECONDS
        while os.getppid() != agent:
            if time.monotonic() > deadline:  # the agent is gone
                os._exit(code)
            time.sleep(_LOOK_SECONDS)
        begin_process(env)
        _make_independent()
        _, _, module, *arguments = command
        import_module(module).main(arguments)
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException as error:
        sys.stderr.write(render_traceback(error))
    sys.stderr.flush()
    os._exit(code)


def _make_independent() -> None:
    """Do what torch and numpy would have done at their import in this process: read its threads, draw a seed."""
    import numpy as np
    import torch

    if (count := find_thread_count()) is not None:
        torch.set_num_threads(count)
    np.random.seed()


if __name__ == "__main__":
    main()
