"""Records that share a prompt: each has answers of its own, the same ones on any number of processes."""

import json

import pytest

from tests.dist.command import read_lines, train_in_process, write_recipe
from tests.parity.training import hashes

pytestmark = pytest.mark.dist

NUM_RECORDS, GROUP, STEPS = 4, 2, 3
CODE = '''
import json


def keep(answers, records, path):
    """Write the answers to a file, and reward their letters."""
    with open(path, "a") as file:
        for answer, record in zip(answers, records, strict=True):
            file.write(json.dumps([record["number"], answer]) + "\\n")
    return [sum("a" <= c <= "z" for c in answer) / 9 for answer in answers]


class Seeded:
    """Says a digit of its seed after the model's first turn, and rewards by the seed after the second one."""

    def reset(self, record, seed):
        self.seed, self.turns = seed, 0

    def step(self, answer):
        self.turns += 1
        return f"<{self.seed % 10}>", self.seed % 997 / 997 * (self.turns == 2), self.turns == 2
'''


@pytest.fixture
def folder(echelon, tmp_path):
    (tmp_path / "kept.py").write_text(CODE)
    for name, prompt in (("prompts", "one "), ("held", "two ")):
        records = [json.dumps({"prompt": prompt, "number": number}) + "\n" for number in range(NUM_RECORDS)]
        (tmp_path / f"{name}.jsonl").write_text("".join(records))
    write_recipe(
        tmp_path,
        data={"train": "prompts.jsonl", "validation": "held.jsonl", "validation_fraction": None, "sequence_len": 32},
        objective={"name": "grpo"},
        rollout={"group_size": GROUP, "max_new_tokens": 9},
        train={"steps": STEPS, "global_batch_size": NUM_RECORDS * GROUP, "compile": False, "eval_every": STEPS},
        evaluate={"batches": None},
    )
    return tmp_path


def train(folder, name, nproc, *settings):
    """Train; returns the answers that were judged, those of a group together, and the rows."""
    reward = json.dumps([{"name": "kept:keep", "options": {"path": name}}])
    _, run = train_in_process(folder, name, nproc, f"reward={reward}", *settings)
    return read_lines(folder / name), read_lines(run.metrics_path)


@pytest.mark.parametrize("environment", [None, {"name": "kept:Seeded", "max_turns": 2}], ids=["answers", "turns"])
def test_records_with_one_prompt_have_their_own_answers_on_any_number_of_processes(folder, environment):
    settings = f"rollout.environment={json.dumps(environment)}", f"rollout.max_new_tokens={4 if environment else 9}"
    alone, rows = train(folder, "one", 1, *settings)
    drawn = alone[: STEPS * NUM_RECORDS * GROUP]
    for step in range(STEPS):
        groups = drawn[step * NUM_RECORDS * GROUP :][: NUM_RECORDS * GROUP]
        assert {number for number, _ in groups} == set(range(NUM_RECORDS))
        assert len({answer for _, answer in groups}) == NUM_RECORDS * GROUP, groups
    for name, parallel in (("two", "ddp"), ("tensor", "{tp: 2}")):
        together, others = train(folder, name, 2, f"parallel={parallel}", *settings)
        assert sorted(together) == sorted(alone), parallel
        assert [row["reward"] for row in others] == pytest.approx([row["reward"] for row in rows]), parallel
        assert hashes(others) == hashes(rows), parallel
    assert len(set(hashes(rows))) == STEPS
