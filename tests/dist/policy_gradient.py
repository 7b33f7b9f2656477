"""Policy gradients with group-relative advantages (GRPO, Shao et al. 2024, arXiv:2402.03300), in a loop of one's own.

The task is a toy: an answer is rewarded for each token that is a small letter. It needs `echelon` and torch.
"""

import torch

import echelon

PROMPTS = ["one ", "two ", "three ", "four ", "five ", "six ", "seven ", "eight "]
PROMPTS_PER_STEP = 4
GROUP_SIZE = 8
ANSWER_TOKENS = 6
CLIP = 0.2  # of the ratio between the new and the old probability of a token


def reward(answer):
    """The fraction of the answer's bytes that are small letters."""
    return sum(ord("a") <= token <= ord("z") for token in answer) / len(answer)


def policy_loss(logits, labels, extra):
    """The clipped surrogate of PPO, summed over a chunk of tokens.

    logits [n, vocabulary], labels [n]; extra: `advantage` and `old_log_probabilities` of each token.
    """
    kept = labels != -100
    scores = logits[kept].log_softmax(-1).gather(1, labels[kept, None])[:, 0]
    ratio = (scores - extra["old_log_probabilities"][kept]).exp()
    advantage = extra["advantage"][kept]
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).sum()


def read_prompts(learner, step):
    """This rank's prompts of a step, as token ids: a function of the step alone."""
    place = learner.place
    share = range(place.rank, PROMPTS_PER_STEP, place.size)
    texts = [PROMPTS[(step * PROMPTS_PER_STEP + index) % len(PROMPTS)] for index in share]
    return [learner.tokenizer.encode(text, add_special_tokens=False) for text in texts]


def grpo(learner, run):
    """The loop."""
    for step in run.steps():
        # Answers of the current weights. The seed makes them the same after a restart.
        sampling = echelon.Sampling(
            max_tokens=ANSWER_TOKENS, num_samples=GROUP_SIZE, temperature=1.0, top_k=0, seed=step
        )
        rollouts = learner.generate(read_prompts(learner, step), sampling)

        # Each answer is compared with the others to the same prompt.
        rewards = torch.tensor([reward(answer) for answer in rollouts.answers]).view(-1, GROUP_SIZE)
        centred = rewards - rewards.mean(1, keepdim=True)
        advantages = centred / (rewards.std(1, keepdim=True) + 1e-4)

        batch = rollouts.batch(step, advantage=advantages.flatten())
        sums = learner.forward_backward(batch, policy_loss)
        grad_norm = learner.clip()
        learner.step(run.learning_rate(step))
        run.record(step, sums, grad_norm, reward=rewards.mean(), spread=rewards.std(1).mean())
        run.save_if_due(step)
