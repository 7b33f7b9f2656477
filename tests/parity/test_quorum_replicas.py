"""Replicas of a quorum compute what one process does, and a replica that lacks the state gets it bit for bit."""

import json

import pytest
import torch

from echelon.learn.distributed.mesh import ViewChanged
from echelon.learn.model.sharding import local_part
from echelon.run.training.replica_state import heal, hold
from tests.parity.training import GLOBAL_BATCH, Row, assert_same_curve, masked_trainer, prepare, read_rows, train

STEPS = 6
RANKS = 4
DAMAGED, NEW, WHOLE, OTHER = range(RANKS)
CONTINUE = {"on_lost_process": "continue"}
ROW = Row("ddp", changes={"sync": {"replicas": RANKS}, "fault": CONTINUE}, ranks=RANKS, micro_batch=1)


def heal_rank(rank, world_size, path, plan):
    """Train, then damage the state of one rank, and all that another one has; what each has after healing."""
    with masked_trainer(rank, world_size, path, plan) as trainer:
        trainer.fit()
        contents, held = trainer.saver.contents, hold(trainer)
        right = {name: tensor.clone() for name, tensor in contents.tensors().items()}
        steps_held = {DAMAGED: 2, OTHER: 2}.get(rank)
        if rank == NEW:
            held = None
        elif steps_held is not None:
            state = held.saved.train
            held = type(held)(
                type(held.saved)(type(state)(steps_held), held.saved.judges, held.saved.goodput, held.saved.sync),
                True, False, (), None,
            )  # fmt: skip
        with torch.no_grad():
            for tensor in contents.tensors().values() if rank != WHOLE else ():
                tensor.fill_(7)
        found = heal(contents, held)
        assert found is not None
        same = all(torch.equal(right[name], tensor) for name, tensor in contents.tensors().items())
        nothing = heal(contents, None)
        return same, len(right), found.saved.train.step, found.owes_pause, [row["step"] for row in found.rows], nothing


@pytest.fixture(scope="module")
def quorum(workers, text, tmp_path_factory):
    """The folder and the plan of a quorum of four in which nothing is lost, trained with `heal_rank`; its results."""
    folder = tmp_path_factory.mktemp("quorum")
    path, plan = prepare(ROW, folder, text, STEPS)
    return folder, plan, workers.run(heal_rank, RANKS, str(path), plan)


def test_four_replicas_compute_what_one_process_does(workers, text, tmp_path, quorum):
    folder, plan, _ = quorum
    degrees = plan.dp_replicate, plan.num_replicas, plan.global_batch_size
    assert plan.sync.is_exact and degrees == (1, RANKS, GLOBAL_BATCH)
    rows, expected = read_rows(folder / "run"), train(workers, Row("ddp"), tmp_path, text, STEPS)
    assert_same_curve(rows, expected)
    states = [json.loads(each.read_text()) for each in (folder / "run").glob("checkpoints/*/state.json")]
    assert states and all(len(each["judges"]) == 1 for each in states)


def test_every_replica_gets_the_state_of_the_one_that_is_furthest(quorum):
    _, _, results = quorum
    for same, num_tensors, step, owes_pause, rows, nothing in results:
        assert same and num_tensors > 20
        assert (step, owes_pause, rows, nothing) == (STEPS, False, [STEPS, STEPS], None)


@pytest.mark.parametrize("parallel", ["fsdp", {"tp": 2}, {"pp": 2}], ids=["fsdp", "tp", "pp"])
def test_replicas_of_two_processes_compute_what_one_process_does(workers, text, tmp_path, parallel):
    changes = {"sync": {"replicas": 2}, "fault": CONTINUE}
    row = Row(parallel, changes=changes, ranks=RANKS, micro_batch=1)
    rows = train(workers, row, tmp_path / "quorum", text, STEPS)
    assert_same_curve(rows, train(workers, Row("ddp"), tmp_path / "alone", text, STEPS))


def interrupt_evaluation(rank, world_size, path, plan):
    """Lose a replica between two microbatches of an evaluation; the sizes of what this rank saves before and after."""
    with masked_trainer(rank, world_size, path, plan) as trainer:
        learner = trainer.train_step.learner
        batch = learner.batch(0)
        before = {name: local_part(tensor).shape for name, tensor in learner.engine.state_dict().items()}
        with pytest.raises(ViewChanged), learner.engine.evaluation(learner.objective) as evaluation:
            evaluation.log_probabilities(batch.microbatches[0])
            raise ViewChanged
        return before, {name: local_part(tensor).shape for name, tensor in learner.engine.state_dict().items()}


def test_weights_are_shards_after_an_evaluation_that_was_interrupted(workers, text, tmp_path):
    path, plan = prepare(Row("fsdp", ranks=2, micro_batch=1), tmp_path, text, STEPS)
    for before, after in workers.run(interrupt_evaluation, 2, str(path), plan):
        assert before == after
