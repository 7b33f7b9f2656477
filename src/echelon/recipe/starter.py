"""The recipe that `echelon init` writes: commented, small, and ready to train on the user's text."""

import shlex

from echelon.recipe.yaml_text import render_inline

_STARTER = """\
# A small Llama trained from scratch on your own text. Try it:
#   echelon plan  {file}                    shows the plan and the memory it needs
#   echelon train {file}                    trains; run it again to resume
#   echelon train {file} train.steps=50     overrides any key for one run
# Every key: docs/recipe.md in echelon's documentation.

run:
{name:<32}# the run folder is runs/NAME
  seed: 0

model:
  config:                       # a new model; use `checkpoint: FOLDER-OR-HUB-ID` to start from existing weights
    model_type: llama           # any decoder of `transformers`: llama, qwen3, mistral, gemma, gpt2, ...
    hidden_size: 256
    intermediate_size: 688
    num_hidden_layers: 4
    num_attention_heads: 4
    num_key_value_heads: 2
    tie_word_embeddings: true

tokenizer: {{train: {{vocab_size: 4096}}}}  # or `bytes`, or a folder or hub id

data:
  train:
{path:<32}# a file, a folder, or .jsonl records with a `text` field
  validation_fraction: 0.05     # fraction held out for validation
  sequence_len: 256

train:
  steps: 500                    # or `tokens: 2e9`, or `epochs: 1`
  global_batch_size: 16         # sequences per step over all processes; accumulation follows from it
  precision: auto               # bf16 where the hardware is fast at it, otherwise fp32
  eval_every: 100

optim:
  learning_rate: 1e-3           # the peak; cosine decay to 10 % after a linear warm-up
  warmup_steps: 50

parallel: auto                  # or ddp, zero1, zero2, fsdp, hsdp; all give the same results

checkpoint:
  every_steps: 100
  keep_last: 3
"""


def render_starter(name: str = "my-run", text_path: str = "text.txt", file: str = "recipe.yaml") -> str:
    """Return the YAML of a recipe that trains a small Llama from scratch on `text_path`, with comments.

    `file`: the path of the recipe, which its first lines name in commands.
    """
    named, read_from = f"  name: {render_inline(name)} ", f"    - path: {render_inline(text_path)} "
    return _STARTER.format(name=named, path=read_from, file=shlex.quote(file))
