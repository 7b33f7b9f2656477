"""`echelon train`: as the parent of workers on this machine, or as one rank under another launcher."""

import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from echelon.ground.errors import ConfigError, EchelonError, LaunchError
from echelon.ground.hosts import THIS_MACHINE, HostGroup, is_coordinator
from echelon.ground.launch_environment import (
    find_host_dir,
    find_host_group,
    find_place,
    hosted_environment,
    is_elastic,
    is_gpu_private,
    keeps_old_addresses,
    kernel_cache_environment,
    managed_environment,
    shares_files,
    torch_environment,
    worker_environment,
)
from echelon.ground.logs import keep_console_in, keep_line
from echelon.ground.run_files import is_run
from echelon.ground.scratch import scratch_folder
from echelon.ground.variables import asked_environment, read_environment, set_default_variables, set_variables
from echelon.learn.distributed.runtime import use_deterministic_algorithms
from echelon.planner.hardware.accelerators import Cluster
from echelon.planner.hardware.detection import detect_cluster, detect_launched_cluster
from echelon.planner.hardware.efa import explain_no_efa
from echelon.planner.hardware.gpu_check import check_gpus, find_needed
from echelon.planner.machines import limit_to_weakest
from echelon.planner.replica_limits import name_living_on, refuse_living_on
from echelon.recipe.document import Recipe
from echelon.recipe.synchronization import CONTINUES
from echelon.run.folder.run_folder import RunFolder
from echelon.run.lifecycle.process_group import default_num_processes, open_store, watch_starter
from echelon.run.lifecycle.separate_folders import (
    Preparation,
    announce_commits,
    await_fetched,
    await_ready,
    await_value,
    check_hosts,
    fetch_announced,
    mark_ready,
    receive_run,
    send_run,
)
from echelon.run.lifecycle.setup import PreparedRun, digest_run, prepare_run
from echelon.run.supervise.agent import Agent, worker_argv
from echelon.run.supervise.outcome import (
    DONE,
    FAILED,
    LEAVING_VARIABLE,
    REFUSED,
    STOPPED,
    Outcome,
    is_final,
    is_secondary,
    report,
    write_outcome,
)
from echelon.run.supervise.workers import WarmStart, Workers, workers_warmed

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from echelon.run.lifecycle.worker import RankProcess

logger = logging.getLogger(__name__)

_READY_KEY = "echelon/run"
_POLL_SECONDS = 0.5
# How long another rank of the machine may take to say why it is refused.
_SPEAKING_SECONDS = 30.0
# How long a shared file system may take to show another machine's files.
VISIBLE_SECONDS = 15.0
# How long the old rank 0 of a lost machine may survive while torchrun has already started a new one.
_PATIENCE_SECONDS = 15.0
_SHARED_STORE = (
    "torchrun: its workers share the agent's store, which keeps addresses of earlier starts, so restarts may fail; "
    "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun"
)


def train_locally(
    recipe: Recipe, num_processes: int | None, fresh: bool, warm: WarmStart | None = None, here: int | None = None
) -> Outcome:
    """Prepare the run here, start its workers on this machine, and wait for them; None means one per device.

    `warm`: the process that forks the workers, from `workers_warmed`. `here`: the rank that runs in this process, in
    its terminal; None: all ranks are workers.
    """
    _refuse_replacing(recipe)
    _check_gpus(recipe, num_processes)
    count = default_num_processes() if num_processes is None else num_processes
    if here is not None:
        _check_terminal_rank(recipe, here, count)
    run = prepare_run(recipe, fresh, lambda: detect_cluster(count), read_environment())
    if run is None:
        return Outcome(DONE)
    folder = run.folder
    try:
        folder.clear_outcomes()
        argv = worker_argv("echelon.run.lifecycle.worker", str(folder.path))
        job = _kept(_make_job(recipe, argv, count, folder, managed_environment()), recipe)
        if here is None:
            outcome = Agent(THIS_MACHINE, warm).submit(job)
        else:
            from echelon.run.lifecycle.terminal_rank import TerminalRank

            outcome = TerminalRank(job, here, warm).run()
        if outcome.code == DONE or not is_run(folder.path):  # without a folder there is nothing to clean up or record
            return outcome
        folder.sweep()
        return _describe_ending(folder, outcome)
    finally:
        folder.unlock()


