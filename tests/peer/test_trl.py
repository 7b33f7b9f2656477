"""The losses on preferences compared with TRL's trainers, on the same completions: loss and every gradient."""

import importlib

import pytest
import torch

from echelon.learn.data.shards import GOOD
from echelon.learn.objectives.distill import Distill, DistillationLoss
from echelon.learn.objectives.kto import KTO
from echelon.learn.objectives.objective import with_batch_means
from echelon.learn.objectives.pairs import CPO, DPO, LOSSES, ORPO, SimPO
from echelon.learn.objectives.scores import Reward
from tests.families import small_model, small_scorer
from tests.peer.trl_trainers import ANSWERS, ROWS, build, gradients_of, take_apart
from tests.unit.learn.objectives.pair_samples import PAIRS, judged_batch, module_of, pair_batch
from tests.unit.learn.objectives.test_scores import MARGINS, scored_batch

pytest.importorskip("trl", exc_type=ImportError)
pytestmark = pytest.mark.slow

PLACES = [(row, chosen) for row, chosen in PAIRS], [(row, chosen + 1) for row, chosen in PAIRS]


def ours(objective, batch, reference, model=None):
    """The mean loss and its gradients in one process."""
    model = small_model("llama") if model is None else model
    module = module_of(model, reference or model)

    @torch.no_grad()
    def run(microbatch, compute):
        return module(microbatch, compute)

    [batch] = with_batch_means(objective, [batch], objective.count(batch), run, lambda sums: None)
    loss = module(batch, objective.loss_sum) / objective.count(batch)
    return loss.item(), gradients_of(model, loss)


def check(found, loss, gradients):
    assert found[0] == pytest.approx(loss, abs=1e-5)
    assert found[1].keys() == gradients.keys()
    for name, gradient in gradients.items():
        size = max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-5 * size, msg=name)


