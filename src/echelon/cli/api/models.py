"""Evaluate, sample from and export the model of a run or of an HF model folder."""

import logging
import os
import shutil
from collections.abc import Sequence
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from typer import Option

from echelon.ground.errors import ConfigError, EchelonError, first_line
from echelon.ground.run_files import is_run, require_model
from echelon.ground.sizes import render_bytes

if TYPE_CHECKING:
    from echelon.cli.api.run import Run
    from echelon.learn.distributed.runtime import Runtime as Team
    from echelon.tools.inference.generate import Dialogue

    Target = str | Path | Run

logger = logging.getLogger(__name__)

# The folder in a run folder of an export that is only uploaded.
_PUSHED = "push"

Prompts = TypeVar("Prompts", str, list[str])
Checkpoint = Annotated[str | int | None, Option(metavar="newest|best|STEP")]
AtLeastOne = Option(min=1)
Share = Option(min=0.0, max=1.0)


def check_target(target: "Target", checkpoint: str | int | None = None) -> Path:
    """Return the folder of a run or a model. Imports no torch, which takes seconds.

    Raises ConfigError if it is neither, or a run without this checkpoint.
    """
    from echelon.learn.checkpoint.folder import find_checkpoint

    path = Path(os.fspath(target))
    require_model(path)
    if is_run(path):
        find_checkpoint(path, None if checkpoint is None else str(checkpoint))
    return path


def find_target(target: "Target", checkpoint: str | int | None = None) -> Path:
    """Like `check_target`; fetches the base model of an adapter if needed."""
    path = check_target(target, checkpoint)
    if is_run(path):
        from echelon.learn.checkpoint.adapted import fetch_base

        fetch_base(path)
    return path


def check_texts(data: str | Path | None, tasks: str | Path | None) -> None:
    """Raise ConfigError for a path that does not exist, before torch is imported."""
    from echelon.learn.data.source import PYTHON_STDLIB

    if data is not None and not Path(data).exists() and not has_magic(str(data)) and str(data) != PYTHON_STDLIB:
        raise ConfigError(
            f"--data {data}: no such file or folder (current folder: {Path.cwd()}); give text to evaluate on."
        )
    if tasks is not None and not Path(tasks).is_file():
        raise ConfigError(f"--tasks {tasks} cannot be read: it is not a file; give a .jsonl file in UTF-8.")


def evaluate(
    target: "Target",
    data: Annotated[str | Path | None, Option("--data", metavar="PATH")] = None,
    *,
    tasks: Annotated[str | Path | None, Option(metavar="FILE.jsonl")] = None,
    lm_eval: Annotated[str | Sequence[str] | None, Option(metavar="TASK[,TASK]")] = None,
    include_path: Annotated[str | Path | None, Option(metavar="FOLDER")] = None,
    limit: Annotated[int | None, AtLeastOne] = None,
    checkpoint: Checkpoint = None,
    team: "Team | None" = None,
) -> dict[str, Any]:
    """Compute loss, perplexity and bits per byte on held-out text, or accuracy on tasks.

    `lm_eval` may also be a list of names.

    Args:
        target: a run or its folder, or an HF model folder.
        data: text to evaluate on instead of the run's held-out text.
        tasks: file of multiple-choice questions to score instead, by lm-eval.
        lm_eval: tasks of lm-eval to run instead.
        include_path: folder with your own task files, for `lm_eval`.
        limit: maximum number of examples per task, for `lm_eval`.
        checkpoint: `newest`, `best` or a step of a run. Default: newest.
        team: the processes that share the model (`Runtime`), all of which must call; None: this one.

    Returns:
        The metrics by name, as printed by `echelon eval --json`.

    Raises:
        ConfigError, DataError or CheckpointError: an argument or file cannot be used; the message names it.
    """
    names = lm_eval.split(",") if isinstance(lm_eval, str) else lm_eval
    if sum(option is not None for option in (data, tasks, names or None)) > 1:
        raise ConfigError("--data, --tasks and --lm-eval are separate evaluations; give only one.")
    if not names and (include_path is not None or limit is not None):
        raise ConfigError("--include-path and --limit require --lm-eval TASK; add it or remove them.")
    check_texts(data, tasks)
    path, which = find_target(target, checkpoint), None if checkpoint is None else str(checkpoint)
    if tasks is not None:
        from echelon.tools.inference.evaluate import evaluate_task

        return evaluate_task(path, Path(tasks), which, team)
    if names:
        from echelon.tools.inference.evaluate import evaluate_with_harness

        include = None if include_path is None else Path(include_path)
        return evaluate_with_harness(path, names, include, limit, which, team)
    from echelon.tools.inference.evaluate import evaluate_model

    return evaluate_model(path, None if data is None else Path(data), which, team)


