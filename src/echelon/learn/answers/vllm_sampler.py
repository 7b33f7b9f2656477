"""Answers drawn by vLLM, which runs in processes of its own: `rollout.sampler: vllm`.

Prompts and answers are token ids, sent to `/inference/v1/generate` of vLLM's HTTP server. The weights lie as an HF
folder in shared memory, and `reload_weights` of vLLM reads them. vLLM is never imported here: it needs other
versions of torch and transformers. Written for vLLM 0.32.
"""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from echelon.ground.errors import ConfigError, TrainingError
from echelon.ground.scratch import scratch_folder
from echelon.ground.sockets import find_free_port
from echelon.recipe.key_limits import Limit
from echelon.recipe.section import AnyPath, Positive, Section

if TYPE_CHECKING:
    from echelon.learn.answers.rollouts import Rollouts
    from echelon.learn.answers.sampling import Sampling
    from echelon.learn.learner import Learner

_KEY = "rollout.sampler=vllm"
_HOST = "127.0.0.1"
_ADDRESS = re.compile(r"http://[^/:]+:[0-9]+")
_START_SECONDS, _REACH_SECONDS = 1800.0, 30.0
_LOOK_SECONDS, _LEAVE_SECONDS = 0.2, 10.0
_MOST_STARTS = 3
"""Starts of a server, and rounds of requests, without an answer; then the run stops."""
_MOST_THREADS = 256
_LOG_BYTES = 2000

Answer = tuple[tuple[int, ...], list[float]]
"""Token ids, and their log-probabilities at the temperature of sampling."""

_FAILURES = (OSError, http.client.HTTPException, KeyError, TypeError, ValueError)
"""What a request raises if the server has failed: another one may answer it."""

# Leads the process group of a server: vLLM's own processes outlive each other, and would outlive this process. They get
# some seconds to remove their shared memory.
_KEEPER = f"""
import os, shutil, signal, subprocess, sys, time
def is_alone():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(pid) != os.getpid() and os.getpgid(int(pid)) == os.getpid():
                return False
        except OSError:
            pass
    return True
told, (parent, folder, *command) = [], sys.argv[1:]
signal.signal(signal.SIGTERM, lambda *_: told.append(True))
server = subprocess.Popen(command)
while os.getppid() == int(parent) and server.poll() is None and not told:
    time.sleep({_LOOK_SECONDS})
if os.getppid() != int(parent):
    shutil.rmtree(folder, ignore_errors=True)
os.killpg(0, signal.SIGTERM)
deadline = time.monotonic() + {_LEAVE_SECONDS}
while (server.poll() is None or not is_alone()) and time.monotonic() < deadline:
    time.sleep({_LOOK_SECONDS})
os.killpg(0, signal.SIGKILL)
"""
# A rank's place in its own job, and its packages, are not the server's.
_UNSET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")
_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def _check_servers(value: Any) -> Any:
    """Refuse what is neither a number of servers nor a list of addresses."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    urls = value if isinstance(value, list | tuple) else ()
    if not is_count and not (urls and all(isinstance(url, str) and _ADDRESS.fullmatch(url) for url in urls)):
        raise PydanticCustomError("servers", "a number of servers, or a list of addresses such as http://10.0.0.1:8000")
    return value


class VllmConfig(Section):
    """`rollout.vllm`: where the servers are, or how they are started."""

    servers: Annotated[int | tuple[str, ...], BeforeValidator(_check_servers)] = Field(
        1,
        description="The number of servers that are started on the machine of the first process, or the addresses of "
        "some that run already: `[http://HOST:PORT]`.",
    )
    python: str = Field("python3", description="The Python interpreter that has vLLM.")
    args: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of `vllm serve`, such as `enforce_eager: true`."
    )
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables of the servers.")
    folder: AnyPath = Field(
        Path("/dev/shm"), description="Where the weights are handed over: a folder that the servers can read."
    )
    timeout_seconds: Positive = Field(
        600.0, description="Maximum seconds of one answer. A server that takes longer is started again."
    )

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers that others start."""
        return self.servers if isinstance(self.servers, tuple) else ()


