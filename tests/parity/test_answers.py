"""GRPO and its variants under every plan: losses and gradients of one process."""

from dataclasses import replace

import pytest

from tests.parity.training import Row, assert_same_curve, bounds, train

pytestmark = pytest.mark.dist

STEPS = 4
AS_TRL = 1e-5  # the bound of tests/peer, which compares one process with TRL's trainers
VARIANTS = {
    "grpo": {},
    "dr grpo": {"normalize": "constant", "max_tokens": 16},
    "dapo": {"normalize": "token", "clip_high": 0.28},
    "gspo": {"ratio": "sequence", "clip_low": 0.03, "clip_high": 0.04},
    "kl": {"kl_weight": 0.3, "needs_reference": True, "temperature": 0.8},
    "capped": {"importance_cap": 1.1},
}
PLANS = {
    "ddp": Row("ddp", ranks=2, micro_batch=2),
    "fsdp": Row("fsdp", ranks=2, micro_batch=4),
    "tp": Row({"tp": 2}, ranks=2, micro_batch=4),
    "lora": Row("fsdp", ranks=2, micro_batch=2, adapter="lora"),
}
FAST = {("dapo", "ddp"), ("kl", "fsdp")}


@pytest.fixture(scope="module")
def alone(workers, text, tmp_path_factory):
    """A function to the metrics of a variant in one process."""
    trained = {}

    def find(row):
        if str(row.changes) + row.adapter not in trained:
            one = replace(row.reference(), changes=row.changes)
            trained[str(row.changes) + row.adapter] = train(workers, one, tmp_path_factory.mktemp("one"), text, STEPS)
        return trained[str(row.changes) + row.adapter]

    return find


@pytest.mark.parametrize(
    ("variant", "plan"),
    [
        pytest.param(variant, plan, marks=[] if (variant, plan) in FAST else [pytest.mark.slow])
        for variant in VARIANTS
        for plan in PLANS
    ],
)
def test_equals_one_process(workers, alone, text, tmp_path, variant, plan):
    changes = {
        "data": {"source": "tests.parity.answered:Answers"},
        "objective": {"name": "tests.parity.answered:AnsweredGRPO", "options": VARIANTS[variant]},
    }
    row = replace(PLANS[plan], changes=changes)
    rows, expected = train(workers, row, tmp_path, text, STEPS), alone(row)
    assert_same_curve(rows, expected, (AS_TRL, bounds(row)[1]))
    assert all(row["grad_norm"] > 1e-3 for row in expected if row["kind"] == "train")
