"""What it costs AdamW that gradients are applied some updates late, as under asynchronous parameter servers.

    python benchmarks/late_gradients.py [--updates N] [--late 0 1 2] [--rates 1e-3 3e-4]

A loop in plain PyTorch trains the model of `benchmarks/stdlib.yaml` on its text, 8 sequences an update, and applies the
gradient of each batch K updates later: with two workers of equal speed that do not wait for each other, K is 1. Prints
the mean training loss of the last 40 updates. The learning rate grows over the first 100 updates, and then stays.
"""

import argparse
import statistics
from collections import deque
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from echelon.learn.data.order import SampleOrder
from echelon.learn.data.prepare import prepare
from echelon.learn.data.prepare_spec import prepare_spec
from echelon.recipe.load import load_recipe
from measuring import describe_machine

ROOT = Path(__file__).parents[1]
BATCH, WARM_UP, COUNTED = 8, 100, 40


def train(data, config, updates, late, rate):
    """The mean loss of the last updates if gradients are applied `late` updates after they were computed."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    order, waiting, losses = SampleOrder(data.num_samples, seed=0), deque(), []
    for update in range(updates):
        samples = data.read_samples(order.sample_ids(BATCH * update, BATCH))
        inputs, labels = torch.from_numpy(samples.inputs), torch.from_numpy(samples.labels)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(inputs).logits
        loss = cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        losses.append(loss.item())
        waiting.append([parameter.grad for parameter in parameters])
        optimizer.zero_grad()
        if len(waiting) > late:
            for parameter, gradient in zip(parameters, waiting.popleft(), strict=True):
                parameter.grad = gradient
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (update + 1) / WARM_UP)
            optimizer.step()
            optimizer.zero_grad()
    return statistics.mean(losses[-COUNTED:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--late", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--rates", type=float, nargs="*", default=[1e-3, 3e-4])
    given = parser.parse_args()
    recipe, _ = load_recipe(ROOT / "benchmarks/stdlib.yaml", [f"data.prepared_dir={ROOT}/runs/prepared"])
    prepared = prepare(prepare_spec(recipe))
    config = recipe.model.config | {"vocab_size": prepared.vocab_size}
    print(f"{describe_machine('torch', 'transformers')}; {given.updates} updates of {BATCH} sequences")
    print("\n| Learning rate | " + " | ".join(f"{late} late" for late in given.late) + " |")
    print("|---" * (1 + len(given.late)) + "|")
    for rate in given.rates:
        losses = [train(prepared.train, config, given.updates, late, rate) for late in given.late]
        print(f"| {rate:g} | " + " | ".join(f"{loss:.3f}" for loss in losses) + " |", flush=True)


if __name__ == "__main__":
    main()
