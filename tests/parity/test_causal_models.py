"""Every causal language model of the installed transformers: what docs/models.md says of each is what happens."""

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from model_table import PAGE, RESULTS, render_page
from tests.parity.causal_models import examine, read_outcomes

PUBLISHED = read_outcomes(RESULTS)


def test_the_page_is_that_of_the_results():
    assert PAGE.read_text() == render_page(PUBLISHED.values())
    assert sum(each.result == "works" for each in PUBLISHED.values()) >= 60
    assert all(each.cause for each in PUBLISHED.values() if each.result != "works")


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_a_model_is_what_the_page_says(workers, tmp_path, model_type):
    assert model_type in PUBLISHED, "the page has no measurement of it: run `make model-table`"
    outcome = examine(model_type, workers, tmp_path / "model")
    assert outcome.result == PUBLISHED[model_type].result, outcome.cause