def generate(
    target: "Target",
    prompts: Prompts,
    *,
    max_tokens: Annotated[int, AtLeastOne] = 128,
    temperature: Annotated[float, Option(min=0.0)] = 0.8,
    top_k: Annotated[int, Option(min=0)] = 50,
    top_p: Annotated[float, Share] = 1.0,
    min_p: Annotated[float, Share] = 0.0,
    repetition_penalty: Annotated[float, Option(min=0.01)] = 1.0,
    num_samples: Annotated[int, AtLeastOne] = 1,
    stop: str | Sequence[str] = (),
    seed: int = 0,
    chat: bool = False,
    system: str | None = None,
    checkpoint: Checkpoint = None,
    batch_size: Annotated[int, AtLeastOne] = 8,
) -> Prompts:
    """Generate continuations of prompts, in this process. The returned texts include the prompts.

    `stop` may also be a list of texts.

    Args:
        target: a run or its folder, or an HF model folder.
        prompts: one text, or a list of texts.
        max_tokens: tokens to sample.
        temperature: 0 always takes the most likely token.
        top_k: sample from the k most likely tokens; 0: from all.
        top_p: sample from the most likely tokens with this total probability.
        min_p: exclude tokens below this fraction of the highest probability.
        repetition_penalty: above 1: tokens seen before become less likely.
        num_samples: samples per prompt.
        stop: text that ends a sample, and is no part of it; may be repeated.
        seed: seed of the sampling.
        chat: prompts are messages to an assistant, and only its answers are returned. The command holds a conversation
            if there is no prompt.
        system: system message for `chat`. Default: that of the training.
        checkpoint: `newest`, `best` or a step of a run. Default: newest.
        batch_size: samples generated at a time.

    Returns:
        A text for one prompt; for a list, `num_samples` texts for the first prompt, then for the next, and so on.

    Raises:
        ConfigError or CheckpointError: an argument or file cannot be used; the message names it.
    """
    if system is not None and not chat:
        raise ConfigError(f"system={system!r} requires chat=True; add it or remove system.")
    if isinstance(prompts, str) and num_samples != 1:
        raise ConfigError(f"num_samples={num_samples} requires a list of prompts; use prompts=[prompt].")
    path, which = find_target(target, checkpoint), None if checkpoint is None else str(checkpoint)
    from echelon.learn.answers.sampling import Sampling
    from echelon.tools.inference.generate import Chat, generate_samples

    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    sampling = Sampling(max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, num_samples, stops, seed)
    all_prompts = [prompts] if isinstance(prompts, str) else prompts
    asked = Chat(system) if chat else None
    texts = [sample.text for sample in generate_samples(path, all_prompts, sampling, which, batch_size, chat=asked)]
    return texts[0] if isinstance(prompts, str) else texts


def chat(
    target: "Target",
    *,
    max_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: str | Sequence[str] = (),
    seed: int = 0,
    system: str | None = None,
    checkpoint: str | int | None = None,
) -> "Dialogue":
    """Load a model for a conversation in this process. `chat(run).ask("Hello").text` is its first answer.

    The arguments are those of `generate`.

    Raises:
        ConfigError or CheckpointError: an argument or file cannot be used; the message names it.
    """
    path = find_target(target, checkpoint)
    from echelon.learn.answers.sampling import Sampling
    from echelon.tools.inference.generate import Dialogue

    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    sampling = Sampling(max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, stop=stops, seed=seed)
    return Dialogue(path, sampling, system, None if checkpoint is None else str(checkpoint))


