"""How fast answers are sampled: with and without a cache, and beside the generation of TRL's GRPO trainer.

    python benchmarks/rollouts.py [--rounds N] [--size tiny] [--vllm .venv-vllm/bin/python]

Without vLLM, TRL's GRPOTrainer calls `model.generate` of transformers with each prompt as often as it has answers; so
does this benchmark, with the same weights, prompts and sampling. On a CPU with one thread, a share of the vocabulary
ends an answer, so lengths differ as those of real answers do: few are long. The random numbers differ, so the measure
is the tokens of all answers over the processor seconds, which other programs disturb less than the time. On a GPU: 64
and 256 answers of 128 tokens by the model of recipes/pretrain-1.3b.yaml in bf16, over the time.
"""

import argparse
import os
import statistics
import tempfile
import time
from contextlib import closing, contextmanager
from pathlib import Path
from unittest import mock

import psutil
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from echelon.learn.answers.sampling import Sampling
from echelon.learn.answers.vllm_sampler import VllmSampler
from echelon.learn.engines.module_evaluation import ModuleEvaluation
from echelon.learn.learner import Learner
from echelon.recipe.load import load_recipe
from measuring import describe_machine

VOCABULARY = 32_000
MODEL = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4,
    "num_attention_heads": 4, "vocab_size": VOCABULARY,
}  # fmt: skip
LARGE = MODEL | {
    "hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 24, "num_attention_heads": 16,
    "max_position_embeddings": 512,
}  # fmt: skip
RECIPE = """
run: {{name: rollouts}}
model: {{config: {model}}}
tokenizer: bytes
data: {{train: text.txt, sequence_len: 64}}
train: {{steps: 1, global_batch_size: 1, precision: {precision}, compile: false}}
optim: {{learning_rate: 1.0e-3}}
"""
GROUP = 8
NEW = 256
HAS_GPU = torch.cuda.is_available()


def build_learner(folder, model=MODEL, precision="fp32"):
    """A model with random weights: each token is about equally likely."""
    (folder / "text.txt").write_text("any text will do " * 100)
    recipe = RECIPE.format(model=model, precision=precision)
    (folder / "recipe.yaml").write_text(recipe.replace("text.txt", str(folder / "text.txt")))
    recipe, _ = load_recipe(folder / "recipe.yaml")
    return Learner.build(recipe)


def random_prompts(count, least, most):
    """Prompts of different lengths; the ids that end an answer do not occur in them."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(least, most + 1, (count,), generator=generator).tolist()
    return [torch.randint(VOCABULARY // 2, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def by_echelon(learner, prompts, stops, new=NEW, **options):
    """Sample; returns the number of tokens of all answers."""

    def sample(seed):
        sampling = Sampling(max_tokens=new, temperature=1.0, top_k=0, num_samples=GROUP, seed=seed)
        return sum(map(len, learner.generate(prompts, sampling, stops, **options).answers))

    return sample


def by_transformers(learner, prompts, stops, new=NEW):
    """The same by `model.generate`, as GRPOTrainer calls it."""
    dtype, device = getattr(torch, learner.plan.precision.compute), learner.device
    with device:
        model = AutoModelForCausalLM.from_config(learner.config, dtype=dtype, attn_implementation="sdpa").eval()
    state = learner.engine.state_dict()
    model.load_state_dict({key.removeprefix("model."): state[key] for key in state if key.startswith("model.")}, False)
    rows, width = [prompt for prompt in prompts for _ in range(GROUP)], max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    config = GenerationConfig(
        max_new_tokens=new, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=stops or None,
        pad_token_id=0,
    )  # fmt: skip

    def sample(seed):
        torch.manual_seed(seed)
        with torch.no_grad():
            answers = model.generate(ids, attention_mask=mask, generation_config=config)[:, width:]
        ended = torch.isin(answers, torch.tensor(stops, device=device)).long().cumsum(1)
        return int((ended == 0).sum() + (ended[:, -1] > 0).sum())

    return sample


VLLM = """
objective: {{name: grpo}}
reward: exact
rollout: {{group_size: 8, sampler: vllm, vllm: {{python: {python}, args: {{enforce_eager: true}}, env: {{
  VLLM_CPU_KVCACHE_SPACE: "1", VLLM_CPU_OMP_THREADS_BIND: nobind, TORCHDYNAMO_DISABLE: "1", OMP_NUM_THREADS: "1"}}}}}}
