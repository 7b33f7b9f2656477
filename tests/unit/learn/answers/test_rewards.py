"""Rewards: the built-in functions, and functions of the user's that fail in every way, in a real process."""

import math
import os
import sys
import time

import math_verify.parser
import pytest

from echelon.ground.errors import ConfigError
from echelon.learn.answers.math_answers import math as equals
from echelon.learn.answers.reward_functions import exact, number, regex
from echelon.learn.answers.rewards import RewardProcess, name_rewards
from echelon.recipe.rollout import RewardConfig

RECORDS = [{"answer": "7"}, {"answer": 12}, {"answer": "it is 1,234.5"}]


def test_rewards_of_the_same_name_are_told_apart():
    rewards = [RewardConfig(name=name) for name in ("model", "exact", "model", "my:own", "my:own", "model")]
    assert name_rewards(rewards) == ["model", "exact", "model_2", "my:own", "my:own_2", "model_3"]


def test_exact_ignores_white_space_around_an_answer():
    assert exact([" 7\n", "12", "1234.5"], RECORDS) == [1.0, 1.0, 0.0]
    assert exact(["b"], [{"right": "b"}], field="right") == [1.0]


def test_number_compares_the_last_numbers():
    assert number(["4 + 3 = 7.", "so 12.0", "1234.50 $"], RECORDS) == [1.0, 1.0, 1.0]
    assert number(["7 or 8", "none", "-1234.5"], RECORDS) == [0.0, 0.0, 0.0]
    assert number(["99"], [{"answer": "100"}], tolerance=0.02) == [1.0]
    assert number(["3e2"], [{"answer": "300"}]) == [1.0]


def test_regex_finds_a_pattern_or_its_group():
    assert regex(["<a>\n1</a>", "1"], RECORDS[:2], pattern="<a>.*</a>") == [1.0, 0.0]
    assert regex([r"\boxed{7}", r"\boxed{13}"], RECORDS[:2], pattern=r"\\boxed\{(.*)\}", field="answer") == [1.0, 0.0]


@pytest.mark.parametrize(
    ("solution", "equal", "others"),
    [
        ("1/2", [r"so \boxed{0.5}", r"$\frac{2}{4}$", r"\boxed{50\%}", "it is 1/2."], [r"\boxed{2}", "0.05", ""]),
        (r"\frac{\sqrt{8}}{2}", [r"\boxed{\sqrt2}", r"$2^{1/2}$"], [r"\boxed{2}", r"\boxed{\frac{\sqrt{8}}"]),
        ("x^2 + 2x + 1", ["$(x+1)^2$", r"\boxed{(1+x)(x+1)}"], [r"\boxed{x^2+1}"]),
        (r"\{1, 2\}", [r"\boxed{\{2, 1\}}"], [r"\boxed{\{1, 2, 3\}}"]),
        (r"We add and get \boxed{1{,}234}.", ["1234", r"\boxed{1,234.0}"], ["1,234 and then 5"]),
        ("The sum is $-3$.", [r"first $4$, at last $\boxed{-3}$"], ["3"]),
    ],
    ids=["fraction", "root", "polynomial", "set", "boxed solution", "solution between dollar signs"],
)
def test_math_compares_as_mathematics(solution, equal, others):
    answers = [*equal, *others]
    expected = [1.0] * len(equal) + [0.0] * len(others)
    assert equals(answers, [{"answer": solution}] * len(answers)) == expected


def test_a_busy_machine_changes_no_comparison(monkeypatch):
    read = math_verify.parser.extract_target_from_pred

    def wait_and_read(*arguments, **named):
        time.sleep(1.2)  # as if other programs ran
        return read(*arguments, **named)

    monkeypatch.setattr(math_verify.parser, "extract_target_from_pred", wait_and_read)
    monkeypatch.setattr("echelon.learn.answers.math_answers._SECONDS", 1)
    assert equals([r"\boxed{0.75}"], [{"answer": "3/4"}]) == [1.0]


def test_a_comparison_that_takes_too_long_is_no_equality():
    started = time.monotonic()
    assert equals([r"\boxed{9^{9^{9^{9^9}}}}", "1"], [{"answer": 1}] * 2) == [0.0, 1.0]
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("name", "record", "reason"),
    [
        ("exact", {}, "the record has no field answer; name another in the reward's options.field"),
        ("number", {}, "the record has no field answer; name another in the reward's options.field"),
        ("math", {}, "the record has no field answer; name another in the reward's options.field"),
        ("number", {"answer": "seven"}, "the record's field answer has no number"),
        ("math", {"answer": ""}, "the record's field answer is no formula"),
    ],
)
def test_a_record_that_an_answer_cannot_be_compared_with_costs_no_other_answer(name, record, reason):
    with RewardProcess([RewardConfig(name=name)]) as process:
        scores = process.score(["7", "7", ""], [{"answer": "7"}, record, {"answer": "7"}])
    assert [scores.total[0], scores.total[2]] == [1.0, 0.0] and math.isnan(scores.total[1])
    assert list(scores.failures) == [f"reward.0 ({name}) gave no number for 1 of 3 answers: {reason}."]


