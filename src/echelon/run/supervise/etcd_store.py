"""etcd as the store of the agents: it lives outside of the job, so the loss of no machine ends the job.

All keys of a job belong to one lease, which the agents renew; they vanish some time after the last agent, or at the end
of the job. The coordinator holds a lease of its own, so there is one at a time: etcd decides, not the agents.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from echelon.ground.errors import LaunchError, first_line
from echelon.ground.extras import require_extra
from echelon.ground.hosts import HostGroup

if TYPE_CHECKING:
    from etcd3gw.client import Etcd3Client
    from etcd3gw.lease import Lease

ROLE_SECONDS = 12
"""The time to live of the coordinator's lease."""

_JOB_SECONDS = 60
_REQUEST_SECONDS = 3.0
# A cluster that chooses another leader of its own does not answer for a moment. Shorter than `ROLE_SECONDS`.
_RETRY_SECONDS, _PAUSE_SECONDS = 8.0, 0.2
_FIRST_LOOK_SECONDS, _LOOK_SECONDS = 0.1, 1.0
_LEASE, _COORDINATOR = "lease", "coordinator"

Answer = TypeVar("Answer")


class EtcdStore:
    """The keys of a job in etcd, with the methods of `TorchStore`. For one thread.

    Methods raise torch's DistError when etcd does not answer.
    """

    def __init__(self, group: HostGroup) -> None:
        """Connect, and begin a job, or join it. Raises LaunchError if etcd does not answer, ConfigError without the
        client."""
        require_extra(f"--rendezvous etcd://{group.endpoint}/{group.store_name}", "etcd")
        self._group = group
        self._client = _connect(group)
        self._role: Lease | None = None
        self._lengths: dict[str, int] = {}
        try:
            self._lease = self._call(self._join)
        except RuntimeError as error:
            raise LaunchError(
                f"etcd does not answer at {group.endpoint} ({first_line(error)}); start it, or correct --rendezvous."
            ) from error

    def clone(self) -> "EtcdStore":
        """The same keys for another thread."""
        return EtcdStore(self._group)

    def _join(self) -> "Lease":
        """The lease of the job."""
        from etcd3gw.lease import Lease

        while True:
            if (held := self._client.get(self._key(_LEASE))) and (number := int(held[0])):
                return Lease(number, self._client)
            lease = self._client.lease(_JOB_SECONDS)
            self._client.create(self._key(_LEASE), str(lease.id), lease)

    def renew(self) -> None:
        """Keep the keys for another minute."""
        self._call(self._lease.refresh)

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._call(lambda: self._client.put(self._key(key), value, self._lease))

    def find(self, key: str) -> bytes | None:
        """The value of a key; None if there is none."""
        held = self._call(lambda: self._client.get(self._key(key)))
        return held[0] if held else None

    def find_each(self, keys: list[str]) -> list[bytes]:
        """The values of keys with the same beginning, in one request; empty for one that is not there."""
        values = self._find_all(keys[0].partition("/")[0]) if keys else {}
        return [values.get(key, b"") for key in keys]

    def _find_all(self, prefix: str) -> dict[str, bytes]:
        """The values of all keys with this beginning."""
        rows: Any = self._call(lambda: self._client.get_prefix(self._key(prefix)))
        start = len(self._key(""))
        return {bytes(fields["key"]).decode()[start:]: value for value, fields in rows}

    def append(self, name: str, text: str) -> None:
        """Add a message to a list."""

        def put_next() -> bool:
            self._lengths[name] += 1
            return self._client.create(self._key(f"{name}/{self._lengths[name]}"), text, self._lease)

        self._lengths[name] = self._lengths.get(name) or self.count(name)
        while not self._call(put_next):
            pass

    def count(self, name: str) -> int:
        """How many messages a list has."""
        return len(self._find_all(f"{name}/"))

    def read(self, name: str, number: int) -> bytes:
        """A message of a list, counted from 1, once it is there."""
        pause = _FIRST_LOOK_SECONDS
        while (text := self.find(f"{name}/{number}")) is None:
            time.sleep(pause)
            pause = min(2 * pause, _LOOK_SECONDS)
        return text

    def take_role(self, host: str) -> bool:
        """Become the coordinator if there is none, or remain it; returns whether this machine is."""
        if self._role is not None:
            return bool(self._call(self._role.refresh) > 0)
        if self.find_coordinator() is not None:
            return False
        role = self._call(lambda: self._client.lease(ROLE_SECONDS))
        if self._call(lambda: self._client.create(self._key(_COORDINATOR), host, role)):
            self._role = role
        else:
            self._call(role.revoke)
        return self._role is not None

    def find_coordinator(self) -> str | None:
        """The machine that is the coordinator now."""
        held = self.find(_COORDINATOR)
        return None if held is None else held.decode()

    def leave(self, host: str, is_over: bool) -> None:
        """Let another machine be the coordinator instead of this one, or remove all keys of a job that `is_over`."""
        if self.find_coordinator() == host:
            self._call(lambda: self._client.delete(self._key(_COORDINATOR)))
        if is_over:
            self._call(self._lease.revoke)

    def _key(self, key: str) -> str:
        return f"echelon/{self._group.store_name}/{key}"

    def _call(self, ask: Callable[[], Answer]) -> Answer:
        """Ask etcd; again for some seconds if it does not answer."""
        import requests
        from etcd3gw.exceptions import Etcd3Exception

        deadline = time.monotonic() + _RETRY_SECONDS
        while True:
            try:
                return ask()
            except (Etcd3Exception, requests.RequestException) as error:
                if time.monotonic() > deadline:
                    from torch.distributed import DistError

                    raise DistError(first_line(error)) from error
            time.sleep(_PAUSE_SECONDS)


def _connect(group: HostGroup) -> "Etcd3Client":
    import requests
    from etcd3gw.client import Etcd3Client

    session = requests.Session()
    session.trust_env = False  # no proxy knows the machines of a job
    return Etcd3Client(host=group.host, port=group.port, timeout=_REQUEST_SECONDS, session=session)