"""


@contextmanager
def by_vllm(folder, prompts, stops, python):
    """The same by a server of vLLM on one thread; its processor seconds count too."""
    (folder / "prompts.jsonl").write_text('{"prompt": "any", "answer": ""}\n' * 100)
    recipe = RECIPE.format(model=MODEL, precision="fp32") + VLLM.format(python=python)
    recipe = recipe.replace("text.txt, sequence_len: 64", f"{folder}/prompts.jsonl, sequence_len: {NEW + 64}")
    path = folder / "vllm.yaml"
    path.write_text(recipe.replace("global_batch_size: 1", f"global_batch_size: {len(prompts) * GROUP}"))
    os.chdir(folder)
    with closing(Learner.build(load_recipe(path)[0])) as learner, closing(VllmSampler(learner)) as sampler:
        vars(learner)["stops"] = stops

        def sample(seed):
            sampling = Sampling(max_tokens=NEW, temperature=1.0, top_k=0, num_samples=GROUP, seed=seed)
            return sum(map(len, sampler.answer(prompts, sampling).answers))

        def read_clock():
            others = psutil.Process().children(recursive=True)
            return time.process_time() + sum(sum(process.cpu_times()[:2]) for process in others)

        sample.clock = read_clock
        yield sample


def without_cache(sample):
    """The same with a pass over whole sequences for each token."""

    def run(seed):
        with mock.patch.object(ModuleEvaluation, "start_cached", lambda self: None):
            return sample(seed)

    return run


def compare(title, sides, rounds):
    """Run the sides in turns; print tokens per processor second, or on a GPU per second after a first round."""
    found, clock = {name: [] for name in sides}, time.perf_counter if HAS_GPU else time.thread_time
    for number in range(rounds + HAS_GPU):
        for name, sample in sides.items():
            read_clock = getattr(sample, "clock", clock)
            started = read_clock()
            tokens = sample(number)  # which end in lists of the host
            found[name].append(tokens / (read_clock() - started))
    found = {name: rates[HAS_GPU:] for name, rates in found.items()}
    first = next(iter(found.values()))
    print(f"\n{title}", flush=True)
    for name, rates in found.items():
        ratios = [rate / other for rate, other in zip(rates, first, strict=True)]
        print(
            f"  {name:24s} {statistics.median(rates):7.1f} tokens/s ({min(rates):.1f} to {max(rates):.1f}), "
            f"{statistics.median(ratios):.2f} times the first ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def compare_equal_lengths(options):
    """64 and 256 answers of one length."""
    model, new, counts = (LARGE, 128, (64, 256)) if options.size == "full" else (MODEL, 4, (16,))
    with tempfile.TemporaryDirectory() as folder, closing(build_learner(Path(folder), model, "bf16")) as learner:
        for count in counts:
            prompts = random_prompts(count // GROUP, 64, 128)
            sides = {
                "transformers' generate": by_transformers(learner, prompts, [], new),
                "echelon": by_echelon(learner, prompts, [], new),
            }
            compare(f"{count} answers of {new} tokens to {len(prompts)} prompts", sides, options.rounds)


def main():
    """Compare, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", choices=["full", "tiny"], default="full", help="tiny: a test of this program")
    parser.add_argument("--vllm", type=Path, help="the Python with vLLM: compare echelon with it, and nothing else")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(describe_machine("torch", "transformers"))
    if HAS_GPU or options.size == "tiny":
        compare_equal_lengths(options)
        return
    with tempfile.TemporaryDirectory() as folder, closing(build_learner(Path(folder))) as learner:
        prompts, stops = random_prompts(8, 16, 64), list(range(VOCABULARY // 64))
        title = f"64 answers of 1 to {NEW} tokens, about 60 on average, to 8 prompts"
        if options.vllm is not None:
            with by_vllm(Path(folder), prompts, stops, options.vllm.absolute()) as vllm:
                compare(title, {"echelon": by_echelon(learner, prompts, stops), "vLLM": vllm}, options.rounds)
            return
        sides = {
            "transformers' generate": by_transformers(learner, prompts, stops),
            "echelon": by_echelon(learner, prompts, stops),
            "echelon, 16 rows at once": by_echelon(learner, prompts, stops, max_num_seqs=16),
        }
        compare(title, sides, options.rounds)
        few = by_echelon(learner, prompts[:1], [])
        compare(f"8 answers of {NEW} tokens", {"without a cache": without_cache(few), "with": few}, options.rounds)


if __name__ == "__main__":
    main()