class VllmServer:
    """A server, as the first rank sees it; `version` is that of the weights that it was last given."""

    def __init__(self, address: str, start: Callable[[], "subprocess.Popen[bytes]"] | None, log: Path) -> None:
        """`start`: starts its process; None: others start it."""
        self.address, self._start, self._log = address, start, log
        self.version: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._num_starts, self._was_up = 0, False

    def keep_up(self) -> bool:
        """Start the process if it has ended. Returns whether the server answers.

        Raises:
            ConfigError: the first start has failed.
            TrainingError: several have, later.
        """
        if self._start is not None and (self._process is None or self._process.poll() is not None):
            if self._num_starts >= (_MOST_STARTS if self._was_up else 1):
                kind = TrainingError if self._was_up else ConfigError
                give_up(kind, f"the server ended {self._num_starts} times before it answered; see {self.tell()}")
            self.stop()
            self._num_starts, self._process = self._num_starts + 1, self._start()
        try:
            ask(self.address, "GET", "/health", None, _REACH_SECONDS)
        except (*_FAILURES, TrainingError) as error:
            if isinstance(error, TimeoutError):  # it hangs
                self.stop()
            return False
        self._num_starts, self._was_up = 0, True
        return True

    def load(self, folder: Path, version: int) -> str | None:
        """Read the weights of a folder, forget the keys and values of older ones, and take on the version's name.

        Returns why that failed; the server is then ended.
        """
        rpc, name = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}, {"new_version": str(version)}
        try:
            for path, body in (("/collective_rpc", rpc), ("/reset_prefix_cache", {}), ("/update_weight_version", name)):
                ask(self.address, "POST", path, body, _START_SECONDS)
        except (*_FAILURES, TrainingError) as error:
            self.stop()
            return str(error)
        self.version = version
        return None

    def stop(self) -> None:
        """End the process, with all that it has started; another one is started when it is next needed."""
        self.version = None
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(2 * _LEAVE_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def tell(self) -> str:
        """Return where its log is, and its last lines, for a message."""
        if self._start is None or not self._log.exists():
            return f"the log of {self.address}."
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - _LOG_BYTES))
            lines = file.read(_LOG_BYTES).decode("utf-8", "replace").splitlines()
        return f"{self._log}, which ends with:\n" + "\n".join(f"  {line}" for line in lines[-12:])


def give_up(kind: type[Exception], problem: str) -> NoReturn:
    """Raise an error about the servers."""
    raise kind(f"{_KEY}: {problem}")


def ask(address: str, method: str, path: str, body: Any, seconds: float) -> Any:
    """Send a request to a server and return the JSON that it answers, None if it is empty.

    Raises one of _FAILURES if the server cannot answer, also within `seconds` without a byte; TrainingError if it
    refuses the request, as another one would.
    """
    url = urlsplit(address)
    line = http.client.HTTPConnection(url.hostname or "", url.port or 80, timeout=seconds)
    try:
        line.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        reply = line.getresponse()
        text = reply.read().decode("utf-8", "replace")
    finally:
        line.close()
    problem = f"{address}{path} answered {reply.status}: {text[:500]}"
    if reply.status >= 400:
        give_up(TrainingError if reply.status < 500 else ConnectionError, problem)
    return json.loads(text) if text else None


def read_answer(reply: Any, version: int) -> Answer:
    """Return the tokens in a reply of `/inference/v1/generate`, and their log-probabilities.

    Raises one of _FAILURES if other weights than those of `version` have drawn a token, or the reply is not complete.
    """
    [choice] = reply["choices"]
    tokens = tuple(choice["token_ids"])
    scores = [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]
    versions = sorted({span["version"] for span in choice["weight_versions"]})
    if versions != [str(version)] or len(tokens) != len(scores) or not tokens:
        problem = f"{len(tokens)} tokens with {len(scores)} log-probabilities by weights {versions}, not {version}"
        give_up(ConnectionError, problem)
    return tokens, scores


