"""The rendezvous of torch's agents: without a socket on one machine, with validated state on several.

torch's own backend, `c10d`, keeps the state of a rendezvous as a pickle in a store that listens on every interface
without authentication. Anyone who can reach the port could write a pickle there that runs code in every agent.
"""

import io
import pickle
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import override

from echelon.ground.sockets import find_free_port

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

ALONE = "echelon-alone"
"""The backend of the only agent of a job."""

TOGETHER = "echelon-together"
"""The backend of agents on several machines: c10d's, with a check of the state before torch unpickles it."""

_HERE = "127.0.0.1"
_TORCHS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_ADMITTED = frozenset({
    (_TORCHS, "_RendezvousState"),
    (_TORCHS, "_NodeDesc"),
    ("builtins", "set"),
    ("datetime", "datetime"),
    ("datetime", "timedelta"),
    ("datetime", "timezone"),
})  # fmt: skip


def register_backends() -> None:
    """Register both backends with torch's agent. Calling it again has no effect."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(ALONE, _meet_alone)
    rendezvous_handler_registry.register(TOGETHER, _meet_together)


class AloneHandler:
    """The RendezvousHandler of the only agent: immediately rank 0 of 1. Its workers use a free loopback port."""

    use_agent_store = False

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_backend(self) -> str:
        """The name of this backend."""
        return ALONE

    def next_rendezvous(self) -> "RendezvousInfo":
        """Return a new port for each group of workers: an ending process may still hold the old one."""
        from torch.distributed import HashStore  # type: ignore[attr-defined]
        from torch.distributed.elastic.rendezvous import RendezvousInfo
        from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(_HERE, find_free_port(_HERE)))

    def is_closed(self) -> bool:
        """Always False."""
        return False

    def set_closed(self) -> None:
        """Has no effect: there is no other agent."""

    def num_nodes_waiting(self) -> int:
        """Always 0."""
        return 0

    def get_run_id(self) -> str:
        """The run id in the configuration."""
        return self._run_id

    def shutdown(self) -> bool:
        """Always True: there is nothing to close."""
        return True


class GuardedBackend:
    """A RendezvousBackend that returns the state of another one only after `check_state`."""

    name = TOGETHER

    def __init__(self, inner: "RendezvousBackend", endpoint: str) -> None:
        self._inner = inner
        self._endpoint = endpoint

    def get_state(self) -> tuple[bytes, Any] | None:
        """Return the present state and its token. Raises RendezvousStateError for a state that no agent wrote."""
        state = self._inner.get_state()
        if state is not None:
            check_state(state[0], self._endpoint)
        return state

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Try to replace the state that has this token; the result may be a state written by another agent."""
        result = self._inner.set_state(state, token)
        if result is not None:
            check_state(result[0], self._endpoint)
        return result


def check_state(state: bytes, endpoint: str) -> None:
    """Raise RendezvousStateError unless the pickle is a rendezvous state made only of torch's expected classes.

    No other name in the pickle is imported or called.
    """
    from torch.distributed.elastic.rendezvous import RendezvousStateError

    try:
        kind = type(_Admitting(io.BytesIO(state)).load())
        if (kind.__module__, kind.__qualname__) != (_TORCHS, "_RendezvousState"):
            raise pickle.UnpicklingError(f"a {kind.__qualname__}")
    except Exception as error:  # a pickle can raise anything
        raise RendezvousStateError(
            f"the state of the rendezvous at {endpoint} contains data that no agent wrote ({error}); none of it was "
            "executed; another program can reach that port: close it to all but the machines of the job"
        ) from error


class _Admitting(pickle.Unpickler):
    @override
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def _meet_alone(params: "RendezvousParameters") -> "RendezvousHandler":
    return cast("RendezvousHandler", AloneHandler(params.run_id))


def _meet_together(params: "RendezvousParameters") -> "RendezvousHandler":
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    inner, store = create_backend(params)
    backend = GuardedBackend(inner, params.endpoint)
    return create_handler(store, cast("RendezvousBackend", backend), params)
