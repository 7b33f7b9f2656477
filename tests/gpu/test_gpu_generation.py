"""On a GPU, rows padded on the left are continued as whole rows are read, and the answers are those of a CPU."""

import pytest
import torch
from typing_extensions import override

from echelon.learn.answers.sampling import ForwardPasses, Sampling, continue_prompts
from echelon.learn.model.kv_cache import KeyValueCache, _continue_rows, _move_rows, _Rows, start_cache
from tests.families import small_model

pytestmark = pytest.mark.gpu

FAMILIES = [
    ("llama", {}), ("qwen3", {}), ("gpt2", {}), ("gemma3_text", {"sliding_window": 6}),
    ("gemma2", {"sliding_window": 6}), ("qwen3_moe", {}),
]  # fmt: skip
PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17, 18], [9], [20, 21], [30, 31, 32, 33, 34]]


class Passes(ForwardPasses):
    def __init__(self, model):
        self.model = model

    @override
    def start_cached(self):
        return start_cache(self.model)


@pytest.mark.parametrize("walk", [_continue_rows, _move_rows])
@pytest.mark.parametrize(("family", "fields"), FAMILIES, ids=lambda value: value if isinstance(value, str) else "")
def test_cached_passes_have_the_logits_of_whole_rows(gpu, family, fields, walk):
    model = small_model(family, **fields).eval().to(gpu.device)
    with torch.no_grad():
        assert walk(_Rows(model, KeyValueCache(model)))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_answers_are_those_of_a_cpu(gpu, family, temperature):
    model, found = small_model(family).eval(), []
    for parameter in model.parameters():  # far from ties
        parameter.data.mul_(3)
    for device, every in ((torch.device("cpu"), 1), (gpu.device, 8)):
        with torch.no_grad():
            answers = continue_prompts(
                Passes(model.to(device)), PROMPTS, Sampling(30, temperature), range(6), device,
                lambda number, tokens: len(tokens) == 4 * number + 3, max_num_seqs=4, every=every,
            )  # fmt: skip
        found.append(answers)
    for one, other in zip(*found, strict=True):
        assert one.tokens == other.tokens
        assert one.log_probabilities == pytest.approx(other.log_probabilities, abs=1e-3)