class VllmSampler:
    """Samples as `rollout.sampler: vllm` says.

    The first rank starts the servers and gives them weights; each rank sends its own prompts. An answer depends on the
    weights, the prompt and its seed, up to rounding: vLLM computes the answers of a batch together.
    """

    section = VllmConfig
    num_bytes = 0
    """The weights and caches of the servers are not in this process."""
    limits = (
        Limit("rollout.top_p", (1.0,), "gives log-probabilities over all tokens"),
        Limit("rollout.top_k", (0,), "gives log-probabilities over all tokens"),
        Limit("rollout.environment", (None,), "answers in one turn"),
        Limit("adapter.method", ("full",), "gets whole weights"),
        Limit("train.loop", (None,), "gives log-probabilities at the temperature of sampling alone"),
        Limit("engine", ("native",), "reads the weights of that engine"),
    )

    def __init__(self, learner: "Learner") -> None:
        """Write the weights, start the servers and wait until they answer. Collective.

        Raises:
            ConfigError: a server cannot be started or reached, or ranks on another machine cannot reach it; on every
                rank.
        """
        import torch.distributed as dist

        from echelon.learn.distributed.objects import gather_objects
        from echelon.learn.model.build import build_on_meta

        self._learner, self._everyone = learner, learner.meshes.everyone
        self._rank = dist.get_rank(self._everyone)
        self._data_ranks = gather_objects(learner.meshes.data_rank, self._everyone)
        self._config: VllmConfig = getattr(learner.recipe.rollout, "vllm", None) or VllmConfig()
        self._skeleton = build_on_meta(learner.config)
        self._version: int | None = None
        self._servers: list[VllmServer] = []
        self._folder: Path | None = None
        self.report: Callable[[str], object] = lambda activity: None
        """Called on every rank with what a wait is for, so that nobody takes it for a hang."""
        stack = ExitStack()
        self.close = weakref.finalize(self, _close, self._servers, stack)
        """Ends the servers that were started; also called when this is dropped, or the process exits."""
        try:
            self._on_first(partial(self._open, stack))
            self._update()
        except BaseException:
            self.close()
            raise

    def answer(self, prompts: Sequence[Sequence[int]], sampling: "Sampling") -> "Rollouts":
        """Answer prompts with the weights as they are now, `sampling.num_samples` times each. Collective.

        `log_probabilities` are those at the temperature of sampling. A server that fails is left out, and what it has
        not answered goes to others; it is started again.

        Raises:
            TrainingError: no server answers any more, or one refuses a request; on every rank.
        """
        import torch

        from echelon.learn.answers.rollouts import Rollouts, draw_seed

        learner, size = self._learner, sampling.num_samples
        rows = [tuple(prompt) for prompt in prompts for _ in range(size)]
        count = learner.recipe.global_batch_size // size
        first = learner.place.share(count).start * size
        options = {
            "temperature": sampling.temperature, "max_tokens": sampling.max_tokens, "logprobs": 0,
            "stop_token_ids": list(learner.stops), "ignore_eos": True, "detokenize": False,
        }  # fmt: skip
        seeds = [draw_seed(sampling.seed, row, first + number) for number, row in enumerate(rows)]
        answers, scores = zip(*self._draw(rows, [{**options, "seed": seed} for seed in seeds], size), strict=True)
        columns = [torch.tensor(row, dtype=torch.float32) for row in scores]
        ended, versions = [row[-1] in learner.stops for row in answers], [learner.num_steps] * len(rows)
        most = learner.place.count(count) * size
        return Rollouts(rows, answers, columns, columns, ended, learner.place, most, versions=versions)

    def _draw(self, rows: Sequence[Sequence[int]], options: Sequence[Mapping[str, Any]], size: int) -> list[Answer]:
        """Have this rank's prompts answered, in rounds until those of all ranks are. Collective.

        Of the ranks that read the same data one asks, because rounding may lead vLLM to two answers.
        """
        from echelon.learn.distributed.objects import gather_found, gather_objects

        asker = self._data_ranks.index(self._data_ranks[self._rank])
        bodies = [{"token_ids": row, "sampling_params": params} for row, params in zip(rows, options, strict=True)]
        done: dict[int, Answer] = {}
        total, in_vain = -1, 0
        while total:
            client = VllmClient(self._update(), self._learner.num_steps, self._config.timeout_seconds)
            left = [number for number in range(len(rows)) if number not in done] if asker == self._rank else []
            results = gather_found(partial(client.run, bodies, left, size, done), self._everyone)
            failed = {address: reason for reasons, _ in results for address, reason in reasons.items()}
            before, total = total, sum(missing for _, missing in results)
            in_vain = in_vain + 1 if total == before else 0
            self._on_first(partial(self._stop, failed, in_vain))
        if len(set(self._data_ranks)) < len(self._data_ranks):
            done = gather_objects(done, self._everyone)[asker]
        return [done[number] for number in range(len(rows))]

    def _on_first(self, work: Callable[[], Any]) -> Any:
        """Do something on the first rank, and return its result on every rank. Collective; errors are too."""
        from echelon.learn.distributed.objects import gather_found

        is_first = self._learner.meshes.is_first
        return gather_found(lambda: work() if is_first else None, self._everyone)[0]

    def _open(self, stack: ExitStack) -> None:
        """Make the folder of the weights, with all but the weights, and prepare the servers."""
        learner, config = self._learner, self._config
        if not config.urls and not learner.meshes.is_one_machine:
            give_up(
                ConfigError,
                "its servers are started for this machine alone, and processes are on others too; start them yourself, "
                "and set rollout.vllm.servers: [http://HOST:PORT].",
            )
        self._folder = folder = stack.enter_context(scratch_folder("weights", config.folder.absolute()))
        folder.chmod(0o755)
        learner.config.save_pretrained(folder)
        logs = learner.recipe.run.dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._servers += [VllmServer(url, None, logs) for url in config.urls]
        for number in range(config.servers if isinstance(config.servers, int) else 0):
            port, log = find_free_port(_HOST), logs / f"vllm-{number}.log"
            command = build_command(
                config, folder, port, learner.plan.precision.compute, learner.recipe.data.sequence_len
            )
            self._servers.append(VllmServer(f"http://{_HOST}:{port}", build_starter(command, folder, log), log))

    def _update(self) -> list[str]:
        """Give the servers the weights as they are now. Returns the addresses of those that have them. Collective."""
        version = self._learner.num_steps
        if version != self._version:
            unready = [server.address for server in self._servers if server.version is None]
            self._on_first(partial(self._stop, unready))  # nobody reads the files while they are written
            self._write()
        seconds = _REACH_SECONDS if self._version is None and self._config.urls else _START_SECONDS
        deadline, problems = time.monotonic() + seconds, dict[str, str | None]()
        while not (addresses := self._on_first(partial(self._look, version, deadline, problems))):
            self.report("waiting for servers of vLLM")
            time.sleep(_LOOK_SECONDS)
        self._version = version
        return list(addresses)

    def _look(self, version: int, deadline: float, problems: dict[str, str | None]) -> list[str]:
        """Return the addresses of the servers that have the weights; none before a first answer of all of them."""
        ready, is_start = self._load(version, problems), self._version is None
        if len(ready) == len(self._servers) or (ready and not is_start):
            return ready
        if time.monotonic() > deadline:
            late = next(server for server in self._servers if server.address not in ready)
            reason = problems.get(late.address) or "no answer"
            kind = ConfigError if is_start else TrainingError
            give_up(kind, f"{late.address} was not ready in time ({reason}); see {late.tell()}")
        return []

    def _load(self, version: int, problems: dict[str, str | None]) -> list[str]:
        """Have the servers that answer load the weights. Returns those that have them; notes why others have not."""
        folder = self._folder
        assert folder is not None, "opened on this rank"
        up = [server for server in self._servers if server.keep_up()]
        stale = [server for server in up if server.version != version]
        with ThreadPoolExecutor(len(self._servers)) as pool:
            reasons = pool.map(lambda server: server.load(folder, version), stale)
        problems |= zip((server.address for server in stale), reasons, strict=True)
        return [server.address for server in up if server.version == version]

    def _stop(self, addresses: Collection[str], in_vain: int = 0) -> None:
        """End servers; they are started again when they are next needed, but not after _MOST_STARTS rounds in vain."""
        stopped = [server for server in self._servers if server.address in addresses]
        if in_vain == _MOST_STARTS:
            reasons = addresses.values() if isinstance(addresses, Mapping) else ()
            give_up(TrainingError, f"requests failed {in_vain} times ({'; '.join(reasons)}); see {stopped[0].tell()}")
        for server in stopped:
            server.stop()

    def _write(self) -> None:
        """Write the weights into the folder, gathered piece by piece. Collective."""
        from echelon.learn.checkpoint.export import DTYPES, write_weights
        from echelon.learn.distributed.objects import gather_objects

        tensors = self._learner.engine.state_dict()
        state = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
        owners: dict[str, int] = {}
        for rank, names in enumerate(gather_objects(list(state), self._everyone)):
            owners = dict.fromkeys(names, rank) | owners
        compute = f"torch.{self._learner.plan.precision.compute}"
        dtype = next(name for name, value in DTYPES.items() if str(value) == compute)
        write_weights(partial(self._gather, state, owners), self._skeleton, self._folder, dtype, verifies=False)

    def _gather(self, state: Mapping[str, Any], owners: Mapping[str, int], names: Sequence[str]) -> dict[str, Any]:
        """Return whole weights on the CPU of the first rank, one after another; nothing on others. Collective."""
        import torch
        import torch.distributed as dist

        from echelon.learn.checkpoint.export import stored_tensors
        from echelon.learn.model.sharding import whole

        is_first, shapes, gathered = self._learner.meshes.is_first, stored_tensors(self._skeleton), {}
        for name in names:
            tensor = whole(state[name]) if name in state else torch.empty(0)
            if owners[name]:  # on another pipeline stage
                if self._rank == owners[name]:
                    dist.send(tensor.float(), group_dst=0, group=self._everyone)
                elif is_first:
                    tensor = torch.empty(shapes[name].shape, device=self._learner.device)
                    dist.recv(tensor, group_src=owners[name], group=self._everyone)
            if is_first:
                gathered[name] = tensor.cpu()
        return gathered