def test_math_without_its_package_is_refused_with_the_command(tmp_path, monkeypatch):
    """In the process of the rewards, which is another: a module that cannot be imported stands in its way."""
    (tmp_path / "math_verify.py").write_text("raise ModuleNotFoundError('No module named math_verify')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"^reward=math requires the package math-verify.*pip install 'math-verify>="):
        RewardProcess([RewardConfig(name="math")])


OWN = """
import asyncio
import os
import time


def length(answers, records, factor=1.0):
    return [factor * len(answer) for answer in answers]


async def slow_but_sure(answers, records):
    await asyncio.sleep(0.01)
    return [1.0] * len(answers)


def raises(answers, records):
    raise KeyError("answer")


def hangs(answers, records):
    time.sleep(600)


def hangs_once(answers, records):
    if not os.path.exists("hung"):
        open("hung", "w").close()
        time.sleep(600)
    return [1.0] * len(answers)


def ends(answers, records):
    os._exit(3)


def naps(answers, records):
    time.sleep(0.5)
    return length(answers, records)


def too_few(answers, records):
    return [1.0]


def unsure(answers, records):
    return [None, float("nan"), 2]


def explains(answers, records):
    return ["not my language", 1, None]


def infinite(answers, records):
    return [float("inf")] * len(answers)


def with_keys(answers, records):
    return {number: 1.0 for number in range(len(answers))}


def without_order(answers, records):
    return {1.0, 2.0, 3.0}


def digits(answers, records):
    return "123"


def one_number(answers, records):
    return 1.0


def of_numpy(answers, records):
    import numpy

    return numpy.arange(len(answers))


def of_torch(answers, records):
    import torch

    return torch.arange(len(answers))


def tuple_of_both(answers, records):
    import numpy
    import torch

    return numpy.float32(0), torch.tensor(1.0), 2


def of_trl(completions, answer, **kwargs):
    return [float(completion == right) for completion, right in zip(completions, answer)]


def by_keyword(prompts, completions, **kwargs):
    return [1.0] * len(completions)


def too_large(answers, records):
    return [1.0, -1e308, 1e308]


def secrets(answers, records):
    return [float(name in os.environ) for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PLAIN")]


NUMBER = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Build a process with functions of the user's own module."""
    (tmp_path / "own_rewards_of_the_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    started = []

    def build(*names, **further):
        rewards = [RewardConfig(name=f"own_rewards_of_the_test:{name}", **further) for name in names]
        started.append(RewardProcess(rewards))
        return started[-1]

    yield build
    for process in started:
        process.close()
    sys.modules.pop("own_rewards_of_the_test", None)


ANSWERS = ["a", "bb", "ccc"]


def test_parts_are_weighted_and_added_up(own):
    process = RewardProcess(
        [
            RewardConfig(name="own_rewards_of_the_test:length", weight=0.5, options={"factor": 2.0}),
            RewardConfig(name="own_rewards_of_the_test:slow_but_sure", weight=-1.0),
        ]
    )
    with process:
        scores = process.score(ANSWERS, RECORDS)
    assert [list(part) for part in scores.parts] == [[2.0, 4.0, 6.0], [1.0, 1.0, 1.0]]
    assert list(scores.total) == [0.0, 1.0, 2.0] and list(scores.failures) == []
    assert "own_rewards_of_the_test" not in sys.modules, "the function was imported in this process"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("raises", "raised KeyError: 'answer'"),
        ("hangs", "did not answer within reward.0.timeout_seconds=0.3"),
        ("ends", "ended the process in which it ran"),
        ("too_few", "returned 1 numbers for 3 answers"),
        ("with_keys", "returned a dict, and not a list with a number for each answer"),
        ("without_order", "returned a set, and not a list with a number for each answer"),
        ("digits", "returned a str, and not a list with a number for each answer"),
        ("one_number", "returned a float, and not a list with a number for each answer"),
        ("infinite", "returned inf, and a reward must be between -1e+15 and 1e+15"),
        ("too_large", "returned -1e+308, and a reward must be between -1e+15 and 1e+15"),
    ],
)
def test_a_function_that_fails_gives_no_reward_and_is_named(own, name, problem):
    process = own(name, timeout_seconds=0.3)
    for _ in range(2):  # it is asked again
        started = time.monotonic()
        scores = process.score(ANSWERS, RECORDS)
        assert all(map(math.isnan, scores.total)) and len(scores.total) == 3
        assert list(scores.failures) == [f"reward.0 (own_rewards_of_the_test:{name}) {problem}."]
        assert time.monotonic() - started < 60