DPO_CASES = {
    **{name: (DPO(0.3, name), {"loss_type": [name]}) for name in LOSSES},
    "robust": (DPO(0.3, "robust", 0.1), {"loss_type": ["robust"], "label_smoothing": 0.1}),
    "exo_pair": (DPO(0.3, "exo_pair", 1e-3), {"loss_type": ["exo_pair"], "label_smoothing": 1e-3}),
    "rpo": (DPO(0.3, sft_weight=0.5), {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
}


@pytest.mark.parametrize("name", DPO_CASES)
def test_dpo(tmp_path, name):
    trl = importlib.import_module("trl")
    objective, settings = DPO_CASES[name]
    model, reference, batch = small_model("llama"), small_model("llama", seed=1), pair_batch()
    settings = {**settings, "beta": objective.beta, "max_length": None}
    trainer = build(trl.DPOTrainer, trl.DPOConfig, tmp_path, model, ROWS, small_model("llama", seed=1), **settings)
    ids, filled, completions = take_apart(batch, PLACES[0] + PLACES[1])
    given = {"input_ids": ids, "attention_mask": filled, "completion_mask": completions}
    loss = trainer.compute_loss(trainer.model, given)
    check(ours(objective, batch, reference), loss.item(), gradients_of(model, loss))


CPO_CASES = {
    "cpo": (CPO(0.3, sft_weight=1.0), {"loss_type": "sigmoid", "cpo_alpha": 1.0}),
    "cpo smoothed": (CPO(0.3, "sigmoid", 0.1, 0.5), {"label_smoothing": 0.1, "cpo_alpha": 0.5}),
    "cpo hinge": (CPO(0.3, "hinge"), {"loss_type": "hinge"}),
    "cpo ipo": (CPO(0.3, "ipo"), {"loss_type": "ipo"}),
    "simpo": (SimPO(2.0, 0.7), {"loss_type": "simpo", "simpo_gamma": 0.7, "cpo_alpha": 0.0}),
    "cpo-simpo": (SimPO(2.0, 0.7, sft_weight=0.5), {"loss_type": "simpo", "simpo_gamma": 0.7, "cpo_alpha": 0.5}),
    "orpo": (ORPO(0.3), {}),
}


@pytest.mark.parametrize("name", CPO_CASES)
def test_without_a_reference(tmp_path, name):
    """TRL's ORPO also has the cross-entropy of the prompt, which here is one token, and has none."""
    kind = "ORPO" if name == "orpo" else "CPO"
    room = importlib.import_module(f"trl.experimental.{kind.lower()}")
    objective, settings = CPO_CASES[name]
    model, batch = small_model("llama"), pair_batch(num_prompt=1 if name == "orpo" else 3)
    classes = getattr(room, f"{kind}Trainer"), getattr(room, f"{kind}Config")
    trainer = build(*classes, tmp_path, model, ROWS, beta=objective.beta, remove_unused_columns=False, **settings)
    given = {}
    for side, places in zip(("chosen", "rejected"), PLACES, strict=True):
        ids, filled, completions = take_apart(batch, places)
        labels = ids.where(completions.bool(), -100)
        given |= {f"{side}_input_ids": ids, f"{side}_attention_mask": filled, f"{side}_labels": labels}
    given |= {"prompt_input_ids": given["chosen_input_ids"], "prompt_attention_mask": given["chosen_attention_mask"]}
    loss = trainer.compute_loss(trainer.model, given)
    check(ours(objective, batch, model), loss.item(), gradients_of(model, loss))


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("seed", [1, 2], ids=["baseline 0", "baseline above 0"])
def test_kto(tmp_path, loss, seed):
    """The batch is one microbatch of TRL's; its own preprocessing rotates the answers, and it takes z over them."""
    trl = importlib.import_module("trl")
    model, reference = small_model("llama"), small_model("llama", seed=seed)
    objective, batch = KTO(0.5, loss, 1.5, 0.75), judged_batch()
    settings = {"loss_type": loss, "beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.75}
    classes, first = (trl.KTOTrainer, trl.KTOConfig), small_model("llama", seed=seed)
    count = len(batch.labels)
    trainer = build(*classes, tmp_path, model, ANSWERS, first, per_device_train_batch_size=count, **settings)
    ids, filled, completions = take_apart(batch, [(row, 0) for row in range(count)])
    examples = []
    for row in range(count):
        own, answer = ids[row][filled[row].bool()], completions[row][filled[row].bool()].bool()
        examples.append({"prompt_ids": own[~answer].tolist(), "completion_ids": own[answer].tolist()})
    for row, example in enumerate(examples):  # as add_kl_completion_ids of its _prepare_dataset
        example |= {"KL_completion_ids": examples[row - 1]["completion_ids"], "label": bool(batch.extra[GOOD][row])}
    if loss != "kto":
        examples = [{name: value for name, value in each.items() if name[:2] != "KL"} for each in examples]
    given = trl.trainer.kto_trainer.DataCollatorForUnpairedPreference(pad_token_id=0)(examples)
    trainer.model.train()
    found = trainer.compute_loss(trainer.model, given)
    check(ours(objective, batch, reference), found.item(), gradients_of(model, found))


DISTILLATION_CASES = {
    "forward": (DistillationLoss("forward"), 0.0),
    "reverse": (DistillationLoss("reverse", temperature=2.0), 1.0),
    "jsd": (DistillationLoss("jsd", 0.3), 0.3),
    "warm jsd": (DistillationLoss("jsd", 0.8, 1.5), 0.8),
}


@pytest.mark.parametrize("name", DISTILLATION_CASES)
def test_generalized_jsd(name):
    """TRL spells the two limits of the divergence as beta 0 and 1."""
    trainer = importlib.import_module("trl.experimental.gkd").GKDTrainer
    function, beta = DISTILLATION_CASES[name]
    model, teacher, batch = small_model("llama"), small_model("qwen3", seed=1), judged_batch()
    with torch.no_grad():
        theirs = 20 * teacher(input_ids=batch.input_ids, use_cache=False).logits
        teacher.get_output_embeddings().weight.mul_(20)
    logits = model(input_ids=batch.input_ids, use_cache=False).logits
    loss = trainer.generalized_jsd_loss(logits, theirs, batch.labels, beta, function.temperature)
    check(ours(Distill(function), batch, teacher), loss.item(), gradients_of(model, loss))


@pytest.mark.parametrize("weight", [None, 0.05], ids=["plain", "centered"])
@pytest.mark.parametrize("has_margins", [False, True], ids=["", "margins"])
def test_reward(tmp_path, weight, has_margins):
    trl = importlib.import_module("trl")
    margins = MARGINS if has_margins else dict.fromkeys(MARGINS, 0.0)
    model, batch = small_scorer("llama"), scored_batch(margins)
    settings = {"center_rewards_coefficient": weight, "max_length": None}
    trainer = build(trl.RewardTrainer, trl.RewardConfig, tmp_path, model, ROWS, **settings)
    examples = []
    for row, chosen in PAIRS:
        texts = [batch.input_ids[row][batch.documents[row] == chosen + side].tolist() for side in (0, 1)]
        examples.append({"chosen_ids": texts[0], "rejected_ids": texts[1]})
        if has_margins:
            examples[-1]["margin"] = margins[row, chosen]
    given = trl.trainer.reward_trainer.DataCollatorForPreference(pad_token_id=0)(examples)
    loss = trainer.compute_loss(trainer.model, given)
    found = ours(Reward(weight or 0.0), batch, None, model=small_scorer("llama"))
    check(found, loss.item(), gradients_of(model, loss))
