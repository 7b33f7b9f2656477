"""`model.rope` under a plan trains the model that transformers describes, and writes it into the exported folder."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from echelon.learn.checkpoint.export import export_run
from tests.cases import slow
from tests.families import load_run_model
from tests.parity.training import (
    SEQUENCE_LEN,
    Row,
    assert_same_curve,
    bounds,
    check_exact_resume,
    difference,
    train,
    with_ranks,
)

pytestmark = pytest.mark.dist

SHORT = (("max_position_embeddings", SEQUENCE_LEN // 4),)
ROPE = {"model": {"rope": {"rope_type": "yarn", "factor": 4}}}
# The same as a config states it, for one process.
STATED = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": SEQUENCE_LEN // 4}
REFERENCE = Row(fields=(("max_position_embeddings", SEQUENCE_LEN), ("rope_parameters", STATED)))


def scaled(parallel, **options):
    return with_ranks(Row(parallel=parallel, fields=SHORT, changes=ROPE), 2, micro_batch=8, **options)


@pytest.mark.parametrize(
    "row", [scaled({"cp": 2, "cp_method": "ring"}), slow(scaled({"cp": 2})), slow(scaled({"tp": 2}))], ids=str
)
def test_scaled_positions_equal_one_process(workers, references, text, tmp_path, row):
    rows = train(workers, row, tmp_path / "divided", text)
    expected = train(workers, REFERENCE, tmp_path / "one", text)
    assert_same_curve(rows, expected, bounds(row))
    plain = references(Row(fields=(("max_position_embeddings", SEQUENCE_LEN),)))
    assert difference(plain, expected)[0] > bounds(row)[0], "the scale changes the loss"
    export_run(tmp_path / "divided" / "run", tmp_path / "exported")
    tokens = torch.arange(SEQUENCE_LEN)[None] + 64
    ours = load_run_model(tmp_path / "divided" / "run", torch.device("cpu")).eval()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32).eval()
    assert theirs.config.rope_parameters == STATED and theirs.config.max_position_embeddings == SEQUENCE_LEN
    with torch.no_grad():
        assert torch.equal(*(model(input_ids=tokens, use_cache=False).logits for model in (ours, theirs)))


@pytest.mark.slow
def test_a_resumed_run_keeps_the_scale(workers, text, tmp_path):
    check_exact_resume(partial(train, workers, scaled({"cp": 2, "cp_method": "ring"})), tmp_path, text, steps=4)
