"""Training from rewards: the reward rises, on any number of processes alike, also after kills; failing rewards."""

import json
import signal
import statistics

import pytest

from tests.dist.command import read_lines, train_in_process, write_recipe

pytestmark = pytest.mark.dist

STEPS = 16
REWARDS = '''
import os
import time


def small_letters(answers, records):
    """The fraction of small letters, and a little for the letter that the record asks for."""
    return [
        (sum("a" <= c <= "z" for c in answer) + (record["letter"] in answer)) / (len(answer) + 1)
        for answer, record in zip(answers, records, strict=True)
    ]


def fails_at_first(answers, records):
    count = int(open("calls").read()) if os.path.exists("calls") else 0
    with open("calls", "w") as file:
        file.write(str(count + 1))
    if count < 2:
        time.sleep(600)
    return small_letters(answers, records)


def ends_for_good(answers, records):
    """On one process end the judging process, which then cannot be started again."""
    try:
        os.close(os.open("ended", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return small_letters(answers, records)
    with open(__file__, "w") as file:
        file.write("raise RuntimeError('half written')")
    os._exit(3)


def unjudged_at_the_second_evaluation(answers, records):
    """Every other call has the answers of a whole step, which are more than the held-out prompts."""
    if len(answers) < 32:
        with open("evaluations", "a") as file:
            file.write("x")
        if os.path.getsize("evaluations") != 1:
            return [None] * len(answers)
    return [-1.3] * len(answers)


def same(answers, records):
    return [0.1] * len(answers)


def never(answers, records):
    raise RuntimeError("the judge is ill")
'''


@pytest.fixture
def folder(echelon, tmp_path):
    (tmp_path / "letters.py").write_text(REWARDS)
    records = [{"prompt": f"{n} is ", "letter": chr(97 + n % 26)} for n in range(48)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    write_recipe(
        tmp_path,
        data={"train": "prompts.jsonl", "validation_fraction": 0.2, "sequence_len": 16},
        objective={"name": "grpo"},
        rollout={"group_size": 8, "max_new_tokens": 6, "max_mismatch": 1e-3},
        reward="letters:small_letters",
        train={"steps": STEPS, "global_batch_size": 32, "log_every": 1, "eval_every": 8, "compile": False},
        optim={"learning_rate": 2e-2, "schedule": "constant"},
        checkpoint={"every": 4},
    )
    return tmp_path


def train(folder, name, nproc, *settings, **ends):
    """Train in a process of its own, which `ends` as told; returns its ending, its run, and its rows."""
    ending, run = train_in_process(folder, name, nproc, *settings, **ends)
    rows = read_lines(run.metrics_path) if run.metrics_path.exists() else []
    return ending, run, rows


EXACT = ("step", "loss", "grad_norm", "reward", "solved", "answer_tokens", "entropy", "batch_hash", "tokens")


def exact(rows, keys=EXACT):
    return [[row[key] for key in keys] for row in rows if row["kind"] == "train"]


def rewards(rows):
    return [row["reward"] for row in rows if row["kind"] == "train"]


@pytest.mark.slow
def test_the_reward_rises_and_is_evaluated(folder):
    ending, run, rows = train(folder, "plain", 2)
    assert sum(rewards(rows)[-4:]) > 1.5 * sum(rewards(rows)[:4]), rewards(rows)
    evaluations = [row for row in rows if row["kind"] == "eval"]
    assert [row["step"] for row in evaluations] == [8, 16]
    assert all(row["answers"] > 0 and row["loss"] == -row["reward"] for row in evaluations)
    assert evaluations[1]["reward"] > rewards(rows)[0]
    assert "eval at step 16: reward 0." in ending.out
    last = rows[-2]
    assert last["mismatch_max"] < 1e-3 and last["sample_seconds"] > 0 and last["truncated"] == 1.0
    samples = read_lines(run.rows.samples_path)
    assert {row["step"] for row in samples} == {1, 11, 16}
    assert all(isinstance(row["reward"], float) and row["text"] for row in samples)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "settings"),
    [
        ("ddp", ()),
        ("fsdp", ()),
        ("{tp: 2}", ()),
        ("fsdp", ("adapter.method=lora", "adapter.r=16", "objective.kl_weight=0.05", "optim.learning_rate=0.1")),
    ],
    ids=["ddp", "fsdp", "tp", "fsdp and lora"],
)
def test_processes_draw_the_same_answers(folder, parallel, settings):
    """In fp32 sums differ in their last bits; the draws of the first steps are the same."""
    _, _, alone = train(folder, "one", 1, *settings)
    _, _, together = train(folder, "two", 2, f"parallel={parallel}", *settings)
    assert rewards(together)[:6] == pytest.approx(rewards(alone)[:6], abs=1e-9)


