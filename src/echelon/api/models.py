"""What a run has learned, or an HF folder holds: measured, sampled from, written for other tools."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from echelon.errors import ConfigError
from echelon.runs.run_folder import require_folder

if TYPE_CHECKING:
    from echelon.api.run import Run

    Target = str | Path | Run

logger = logging.getLogger(__name__)

Prompts = TypeVar("Prompts", str, list[str])


def find_target(target: "Target") -> Path:
    """The folder of a run or a model, with what its frozen weights are read from on this machine.

    Raises ConfigError where there is no folder.
    """
    from echelon.checkpoint.adapted import fetch_base

    path = Path(os.fspath(target))
    require_folder(path)
    fetch_base(path)
    return path


def evaluate(
    target: "Target",
    data: str | Path | None = None,
    *,
    tasks: str | Path | None = None,
    lm_eval: Sequence[str] = (),
    include_path: str | Path | None = None,
    limit: int | None = None,
    checkpoint: str | int | None = None,
) -> dict[str, Any]:
    """Loss, perplexity and bits per byte on held-out text; or accuracy on tasks. In this process.

    Args:
        target: a run or its folder, or an HF model folder.
        data: other text than the run's held-out one.
        tasks: a .jsonl file of multiple-choice questions, to score instead.
        lm_eval: names of lm-eval's tasks, to run instead; `include_path`: a folder with task files of your own;
            `limit`: examples of each task.
        checkpoint: `newest`, `best` or a step of a run; None: the newest.

    Returns:
        The numbers by name: those that `echelon eval --json` prints.

    Raises:
        ConfigError, DataError or CheckpointError: naming what cannot be used.
    """
    if sum(each is not None for each in (data, tasks, lm_eval or None)) > 1:
        raise ConfigError("--data, --tasks and --lm-eval are three evaluations; give one at a time.")
    if not lm_eval and (include_path is not None or limit is not None):
        raise ConfigError("--include-path and --limit go with --lm-eval TASK; add it, or leave them out.")
    path, which = find_target(target), None if checkpoint is None else str(checkpoint)
    if tasks is not None:
        from echelon.inference.tasks import evaluate_task

        return evaluate_task(path, Path(tasks), which)
    if lm_eval:
        from echelon.inference.harness import evaluate_with_harness

        return evaluate_with_harness(path, lm_eval, None if include_path is None else Path(include_path), limit, which)
    from echelon.inference.evaluate import evaluate_model

    return evaluate_model(path, None if data is None else Path(data), which)


def generate(
    target: "Target",
    prompts: Prompts,
    *,
    max_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    num_samples: int = 1,
    stop: str | Sequence[str] = (),
    seed: int = 0,
    chat: bool = False,
    system: str | None = None,
    checkpoint: str | int | None = None,
    batch_size: int = 8,
) -> Prompts:
    """Texts that go on from prompts, the prompts included. In this process.

    Args:
        target: a run or its folder, or an HF model folder.
        prompts: one text, or a list of them.
        temperature: 0 takes the likeliest token each time.
        top_k: sample among this many likeliest tokens; 0: among all. `top_p`: among the likeliest with this
            probability. `min_p`: leave out tokens below this share of the likeliest.
        num_samples: of each prompt of a list.
        stop: a text, or several, that end a sample, which is without them.
        chat: prompts are messages of a user, and the texts are the answers alone; `system`: the message before them.
            None: what the run was trained with.
        checkpoint: `newest`, `best` or a step of a run; None: the newest.

    Returns:
        A text for a text. For a list a list: `num_samples` texts of the first prompt, then those of the next.

    Raises:
        ConfigError or CheckpointError: naming what cannot be used.
    """
    from echelon.inference.chat import Chat
    from echelon.inference.generate import Sampling, generate_samples

    if system is not None and not chat:
        raise ConfigError(f"system={system!r} goes with chat=True; add it, or leave it out.")
    if isinstance(prompts, str) and num_samples != 1:
        raise ConfigError(f"num_samples={num_samples} of one prompt are a list of texts; give a list: [prompt].")
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    sampling = Sampling(max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, num_samples, stops, seed)
    path, which = find_target(target), None if checkpoint is None else str(checkpoint)
    all_prompts = [prompts] if isinstance(prompts, str) else prompts
    asked = Chat(system) if chat else None
    texts = [each.text for each in generate_samples(path, all_prompts, sampling, which, batch_size, chat=asked)]
    return texts[0] if isinstance(prompts, str) else texts


def export(
    run: "Target",
    out: str | Path,
    *,
    dtype: str | None = None,
    checkpoint: str | int | None = None,
    merge: bool = False,
) -> Path:
    """Write a checkpoint as an HF folder: safetensors, config, tokenizer; of a run with an adapter, the adapter.

    Args:
        out: the folder to write, new or empty.
        dtype: of a whole model: `fp32` (the default), `bf16` or `fp16`.
        checkpoint: `newest`, `best` or a step; None: the newest.
        merge: of a run that trained an adapter, the whole model, compared with the adapter.

    Returns:
        The folder.

    Raises:
        ConfigError or CheckpointError: naming what cannot be used.
    """
    from echelon.checkpoint.adapted import read_run_recipe
    from echelon.checkpoint.export import export_adapter, export_run
    from echelon.inference.merging import merge_run

    path, folder = find_target(run), Path(out)
    which = None if checkpoint is None else str(checkpoint)
    if merge:
        merge_run(path, folder, dtype or "fp32", which)
    elif read_run_recipe(path).adapter.is_adapter:
        if dtype is not None:
            raise ConfigError(
                f"--dtype {dtype} is of a whole model, and an adapter is written as it was trained; add --merge, or "
                "leave it out."
            )
        num_bytes = export_adapter(path, folder, which)
        logger.info(
            f"export: {folder} is ready for peft's PeftModel.from_pretrained, {num_bytes / 1e6:.2f} MB of weights"
        )
        return folder
    else:
        export_run(path, folder, dtype or "fp32", which)
    logger.info(f"export: {folder} is ready for transformers' from_pretrained")
    return folder
