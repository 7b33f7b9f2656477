"""Sampling from a run or an HF folder."""

from pathlib import Path

import torch

from echelon.errors import ConfigError
from echelon.train.target import find_device, load_target, load_target_tokenizer


@torch.inference_mode()
def generate_text(
    target: Path, prompt: str, max_tokens: int = 100, temperature: float = 0.8, top_k: int = 50, seed: int = 0
) -> str:
    """Continue a prompt; the text returned starts with it.

    Args:
        temperature: 0 takes the likeliest token each time.
        top_k: sample among this many likeliest tokens; 0 for all.

    Raises:
        ConfigError: the prompt holds no token.
    """
    device = find_device()
    # Before the model, which may take long to load.
    inputs = load_target_tokenizer(target)(prompt, return_tensors="pt").to(device)
    if inputs["input_ids"].shape[1] == 0:
        raise ConfigError(f"--prompt {prompt!r} holds no token; give at least one to go on from.")
    model, tokenizer = load_target(target, device)
    torch.manual_seed(seed)
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": top_k} if temperature > 0 else {"do_sample": False}
    )
    ids = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=max_tokens,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0,
        **sampling,
    )
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))