@pytest.mark.slow
def test_how_many_are_sampled_at_once_changes_no_draw(folder):
    _, _, whole = train(folder, "whole", 1)
    ending, _, few = train(folder, "few", 2, "rollout.max_num_seqs=3", "parallel=fsdp", kill_at=6)
    assert "restart 1 of" in ending.out, ending
    assert rewards(few)[:6] == pytest.approx(rewards(whole)[:6], abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_killed_run_equals_an_uninterrupted_one(folder, nproc):
    _, _, whole = train(folder, "whole", nproc)
    ending, _, killed = train(folder, "killed", nproc, kill_at=6)
    assert "restart 1 of" in ending.out, ending
    assert exact(killed) == exact(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("rollout.updates=3", "objective.clip=[0.2, 0.28]", "objective.normalize=token"),
        ("objective.advantage=leave_one_out", "objective.normalize=constant", "rollout.skip=[uniform]"),
        ("objective.ratio=sequence", "objective.kl_weight=0.05", "rollout.updates=2", "rollout.temperature=0.9"),
        (
            "adapter.method=lora",
            "adapter.r=16",
            "optim.learning_rate=0.1",
            "objective.kl_weight=0.05",
            "rollout.importance_cap=2.0",
            "parallel=fsdp",
        ),
    ],
    ids=["dapo", "rloo and dr grpo", "gspo with kl", "lora"],
)
def test_variants_raise_the_reward(folder, settings):
    _, _, rows = train(folder, "variant", 2, *settings)
    if "adapter.method=lora" not in settings:  # an adapter of a model that knows nothing learns more slowly
        assert sum(rewards(rows)[-4:]) > 1.1 * sum(rewards(rows)[:4]), rewards(rows)
    assert all(row["mismatch_max"] < 1e-3 for row in rows if row["kind"] == "train")
    if any(setting.startswith("objective.kl_weight") for setting in settings):
        kl = [row["kl"] for row in rows if row["kind"] == "train"]
        assert 0 <= kl[0] < kl[-1]
        # At first the model with its adapter is the reference, the model without it.
        assert kl[0] < 1e-9 or "adapter.method=lora" not in settings
    if settings[0].startswith("rollout.updates"):
        assert any(0 < row["clipped"] < 1 for row in rows if row["kind"] == "train")


@pytest.mark.slow
def test_a_reward_that_hangs_is_ended_and_its_answers_are_left_out(folder):
    reward = json.dumps([{"name": "letters:fails_at_first", "timeout_seconds": 2}])
    _, run, rows = train(folder, "hanging", 1, f"reward={reward}")
    failed = [row for row in read_lines(run.events_path) if row["event"] == "reward_failed"]
    assert [row["step"] for row in failed] == [1, 2]
    assert failed[0]["message"].endswith("did not answer within reward.0.timeout_seconds=2.")
    assert rewards(rows)[:2] == [None, None] and rewards(rows)[2] is not None
    assert [row["unjudged"] for row in rows if row["step"] <= 2 and row["kind"] == "train"] == [1.0, 1.0]