def _check_terminal_rank(recipe: Recipe, rank: int, count: int) -> None:
    """Raise ConfigError if no rank of this job can run in a terminal, or this one is not in it."""
    if (key := recipe.goes_on or name_living_on(recipe)) is not None:
        raise ConfigError(
            f"--here does not work with {key}, which replaces lost processes by new ones that have no terminal; use "
            "sync.name=every_step and fault.on_lost_process=restart."
        )
    if rank >= count:
        raise ConfigError(f"--rank {rank}: this job has the ranks 0 to {count - 1}; give one, or a larger --nproc.")


def _describe_ending(folder: RunFolder, outcome: Outcome) -> Outcome:
    """Record a failure in events.jsonl, and add to the message of a stopped run where it resumes."""
    if outcome.code == DONE:
        return outcome
    stopped, budget = outcome.message.startswith("stopped by"), outcome.message.startswith("stopped by budget")
    step = folder.newest_step()
    with suppress(OSError):  # a full disk may be the cause
        folder.rows.append_event(
            "budget" if budget else "signal" if stopped else "failure",
            step=step,
            code=outcome.code,
            message=outcome.message,
        )
    if not stopped or budget:
        return outcome
    if step is None:
        return Outcome(outcome.code, f"{outcome.message}; no checkpoint was saved yet")
    return Outcome(
        outcome.code, f"{outcome.message}; the newest checkpoint is step {step}, and the same command resumes from it"
    )


def train_on_hosts(
    recipe: Recipe, arguments: Sequence[str], group: HostGroup, num_processes: int | None, fresh: bool
) -> tuple[Outcome, bool]:
    """Run the agent of this machine, one of several: start its ranks with `arguments`, and wait for the end of all.

    Returns how the job ended, the same on every machine, and whether this machine reports it to the user. Machines
    without shared files have separate logs, so each reports; and each reports the loss of others, after which its log
    may be the only one at hand.
    """
    asked = None if group.is_alone else name_living_on(recipe)
    if not group.num_spares or asked is not None:
        _refuse_replacing(recipe)
    _check_store(group, fresh)
    if asked is not None:
        check_hosts(recipe, group, asked)
        group = replace(group, lives_on=True)
    else:
        refuse_living_on(recipe)
    missing = _find_missing_gpus(recipe, group, num_processes)
    count = default_num_processes() if num_processes is None else num_processes
    if fresh and (not group.shares_files or is_coordinator(group)):
        _move_aside(RunFolder(recipe.run.dir))
    preparation = Preparation(recipe, count, group.max_nodes)
    with scratch_folder("host") as scratch, workers_warmed(count) if asked is not None else nullcontext() as warm:
        agent = Agent(group, warm, recipe.fault, missing)
        outcomes = scratch / "outcomes"
        outcomes.mkdir()
        folder = RunFolder(recipe.run.dir, outcomes)
        environment = hosted_environment(outcomes, group.shares_files) | kernel_cache_environment()
        environment[LEAVING_VARIABLE] = str(int(group.may_leave))
        if asked is not None:
            argv = worker_argv("echelon.run.lifecycle.worker", str(folder.path))
            job = _make_job(recipe, argv, count, folder, environment | managed_environment())
            job = _kept(replace(job, num_machines=group.max_nodes, prepare=preparation.prepare), recipe)
        else:
            argv = worker_argv("echelon", "train", *arguments)
            job = _make_job(recipe, argv, count, folder, environment)
        outcome = agent.submit(job)
    if agent.keeps_journal and is_run(folder.path):
        outcome = _describe_ending(folder, outcome)
    preparation.end()
    return outcome, agent.is_coordinator or agent.has_lost_others or not group.shares_files


def _check_store(group: HostGroup, fresh: bool) -> None:
    """Raise ConfigError for what does not work with a store outside of the job, where any machine may coordinate."""
    if group.store_name is not None and fresh:
        raise ConfigError(
            "--fresh needs one machine that is known before the start, and with --rendezvous etcd://... there is none; "
            "use --rendezvous HOST:PORT with one of the machines, or move the old run away."
        )


def _find_missing_gpus(recipe: Recipe, group: HostGroup, num_processes: int | None) -> str | None:
    """Why this machine, one of several, lacks GPUs that its job asked for; None if it has them.

    Its agent tells the other machines. Raises ConfigError if there are none.
    """
    try:
        _check_gpus(recipe, num_processes)
    except ConfigError as error:
        if group.is_alone:
            raise
        return str(error)
    if not group.is_alone:
        _warn_without_efa()
    return None


