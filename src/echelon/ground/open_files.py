"""How many files and connections a process may have open: each rank is connected with all others, several times."""

import errno
import resource
from contextlib import suppress

from echelon.ground.variables import set_default_variables

SOCKETS_PER_RANK = 3
"""The connections of a rank with each other one, in gloo's groups; 2 beside NCCL."""

# In a job of more ranks, of which rank 0 had 4 with each, gloo connects two when they first talk: most never do.
_MOST_CONNECTED, _LAZY = 180, {"TORCH_GLOO_LAZY_INIT": "1"}
# Of an agent with the one that coordinates; and what an agent has besides.
_LINES_OF_AGENT, _LEAST = 4, 20

# Beyond this nothing here needs more, and programs that close all files that there may be would take minutes.
_MOST = 2**20
# Of the interpreter, torch, data files and logs.
_OTHERS = 300
_TEXT = "Too many open files"


def allow_open_files(num_ranks: int = 1) -> None:
    """Raise the soft limit of this process, and of those that it starts, as far as the hard one allows.

    `num_ranks`: of the job, if this is a rank; before it joins the others.
    """
    if num_ranks > _MOST_CONNECTED:
        set_default_variables(_LAZY)
    soft, hard = read_limits()
    if soft < hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def read_limits() -> tuple[int, int]:
    """The soft and the hard limit of this process, at most about a million."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (_MOST if limit == resource.RLIM_INFINITY else min(limit, _MOST) for limit in limits)
    return soft, hard


def count_ranks(limit: int) -> int:
    """How many ranks a job can have where a process may have so many files open.

    In a large one rank 0 connects with each other one, to gather what is saved; under another launcher than echelon it
    has their store too, and so half as many.
    """
    connected = max(1, (limit - _OTHERS) // SOCKETS_PER_RANK)
    return connected if connected < _MOST_CONNECTED else limit - _OTHERS


def explain_open_files(error: BaseException) -> str | None:
    """One line for an error because a process had too many files open; None for any other error."""
    is_full = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    return _explain() if is_full or _TEXT in str(error) else None


def explain_connections(num_ranks: int, num_machines: int) -> str | None:
    """The same line if the agent that has the store of such a job cannot have its connections; None if it can."""
    return _explain() if num_ranks + _LINES_OF_AGENT * num_machines + _LEAST > read_limits()[0] else None


def _explain() -> str:
    limit = read_limits()[0]
    return (
        f"too many open files: a process here may have {limit} (ulimit -n), enough for about {count_ranks(limit)} "
        "ranks; raise the hard limit: nofile in /etc/security/limits.conf, LimitNOFILE of the service that starts "
        "jobs, or docker run --ulimit nofile=65536:65536"
    )