@pytest.mark.slow
def test_an_evaluation_in_which_nothing_was_judged_is_no_result(folder):
    """A reward of 0 would be the best. The first evaluation stays the best; before it there is none."""
    settings = ("reward=letters:unjudged_at_the_second_evaluation", "checkpoint.keep_best=true", "train.steps=24")
    ending, run, rows = train(folder, "unjudged", 1, *settings, "checkpoint.keep_last=1")
    evaluations = [row for row in rows if row["kind"] == "eval"]
    assert [(row["step"], row["reward"], row["loss"]) for row in evaluations] == [
        (8, pytest.approx(-1.3), pytest.approx(1.3)), (16, None, None), (24, None, None)
    ]  # fmt: skip
    assert [row["solved"] for row in evaluations] == [0.0, None, None] and evaluations[1]["answers"] == 0
    assert "eval at step 16: no result: no answer could be judged" in ending.out
    assert "best held-out reward -1.3000 at step 8" in ending.out
    assert "On held-out prompts the reward is -1.3" in ending.out
    assert sorted(path.name for path in run.checkpoints_dir.glob("step-*")) == ["step-00000008", "step-00000024"]
    failed = [row for row in read_lines(run.events_path) if row["event"] == "reward_failed"]
    assert [row["step"] for row in failed] == [16, 24] and "gave no number for" in failed[0]["message"]
    state = json.loads((run.checkpoints_dir / "step-00000024" / "state.json").read_text())["train"]
    assert (state["best_step"], state["evaluations_since_best"]) == (8, 0)


@pytest.mark.slow
def test_a_reward_that_always_fails_ends_the_run_with_one_message(folder):
    ending, _, _ = train(folder, "ill", 2, "reward=letters:never", code=1)
    assert (
        "no answer had a reward in 3 steps: reward.0 (letters:never) raised RuntimeError: the judge is ill."
        in ending.err
    )
    assert "Traceback" not in ending.err


@pytest.mark.slow
def test_all_ranks_raise_the_error_of_the_one_whose_rewards_cannot_start_again(folder):
    ending, run, _ = train(folder, "broken", 2, "reward=letters:ends_for_good", "fault.hang_seconds=60", code=1)
    assert ending.seconds < 50, ending
    assert ending.err.count("reward: its process cannot be started again: reward.0.name=letters:ends_for_good") == 1
    assert "half written" in ending.err and "Traceback" not in ending.err
    assert "hang" not in {row["event"] for row in read_lines(run.events_path)}


@pytest.mark.slow
def test_a_signal_while_sampling_saves_and_the_same_command_resumes(folder):
    _, _, whole = train(folder, "whole", 2)
    train(folder, "stopped", 2, kill_at=5, by=signal.SIGTERM, code=3)
    _, _, rows = train(folder, "stopped", 2)
    assert exact(rows) == exact(whole)


