"""The rendezvous of torch's agents: without a socket on one machine, with checked state on several.

torch's own backend, `c10d`, keeps the state of a rendezvous as a pickle in a store that listens on every interface and
asks nobody who they are. Whoever reaches the port can write a pickle there that runs code in every agent.
"""

import io
import pickle
import socket
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

ALONE = "echelon-alone"
"""The backend of an agent that is the only one of its job."""

TOGETHER = "echelon-together"
"""The backend of agents of several machines: c10d's, whose state is checked before torch unpickles it."""

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
    """The RendezvousHandler of the only agent: rank 0 of 1 at once. Its workers meet at a free port of loopback."""

    use_agent_store = False

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_backend(self) -> str:
        """See torch's RendezvousHandler, here and below."""
        return ALONE

    def next_rendezvous(self) -> "RendezvousInfo":
        """A new port for each group of workers: the old one may still be held by a process that ends."""
        from torch.distributed import HashStore  # type: ignore[attr-defined]
        from torch.distributed.elastic.rendezvous import RendezvousInfo
        from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

        with socket.create_server((_HERE, 0)) as probe:
            port = probe.getsockname()[1]
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(_HERE, port))

    def is_closed(self) -> bool:
        """Never."""
        return False

    def set_closed(self) -> None:
        """There is nobody else to tell."""

    def num_nodes_waiting(self) -> int:
        """Always 0."""
        return 0

    def get_run_id(self) -> str:
        """As the configuration has it."""
        return self._run_id

    def shutdown(self) -> bool:
        """There is nothing to close."""
        return True


class GuardedBackend:
    """A RendezvousBackend that hands out the state of another one only after `check_state`."""

    name = TOGETHER

    def __init__(self, inner: "RendezvousBackend", endpoint: str) -> None:
        self._inner = inner
        self._endpoint = endpoint

    def get_state(self) -> tuple[bytes, Any] | None:
        """See torch's RendezvousBackend. Raises RendezvousStateError for a state that none of the agents wrote."""
        found = self._inner.get_state()
        if found is not None:
            check_state(found[0], self._endpoint)
        return found

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """See torch's RendezvousBackend; what it returns may be another's state."""
        found = self._inner.set_state(state, token)
        if found is not None:
            check_state(found[0], self._endpoint)
        return found


def check_state(state: bytes, endpoint: str) -> None:
    """Raises RendezvousStateError if the pickle is more than a rendezvous state, of the classes that torch makes it of.

    Nothing else that the pickle names is imported or called.
    """
    from torch.distributed.elastic.rendezvous import RendezvousStateError

    try:
        kind = type(_Admitting(io.BytesIO(state)).load())
        if (kind.__module__, kind.__qualname__) != (_TORCHS, "_RendezvousState"):
            raise pickle.UnpicklingError(f"a {kind.__qualname__}")
    except Exception as error:  # a pickle is a program, which may fail in any way
        raise RendezvousStateError(
            f"the state of the rendezvous at {endpoint} holds data that no agent wrote ({error}), and none of it "
            "was executed; another program can reach that port: close it to all but the machines of the job"
        ) from error


class _Admitting(pickle.Unpickler):
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