@pytest.mark.parametrize("name", ["of_numpy", "of_torch", "tuple_of_both"])
def test_arrays_and_tensors_are_lists_of_numbers(own, name):
    scores = own(name).score(ANSWERS, RECORDS)
    assert list(scores.total) == [0.0, 1.0, 2.0] and not scores.failures


def test_functions_that_take_too_long_to_import_are_refused_with_the_key(own, tmp_path, monkeypatch):
    monkeypatch.setattr("echelon.learn.data.child_process.START_SECONDS", 0.5)
    (tmp_path / "own_rewards_of_the_test.py").write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(ConfigError, match=r"^reward: its code was not imported within 0\.5 seconds; import less"):
        own("length")


def test_the_process_works_again_after_a_time_limit(own):
    process = own("hangs_once", timeout_seconds=5.0)
    assert math.isnan(process.score(ANSWERS, RECORDS).total[0])
    assert list(process.score(ANSWERS, RECORDS).total) == [1.0, 1.0, 1.0]


def test_answers_are_judged_while_this_process_does_something_else(own):
    process = own("naps", timeout_seconds=20.0)
    started = time.monotonic()
    asked = process.ask(ANSWERS, RECORDS)
    assert time.monotonic() - started < 0.4
    time.sleep(0.7)  # the function takes 0.5
    started = time.monotonic()
    assert list(asked.scores().total) == [1.0, 2.0, 3.0] and asked.scores() is asked.scores()
    assert time.monotonic() - started < 0.4
    first, second = process.ask(["a"], RECORDS[:1]), process.ask(["bbbb"], RECORDS[:1])
    assert list(second.scores().total) == [4.0] and list(first.scores().total) == [1.0]


def test_functions_after_one_that_hangs_are_still_asked(own):
    scores = own("length", "hangs", "ends", "naps", timeout_seconds=2.0).score(ANSWERS, RECORDS)
    assert [[None if math.isnan(value) else value for value in part] for part in scores.parts] == [
        [1.0, 2.0, 3.0], [None] * 3, [None] * 3, [1.0, 2.0, 3.0]
    ]  # fmt: skip
    assert len(scores.failures) == 2


def test_an_answer_that_cannot_be_judged_is_left_out_alone(own):
    scores = own("unsure").score(ANSWERS, RECORDS)
    assert [math.isnan(value) for value in scores.total] == [True, True, False] and scores.total[2] == 2.0
    assert list(scores.failures) == ["reward.0 (own_rewards_of_the_test:unsure) gave no number for 2 of 3 answers."]


def test_a_function_may_say_why_it_cannot_judge(own):
    scores = own("explains").score(ANSWERS, RECORDS)
    assert [math.isnan(value) for value in scores.total] == [True, False, True]
    assert list(scores.failures) == [
        "reward.0 (own_rewards_of_the_test:explains) gave no number for 2 of 3 answers: not my language."
    ]


def test_a_function_does_not_see_secrets(own, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_aB3dE5fG7hJ9kL1mN3pQ5rS7")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    monkeypatch.setenv("PLAIN", "here")
    assert list(own("secrets").score(ANSWERS, RECORDS).total) == [0.0, 0.0, 1.0]
    assert "HF_TOKEN" in os.environ


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"name": "no_such_package:f"}, r"^reward\.0\.name=no_such_package:f: no_such_package cannot be imported"),
        ({"name": "half_written:f"}, r"^reward\.0\.name=half_written:f: its module raised NameError: .*; correct it\."),
        ({"name": "own_rewards_of_the_test:NUMBER"}, r"it must be a function of \(answers, records\), but it is a int"),
        ({"name": "exact", "options": {"fied": "x"}}, r"^reward\.0\.options=\{'fied': 'x'\} does not fit exact"),
        (
            {"name": "own_rewards_of_the_test:of_trl"},
            r"^reward\.0\.name=own_rewards_of_the_test:of_trl: it is a function of \(completions, answer, kwargs\), "
            r"and a reward is a function of \(answers, records\) and its options; .*TRL's functions",
        ),
        ({"name": "own_rewards_of_the_test:by_keyword"}, r"it is a function of \(prompts, completions, kwargs\)"),
    ],
    ids=["package", "broken module", "no function", "option", "of TRL", "of TRL with prompts"],
)
def test_a_reward_that_cannot_be_used_is_refused(own, tmp_path, reward, message):
    (tmp_path / "half_written.py").write_text("nothing_yet\n")
    with pytest.raises(ConfigError, match=message):
        RewardProcess([RewardConfig(**reward)])
