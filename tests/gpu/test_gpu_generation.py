"""On a GPU, rows padded on the left are continued as whole rows are read, and the answers are those of a CPU."""

import pytest
import torch

from echelon.learn.answers.sampling import Sampling, continue_prompts
from echelon.learn.model.kv_cache import KeyValueCache, RandomRows, continue_rows, move_rows
from tests.families import small_model
from tests.unit.learn.answers.test_sampling import LENGTHS, PROMPTS, Recorded, far_from_ties
from tests.unit.learn.model.test_kv_cache import MODELS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("family", "fields", "attention"), MODELS[:-1], ids=lambda value: value if value else "-")
def test_cached_passes_have_the_logits_of_whole_rows(gpu, family, fields, attention):
    for walk in (continue_rows, move_rows):
        model = small_model(family, **fields).eval().to(gpu.device)
        with torch.no_grad():
            assert walk(RandomRows(model, KeyValueCache(model)))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_answers_are_those_of_a_cpu(gpu, family, temperature):
    model, found = far_from_ties(family), []
    for device, every in ((torch.device("cpu"), 1), (gpu.device, 8)):
        with torch.no_grad():
            answers = continue_prompts(
                Recorded(model.to(device)), PROMPTS, Sampling(20, temperature), range(len(PROMPTS)), device,
                lambda number, tokens: len(tokens) == LENGTHS[number], max_num_seqs=4, every=every,
            )  # fmt: skip
        found.append(answers)
    for one, other in zip(*found, strict=True):
        assert one.tokens == other.tokens
        assert one.log_probabilities == pytest.approx(other.log_probabilities, abs=1e-3)
