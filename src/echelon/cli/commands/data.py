"""`echelon data`: prepare the data as shards, and what a teacher predicts for it; show it as the model will see it."""

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.commands.arguments import NprocOption, OverridesArgument, RecipeArgument, parse_nproc, read_recipe
from echelon.cli.commands.terminal import show, show_styled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from echelon.learn.data.survey import FedDocument, SourceCounts
    from echelon.recipe.document import Recipe

logger = logging.getLogger(__name__)

_BAR = 40
_TOP_K = 64


def data(
    recipe_path: RecipeArgument,
    overrides: OverridesArgument = None,
    *,
    samples: Annotated[int, typer.Option(min=0, metavar="N")] = 3,
    prepare: bool = False,
    teacher: Annotated[str | None, typer.Option(metavar="MODEL")] = None,
    top_k: Annotated[int | None, typer.Option(metavar="K")] = None,
    nproc: NprocOption = "auto",
) -> None:
    """Show counts and lengths of the data, and first documents. Target tokens are marked.

    With --prepare and a teacher (--teacher, or objective.top_k in the recipe), also write the likeliest tokens that it
    predicts for every target, and their log-probabilities. --nproc processes of this machine divide this work; so do
    machines that share the folder, if each runs the command.

    Args:
        samples: documents to show as text.
        prepare: only read, tokenize and pack the data into shards, ahead of training.
        teacher: also prepare the predictions of this teacher, for distillation.
        top_k: tokens of the teacher for each target. Default: the recipe's, or 64.
    """
    if prepare or teacher is not None or top_k is not None:
        return _prepare(recipe_path, overrides or [], teacher, top_k, parse_nproc(nproc))
    from echelon.learn.data.mixture import build_order
    from echelon.learn.data.prepare import prepare_data
    from echelon.learn.data.survey import count_sources, describe_order, describe_repeats, first_documents
    from echelon.run.lifecycle.model_checks import find_model_fields

    recipe = read_recipe(recipe_path, overrides)
    prepared = prepare_data(recipe)
    show(find_model_fields(recipe, prepared.vocab_size)[1])
    found = count_sources(prepared)
    is_divided = bool(prepared.validation) and {counts.stream for counts in found} == {"train"}
    for counts in found:
        _show_source(counts, "train and held out" if is_divided else counts.stream)
    sequences = [("train", prepared.train), *((held_out.name, held_out.dataset) for held_out in prepared.validation)]
    for name, dataset in sequences:
        size = f"{dataset.num_samples:,} sequences" if dataset is not prepared.streamed else "a stream of sequences"
        show(f"{name}: {size} of {recipe.data.sequence_len}")
    for line in (*describe_order(recipe, prepared), *describe_repeats(recipe, prepared)):
        show(line)
    for document in first_documents(prepared, build_order(recipe, prepared.train), samples):
        _show_document(document, prepared.tokenizer)
    return None


def _prepare(path: Path, overrides: list[str], teacher: str | None, top_k: int | None, nproc: int | None) -> None:
    """Prepare the data, and the predictions of a teacher if the options or the recipe ask for them."""
    from echelon.learn.data.prepare import prepare_data

    recipe = _with_teacher(path, overrides, teacher, top_k)
    data = prepare_data(recipe)
    logger.info(f"data: prepared in {data.path}")
    if recipe.objective.top_k is not None:
        from echelon.learn.teaching import prepare_teacher

        prepare_teacher(recipe, data, nproc)


def _with_teacher(path: Path, overrides: list[str], teacher: str | None, top_k: int | None) -> "Recipe":
    """Read the recipe, with the teacher that the options name, if any. Raises ConfigError."""
    recipe = read_recipe(path, overrides)
    if teacher is None and top_k is None:
        return recipe
    given = recipe.objective if recipe.objective.name == "distill" else None
    section = {
        "name": "distill",
        "teacher": teacher or (given and given.teacher),
        "top_k": top_k or (given and given.top_k) or _TOP_K,
        "temperature": given.temperature if given else 1.0,
    }
    return read_recipe(path, [*overrides, f"objective={json.dumps(section)}"], quiet=True)


def _show_source(counts: "SourceCounts", use: str) -> None:
    """Show the size and the use of a source; for whole documents also the share of targets, and how long they are."""
    import numpy as np

    from echelon.learn.data.survey import PERCENTILES, bucket_lengths

    broken = f", {counts.broken:,} broken records left out" if counts.broken else ""
    named = f"{counts.source} ({counts.name}), {use}"
    if counts.lengths is None or counts.learned is None:
        show(f"{named}: {counts.documents:,} documents, {counts.tokens:,} tokens{broken}")
        return
    share = counts.learned / max(1, counts.tokens)
    show(f"{named}: {counts.samples:,} samples, {counts.tokens:,} tokens, {share:.1%} of them learned{broken}")
    if not counts.lengths.size or counts.stream != "train":
        return
    found = zip(PERCENTILES, np.percentile(counts.lengths, PERCENTILES, method="inverted_cdf"), strict=True)
    quantiles = ", ".join(f"{percent} % up to {int(length):,}" for percent, length in found)
    show(f"  tokens of a document: {quantiles}, the longest {int(counts.lengths.max()):,}")
    buckets = bucket_lengths(counts.lengths)
    most, width = max(count for *_, count in buckets), len(f"{buckets[-1][1]:,}")
    for first, last, count in buckets:
        bar = "#" * -(-_BAR * count // most)
        show(f"  {first:>{width},} - {last:>{width},} {bar:<{_BAR}} {count:,}")


def _show_document(document: "FedDocument", tokenizer: "PreTrainedTokenizerFast") -> None:
    """Show a document as text; target tokens are coloured on a terminal, in [[ ]] elsewhere."""
    title = f"--- sequence {document.sequence}, document {document.number}: {document.ids.size:,} tokens"
    coloured = sys.stdout.isatty()
    if document.learned[1:].all():
        show(f"{title}, all learned but the first")
        show(_decode(tokenizer, document.ids.tolist()))
        return
    show(f"{title}, {int(document.learned.sum()):,} learned ({'green' if coloured else 'in [[ ]]'})")
    parts = []
    for ids, learned in _runs(document):
        part = _decode(tokenizer, ids)
        parts.append((part if coloured or not learned else f"[[{part}]]", "green" if learned else "dim"))
    show_styled(parts, coloured)


def _decode(tokenizer: "PreTrainedTokenizerFast", ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _runs(document: "FedDocument") -> list[tuple[list[int], bool]]:
    """The ids as consecutive runs, each with whether it is learned."""
    runs: list[tuple[list[int], bool]] = []
    for id, learned in zip(document.ids.tolist(), document.learned.tolist(), strict=True):
        if not runs or runs[-1][1] != learned:
            runs.append(([], learned))
        runs[-1][0].append(id)
    return runs