class VllmClient:
    """Sends the requests of one rank to servers, and those that one has not answered to the others."""

    def __init__(self, addresses: Sequence[str], version: int, seconds: float) -> None:
        self._addresses, self._version, self._seconds = addresses, version, seconds
        self.failed: dict[str, str] = {}
        """Why servers have failed, by address."""

    def run(
        self, bodies: Sequence[Mapping[str, Any]], left: Sequence[int], size: int, done: dict[int, Answer]
    ) -> tuple[dict[str, str], int]:
        """Have requests answered, into `done`. Returns the servers that have failed, and how many answers are missing.

        Requests of one prompt, `size` of them, go to one server, which reads the prompt once.

        Raises:
            TrainingError: a server refuses a request.
        """
        with ThreadPoolExecutor(max(1, min(_MOST_THREADS, len(left)))) as pool:
            answers = pool.map(lambda number: self._ask(bodies[number], number // size), left)
            done |= {number: answer for number, answer in zip(left, answers, strict=True) if answer is not None}
        return self.failed, sum(number not in done for number in left)

    def _ask(self, body: Mapping[str, Any], start: int) -> Answer | None:
        for number in range(len(self._addresses)):
            address = self._addresses[(start + number) % len(self._addresses)]
            if address in self.failed:
                continue
            try:
                reply = ask(address, "POST", "/inference/v1/generate", body, self._seconds)
                return read_answer(reply, self._version)
            except _FAILURES as error:
                self.failed[address] = f"{address}: {type(error).__name__}: {error}"
        return None


def build_command(config: VllmConfig, folder: Path, port: int, dtype: str, length: int) -> list[str]:
    """The command of a server that listens at a port of this machine alone."""
    options = {
        "model": str(folder), "served_model_name": "policy", "host": _HOST, "port": port, "dtype": dtype,
        "max_model_len": length, "logprobs_mode": "processed_logprobs", "generation_config": "vllm",
        "skip_tokenizer_init": True, "enable_scale_out": True, "disable_uvicorn_access_log": True, **config.args,
    }  # fmt: skip
    words = list[str]()
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{flag}")
        else:
            words += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    unset = [word for name in _UNSET for word in ("-u", name)]
    variables = [f"{name}={value}" for name, value in (_ENVIRONMENT | config.env).items()]
    return ["env", *unset, *variables, config.python, "-m", "vllm.entrypoints.openai.api_server", *words]


def build_starter(command: Sequence[str], folder: Path, log: Path) -> Callable[[], "subprocess.Popen[bytes]"]:
    """What starts a server in a process group of its own, which ends with this process, even one that was killed."""

    def start() -> "subprocess.Popen[bytes]":
        keeper = [sys.executable, "-I", "-S", "-c", _KEEPER, str(os.getpid()), str(folder)]
        with log.open("ab") as output:
            return subprocess.Popen(
                [*keeper, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    return start


def _close(servers: Sequence[VllmServer], stack: ExitStack) -> None:
    for server in servers:
        server.stop()
    stack.close()
