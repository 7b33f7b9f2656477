"""Which failures are restarted, how often, and the message if one is not."""

from echelon.ground.errors import CheckpointError, ConfigError, LaunchError, TrainingError
from echelon.run.folder.run_folder import RunFolder
from echelon.run.supervise.decision import Restarts, Vacancies
from echelon.run.supervise.outcome import FAILED, Outcome, is_final


def killed(rank, pid=100):
    return Outcome(FAILED, f"rank {rank} (pid {pid}) was killed by SIGKILL; see runs/x/logs/rank-{rank:05d}.log")


def test_up_to_the_limit():
    restarts = Restarts(2)
    assert restarts.refuse(killed(0), None) is None
    assert restarts.refuse(killed(1), 10) is None
    assert restarts.done == 2
    ending = restarts.refuse(Outcome(FAILED, "rank 0 failed: ValueError: x; see log"), 20)
    assert ending == Outcome(
        FAILED,
        "rank 0 failed: ValueError: x; see log; not restarted: fault.max_restarts=2 is reached; the same command "
        "resumes from step 20",
    )


def test_a_machine_waits_for_others_while_there_is_progress():
    vacancies = Vacancies(2)
    steps = [None, None, None, 10, 10, 20, 30, 30, 30]
    assert [vacancies.wait("lost", step, [], 0.0) for step in steps] == [
        True, True, False, True, True, True, True, True, False,
    ]  # fmt: skip
    assert not Vacancies(2).wait("lost", 1, ["SIGTERM"], 60.0)
    assert not Vacancies(0).wait("lost", 1, [], 60.0)


def test_a_recurring_failure_ends_the_job():
    """On any rank; a checkpoint in between counts as progress."""
    restarts = Restarts(100)
    steps = [None, None, 10, 10, 20, 20, 20]
    endings = [restarts.refuse(killed(number % 2, number), step) for number, step in enumerate(steps)]
    assert endings[:-1] == [None] * 6
    assert endings[-1].message.endswith(
        "; not restarted: the same failure occurred again without a new checkpoint, 3 times in a row; the same command "
        "resumes from step 20"
    )


def test_the_message_when_a_recurring_failure_reaches_the_limit():
    restarts = Restarts(1)
    restarts.refuse(killed(0), None)
    ending = restarts.refuse(killed(1), None)
    assert ending.message.endswith("=1 is reached; the same failure occurred again without a new checkpoint")


def test_failures_that_would_recur_are_not_restarted():
    ending = Outcome(FAILED, "step 2: loss=nan", final=True)
    assert Restarts(3).refuse(ending, 1) == ending
    assert Restarts(0).refuse(killed(0), 1) == killed(0)
    assert is_final(TrainingError("loss=nan")) and is_final(CheckpointError("third failure"))
    assert not is_final(LaunchError("did not meet")) and not is_final(ValueError("x"))
    try:
        raise CheckpointError("the save failed") from RuntimeError("Connection closed by peer")
    except CheckpointError as error:
        assert not is_final(error)
    assert is_final(ConfigError("x"))


def test_a_restart_clears_reports_and_notices_a_stop(tmp_path):
    folder = RunFolder(tmp_path)
    folder.create()
    for path in (folder.stop_path, folder.death_path, folder.outcomes_dir / "rank-0.json"):
        path.write_text("SIGTERM")
    folder.clear_outcomes(restart=True)
    assert list(folder.outcomes_dir.iterdir()) == [folder.stop_path]
    folder.clear_outcomes()
    assert not list(folder.outcomes_dir.iterdir())


def test_the_last_step_with_a_row(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.rows.last_step() == 0
    folder.metrics_path.write_text('{"kind": "train", "step": 7}\n{"kind": "train", "step": 8}\n{"kind": "tr')
    assert folder.rows.last_step() == 8