def export(
    run: "Target",
    out: str | Path | None = None,
    *,
    dtype: str | None = None,
    checkpoint: Checkpoint = None,
    merge: bool = False,
    nproc: int | None = None,
    push: Annotated[str | None, Option(metavar="ID")] = None,
    private: bool = False,
    revision: Annotated[str | None, Option(metavar="BRANCH")] = None,
) -> Path | None:
    """Write a checkpoint as an HF folder: safetensors, config, tokenizer; for a run with an adapter, the adapter.

    Args:
        out: the folder to write; it must be new or empty. With `push` it may be None: `push` in the run folder, which
            is removed after the upload; what a failed upload has left there is replaced.
        dtype: dtype of a full model: fp32 (the default), bf16 or fp16.
        checkpoint: `newest`, `best` or a step of a run. Default: newest.
        merge: merge the adapter and write the full model, compared with the model with adapter.
        nproc: processes that compare the two, each with a shard of the models; None: one, or one per GPU if the model
            does not fit on one.
        push: upload the folder to this model repository of the hub, NAME or OWNER/NAME; it is created if needed.
        private: with `push`: create a private repository.
        revision: with `push`: the branch to upload to.

    Returns:
        The folder; None if it was removed after the upload.

    Raises:
        ConfigError or CheckpointError: an argument or file cannot be used; the message names it.
    """
    if push is None:
        if private or revision is not None:
            raise ConfigError("--private and --revision require --push ID; add it or remove them.")
        if out is None:
            raise ConfigError("export needs a folder to write; give OUT, or upload with --push ID.")
    from echelon.learn.checkpoint.folder import check_empty, require_run

    require_run(check_target(run, checkpoint))
    if out is not None:
        check_empty(Path(out))
    path, which = find_target(run, checkpoint), None if checkpoint is None else str(checkpoint)
    if push is None:
        assert out is not None
        return _export(path, Path(out), dtype, which, merge, nproc)
    from echelon.learn.model.hub_upload import Repository, open_repository, upload_folder

    folder = path / _PUSHED if out is None else Path(out)
    repository = open_repository(Repository(push, private, revision))
    if out is None:
        shutil.rmtree(folder, ignore_errors=True)
    url = upload_folder(_export(path, folder, dtype, which, merge, nproc), repository)
    logger.info(f"push: {url}")
    if out is not None:
        return folder
    shutil.rmtree(folder)
    return None


def _merge(path: Path, folder: Path, dtype: str, which: str | None, nproc: int | None) -> None:
    """Write a merged model, which gets its name once it is compared, or once the comparison has failed."""
    from echelon.tools.inference.merge import merge_run

    failures: list[Exception] = []

    def compare(merged: Path) -> None:
        try:
            _compare(path, which, nproc, merged)
        except Exception as error:  # memory for a whole model may be missing, of which the merge needs little
            failures.append(error)

    merge_run(path, folder, dtype, which, compare)
    if failures:
        raise EchelonError(
            f"{first_line(failures[0]).rstrip('.')}. The merged model in {folder} is complete, but was not compared "
            "with the adapter."
        ) from failures[0]


def _compare(path: Path, which: str | None, nproc: int | None, merged: Path) -> None:
    """Compare a merged model with the run's adapter, before it gets its name."""
    from echelon.learn.checkpoint.adapted import read_run_recipe
    from echelon.tools.inference.merge import compare_merged
    from echelon.tools.inference.ranks import choose_num_processes, compare_in_ranks

    count = nproc or choose_num_processes(path)
    if read_run_recipe(path).objective.scores_texts:
        logger.info("merge: a model that scores texts has no log-probabilities to compare with the adapter's")
    elif count == 1:
        compare_merged(path, merged, which)
    else:
        compare_in_ranks(path, merged, which, count)


def _export(path: Path, folder: Path, dtype: str | None, which: str | None, merge: bool, nproc: int | None) -> Path:
    from echelon.learn.checkpoint.adapted import read_run_recipe
    from echelon.learn.checkpoint.export import export_adapter, export_run

    if merge:
        _merge(path, folder, dtype or "fp32", which, nproc)
    elif read_run_recipe(path).adapter.is_adapter:
        if dtype is not None:
            raise ConfigError(
                f"--dtype {dtype} applies to a whole model, but an adapter is written in the dtype it was trained in; "
                "add --merge or remove --dtype."
            )
        num_bytes = export_adapter(path, folder, which)
        logger.info(
            f"export: {folder} is ready for peft's PeftModel.from_pretrained, {render_bytes(num_bytes)} of weights"
        )
        return folder
    else:
        export_run(path, folder, dtype or "fp32", which)
    logger.info(f"export: {folder} is ready for transformers' from_pretrained")
    return folder