@pytest.mark.slow
def test_a_record_without_the_field_is_an_event_and_costs_no_other_answer(folder):
    records = [{"prompt": f"{n} is "} | ({"answer": "a"} if n % 6 else {}) for n in range(48)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    _, run, rows = train(folder, "partial", 2, "reward=exact", "train.steps=4")
    failed = [row["message"] for row in read_lines(run.events_path) if row["event"] == "reward_failed"]
    assert failed and all("(exact) gave no number for" in message for message in failed)
    assert all("the record has no field answer; name another in the reward's options.field." in row for row in failed)
    shares = [row.get("unjudged", 0.0) for row in rows if row["kind"] == "train"]
    assert all(0 <= share < 1 for share in shares) and max(shares) > 0
    assert all(reward is not None for reward in rewards(rows))


@pytest.mark.slow
def test_answers_of_one_token_or_none_are_trained_on(folder):
    _, _, rows = train(folder, "short", 2, "rollout.max_new_tokens=1", "train.steps=4", "rollout.updates=2")
    steps = [row for row in rows if row["kind"] == "train"]
    assert all(row["answer_tokens"] == 1.0 for row in steps) and any(row["grad_norm"] > 0 for row in steps)


def test_rewards_that_never_differ_are_told_once(folder):
    ending, _, rows = train(folder, "same", 2, "reward=letters:same", "train.steps=5")
    told = "step 3: for 3 steps all answers to the same prompt have had the same reward (0.1 on average)"
    assert ending.out.count("all answers to the same prompt") + ending.err.count("all answers to the same prompt") == 1
    assert told in ending.out + ending.err
    for row in rows:
        if row["kind"] == "train":
            assert row["uniform_groups"] == 1.0 and abs(row["reward_std"]) < 1e-12 and row["grad_norm"] < 1e-9


def test_rows_and_samples_tell_what_was_drawn(folder):
    reward = json.dumps([{"name": "letters:small_letters", "weight": 2.0}, {"name": "letters:same"}])
    settings = f"reward={reward}", "train.steps=4", "train.global_batch_size=64", "rollout.updates=2"
    ending, run, rows = train(folder, "told", 2, *settings)
    assert "all answers to the same prompt" not in ending.out + ending.err, ending
    for row in (row for row in rows if row["kind"] == "train"):
        assert (
            row["reward_std"] == pytest.approx(2 * row["reward_small_letters_std"]) and row["reward_same_std"] < 1e-12
        )
        assert row["uniform_groups"] < 1 and row["clipped"] == pytest.approx(row["clipped_low"] + row["clipped_high"])
        assert row["truncated"] == 1 and row["ended_tokens"] is None
    answers = [row for row in read_lines(run.rows.samples_path) if row["step"] == 1]
    earned = [row["reward"] for row in answers]
    assert earned == pytest.approx([2 * row["reward_small_letters"] + row["reward_same"] for row in answers])
    mean, spread = statistics.fmean(earned), statistics.stdev(earned)
    assert [row["advantage"] for row in answers] == pytest.approx([(each - mean) / (spread + 1e-4) for each in earned])
    [line] = [line for line in (ending.out + ending.err).splitlines() if "step 4/4 " in line]
    assert all(name in line for name in ("reward_spread", "reward_small_letters", "answer_tokens", "truncated"))
    assert not any(name in line for name in ("entropy", "mismatch", "_seconds", "_std", "ended_tokens", "clipped_low"))


def test_prompts_that_are_all_too_long_are_refused(folder):
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": "x" * 40}) + "\n" for _ in range(48)))
    ending, run, _ = train(folder, "long", 1, code=2)
    assert "data.sequence_len" in ending.err and "Traceback" not in ending.err, ending
    assert not run.metrics_path.exists()


def test_a_reward_that_is_not_there_is_refused(folder):
    ending, run, _ = train(folder, "absent", 1, "reward=letters:no_such", code=2)
    assert "reward.0.name=letters:no_such: the module letters has no no_such" in ending.err
    assert not run.metrics_path.exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["reward=[]"], "objective.name=grpo needs a reward"),
        (["rollout.group_size=5"], "which rollout.group_size=5 does not divide; use a multiple of it"),
        (["rollout.max_new_tokens=15"], "rollout.max_new_tokens=15 leaves no room for a prompt in data.sequence_len="),
        (["objective.name=causal_lm"], "has no effect with objective.name=causal_lm; set objective.name: grpo, or rem"),
        (["objective.beta=0.2"], "objective.beta=0.2 has no effect with objective.name=grpo; set objective.name: dpo"),
        (["sync.name=local_sgd"], "sync.name=local_sgd: objective.name=grpo replaces echelon's usual loop"),
    ],
)
def test_what_cannot_train_is_refused(echelon, folder, settings, message):
    ending = echelon("train", folder / "recipe.json", *settings)
    assert ending.code == 2 and message in ending.err, ending
    assert not (folder / "runs" / "tiny" / "metrics.jsonl").exists()