def _warn_without_efa() -> None:
    if (fault := explain_no_efa(read_environment())) is not None:  # NCCL would not use the network that is for it
        logger.warning(f"network: {fault}")


def _check_gpus(recipe: Recipe, num_processes: int | None) -> None:
    """Raise ConfigError if this machine lacks GPUs that its job asked for; the workers check it again at each start."""
    needed = find_needed(num_processes)
    set_variables({} if needed is None else asked_environment(needed.count, needed.by))
    if line := check_gpus(needed, recipe.train.allow_cpu):
        logger.warning(line)


def _make_job(
    recipe: Recipe, argv: tuple[str, ...], count: int, folder: RunFolder, variables: Mapping[str, str]
) -> Workers:
    environment = {**worker_environment(count, recipe.train.deterministic), **variables}
    fault = recipe.fault
    return Workers(argv, count, folder, environment, fault.max_restarts, fault.notice_seconds)


def _kept(job: Workers, recipe: Recipe) -> Workers:
    """The job with what it needs so that the loss of a process does not restart the others, if they can live on."""
    sync = recipe.sync
    if recipe.fault.on_lost_process == "replace":
        return replace(job, min_replicas=job.world_size, needs_all=True)
    if recipe.goes_on is None:
        return job
    size = job.world_size // recipe.num_replicas if recipe.goes_on == CONTINUES else 1
    return replace(job, min_replicas=sync.min_replicas, num_essential=sync.num_essential, replica_size=size)


def _move_aside(folder: RunFolder) -> None:
    """Move the old run aside, before any machine can start a rank that would resume it."""
    if is_run(folder.path):
        folder.lock()
        target = folder.move_aside()
        folder.unlock()
        logger.info(f"run: the old run is now in {target}")


def _refuse_replacing(recipe: Recipe) -> None:
    if recipe.fault.on_straggler == "replace":
        raise ConfigError(
            "fault.on_straggler=replace needs a machine that waits: start echelon train with --nodes N+SPARES on N "
            "machines and the spares, with fault.on_lost_process=restart; or use "
            "fault.on_straggler: stop."
        )


def train_hosted(recipe: Recipe, place: Path) -> NoReturn:
    """Run one rank started by echelon's agent of this machine; writes its outcome to `place` for the agent.

    Exits with 0 when the job is done, or stopped after a save. Collective: every rank calls it.
    """
    from echelon.run.lifecycle.worker import RankProcess, leave

    watch_starter()
    process = RankProcess(RunFolder(recipe.run.dir, place))
    process.listen(process.folder.stop_path)
    process.leave_after_peers()
    try:
        outcome = train_as_rank(recipe, False, process)
    except EchelonError as error:
        outcome = Outcome(error.exit_code, str(error))
        ending = report(find_place().rank, error.exit_code, str(error), is_secondary(error), is_final(error))
        write_outcome(place, ending)
    leave(0 if outcome.code in (DONE, STOPPED) else 1)


def train_as_rank(recipe: Recipe, fresh: bool, hosted: "RankProcess | None" = None) -> Outcome:
    """Run one rank of a job started by torchrun, mpirun or srun, or, `hosted`, by echelon's agent of this machine.

    Rank 0 prepares the run while the others poll a store for its result: no collective is active that could time out
    during tokenization. Collective: every rank calls it.
    """
    refuse_living_on(recipe)
    if hosted is None:  # else echelon's agent has checked it, and has set them
        _refuse_replacing(recipe)
        set_default_variables(torch_environment(find_place().local_world_size))
    # Imported first, so that the watchdog and the log are ready before anything slow.
    from echelon.run.lifecycle.worker import RankProcess, redirect_output

    watch_starter()
    if (refusal := _refuse_rank(recipe, hosted is not None)) is not None:
        return refusal
    if recipe.train.deterministic:
        use_deterministic_algorithms()
    store = open_store()
    rank = find_place().rank
    folder = RunFolder(recipe.run.dir, find_host_dir())
    with nullcontext() if hosted is None else hosted.stopped_early():
        if rank == 0:
            run = _prepare_for_all(recipe, fresh, store)
            if isinstance(run, Outcome):
                return run
        elif (ending := _follow_rank_zero(recipe, folder, store)) is not None:
            return ending
    errors = redirect_output(folder).stderr
    process = hosted or RankProcess(folder)
    if hosted is None:
        process.listen()
    outcome = process.run(store)
    if hosted is not None:  # the agent reports it
        return Outcome(outcome.code)
    # A refusal or a stop is the same on every rank, so only rank 0 reports it.
    if not outcome.secondary and (rank == 0 or outcome.code not in (REFUSED, STOPPED)):
        ending = _describe_ending(folder, Outcome(outcome.code, outcome.message))
        if ending.message:
            line = f"echelon: {ending.message}"
            errors.write(f"{line}\n")
            keep_console_in(folder.console_path, rank)
            keep_line(line)
    errors.flush()
    return Outcome(outcome.code)


def _refuse_rank(recipe: Recipe, is_hosted: bool) -> Outcome | None:
    """Raise ConfigError if this rank sees fewer GPUs than its job asked for; an Outcome ends it without a message.

    `is_hosted`: an agent of echelon started it, which has said what is allowed.
    """
    place = find_place()
    count = 1 if is_gpu_private() else place.local_world_size
    try:
        line = check_gpus(find_needed(None if is_hosted else count), recipe.train.allow_cpu)
    except ConfigError as error:
        if is_hosted or is_gpu_private() or place.local_rank == 0:
            raise
        time.sleep(_SPEAKING_SECONDS)  # a launcher ends all ranks when one exits: the first one here has the message
        return Outcome(error.exit_code)
    if not is_hosted and place.rank == 0:
        if line is not None:
            logger.warning(line)
        if not place.is_one_machine:
            _warn_without_efa()
    return None


def _prepare_for_all(recipe: Recipe, fresh: bool, store: "Store") -> PreparedRun | Outcome:
    """Rank 0: prepare the run, then report the result to the others, also after an error. An Outcome ends all ranks."""
    word: dict[str, int] = {"code": FAILED, "digest": 0}
    commits, variables = dict[str, str](), read_environment()

    def find_cluster() -> Cluster:
        return limit_to_weakest(detect_launched_cluster(find_place()), recipe, variables)

    def announce(found: Mapping[str, str]) -> None:
        commits.update(found)
        announce_commits(found, store)

    try:
        if not shares_files() and not find_host_group().coordinates:  # checkpoints would be on another machine
            raise LaunchError("rank 0 is not on the first machine of the job; start the same command again.")
        patience = _PATIENCE_SECONDS if is_elastic() else 0.0
        if keeps_old_addresses():
            logger.warning(_SHARED_STORE)
        run = prepare_run(recipe, fresh, find_cluster, variables, patience, announce)
        if commits and (code := await_fetched(store)) is not None:  # the failed rank reports the reason
            word["code"] = code
            return Outcome(code)
        host_dir = find_host_dir()
        if run is not None and host_dir is not None and not shares_files():
            send_run(run.folder, store)
            mark_ready(store, host_dir)
        word = {"code": DONE, "digest": digest_run(run.folder) if run else 0}
    except EchelonError as error:
        word["code"] = error.exit_code
        # Reported before the others exit: a launcher ends this rank as soon as another one has exited.
        if (host_dir := find_host_dir()) is not None:
            write_outcome(host_dir, report(0, error.exit_code, str(error), final=is_final(error)))
        else:
            line = f"echelon: {error}"
            print(line, file=sys.stderr, flush=True)
            keep_line(line)
        return Outcome(error.exit_code)
    finally:
        store.set(_READY_KEY, json.dumps(word))
        if not word["digest"]:
            # This process may host the store: give the others time to read the result.
            time.sleep(3 * _POLL_SECONDS)
    return Outcome(DONE) if run is None else run


def _follow_rank_zero(recipe: Recipe, folder: RunFolder, store: "Store") -> Outcome | None:
    """Wait until this rank can train; an Outcome instead ends it."""
    word: dict[str, int] = {}

    def await_word() -> bool:
        word.update(json.loads(await_value(store, _READY_KEY)))  # rank 0's result: {"code", "digest"}
        return word["code"] == DONE and word["digest"] != 0

    host_dir = None if shares_files() else find_host_dir()
    local_recipe = fetch_announced(recipe, store, lambda: store.check([_READY_KEY]))
    if local_recipe is not None and host_dir is not None and find_place().local_rank == 0:
        trains = receive_run(local_recipe, folder, store, await_word)
        mark_ready(store, host_dir)
    else:
        trains = await_word()
        if trains and host_dir is not None:
            await_ready(store, host_dir)
    if not trains:
        return Outcome(word["code"])
    # The file system may show rank 0's files late; `load_agreed_run` raises an error if it does not.
    deadline = time.monotonic() + VISIBLE_SECONDS
    while digest_run(folder) != word["digest"] and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return None
