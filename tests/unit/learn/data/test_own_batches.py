"""Batches from lists, their extra tensors, and sources of batches that a recipe names."""

import threading
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from echelon.ground.errors import ConfigError, DataError
from echelon.learn.data.feed import Feed, describe_source, like_source, open_feed
from echelon.learn.data.loader import BatchPlace, Microbatch, Padding, build_microbatch, set_width
from echelon.learn.data.own_batches import build_step_batch
from echelon.learn.data.shards import NO_LABEL, Samples
from echelon.learn.distributed.sequence_part import SequencePart
from echelon.recipe.load import build_recipe
from echelon.recipe.render import recipe_json_schema
from echelon.run.lifecycle.extension_checks import check_extensions
from tests.unit.recipe_samples import RECIPE

LENGTHS = [5, 16, 2, 9, 12]
SEQUENCES = [[10 * row + place + 1 for place in range(length)] for row, length in enumerate(LENGTHS)]
LABELS = [[*sequence[1:], NO_LABEL] for sequence in SEQUENCES]
EXTRA = {
    "advantage": [0.5, -1.0, 2.0, 3.0, -4.0],
    "old": [[float(token) for token in sequence] for sequence in SEQUENCES],
    "top": [np.full((length, 2), row) for row, length in enumerate(LENGTHS)],
    "style": [torch.tensor([[row, row]]) for row in range(5)],
}


def build(place, extra=EXTRA, num_sequences=5):
    chosen = place.share(num_sequences)
    lists = ([rows[index] for index in chosen] for rows in (SEQUENCES, LABELS))
    given = {name: [values[index] for index in chosen] for name, values in extra.items()}
    return build_step_batch(3, *lists, place, given, num_sequences)


def rows_of(batches):
    """Each sequence by its index in the batch: ids, labels, and extras without padding."""
    rows = {}
    for microbatch in (microbatch for batch in batches for microbatch in batch.microbatches):
        for row, index in enumerate(microbatch.batch_indices.tolist()):
            filled = int(microbatch.filled[row].sum())
            assert not microbatch.extra["old"][row, filled:].any() and not microbatch.extra["top"][row, filled:].any()
            rows[index] = (
                microbatch.input_ids[row, :filled].tolist(),
                microbatch.labels[row, :filled].tolist(),
                microbatch.extra["advantage"][row].item(),
                microbatch.extra["old"][row, :filled].tolist(),
                microbatch.extra["top"][row, :filled].tolist(),
                microbatch.extra["style"][row].tolist(),
            )
    return [rows[index] for index in sorted(rows)]


@pytest.mark.parametrize(("ranks", "micro"), [(1, 5), (1, 2), (2, 1), (2, 3), (3, 2)])
def test_ranks_share_lists_and_their_extras(ranks, micro):
    places = [BatchPlace(micro, rank, ranks, sequence_len=16) for rank in range(ranks)]
    batches = [build(place) for place in places]
    rows = rows_of(batches)
    assert rows[:5] == [
        (
            SEQUENCES[row],
            LABELS[row],
            EXTRA["advantage"][row],
            EXTRA["old"][row],
            EXTRA["top"][row].tolist(),
            [[row, row]],
        )
        for row in range(5)
    ]
    assert all(row == ([], [], 0.0, [], [], [[0, 0]]) for row in rows[5:]), "they only fill the batch"
    assert sum(batch.hash for batch in batches) % 2**64 == build(BatchPlace(5, sequence_len=16)).hash
    assert sum(batch.num_tokens for batch in batches) == sum(LENGTHS)
    assert sum(batch.num_labels for batch in batches) == sum(LENGTHS) - 5
    assert len({len(batch.microbatches) for batch in batches}) == 1
    first = batches[0].microbatches[0]
    assert {name: (tensor.dtype, tensor.dim()) for name, tensor in first.extra.items()} == {
        "advantage": (torch.float32, 1), "old": (torch.float32, 2), "top": (torch.int64, 3), "style": (torch.int64, 3)
    }  # fmt: skip


def test_the_hash_depends_on_every_extra_and_only_where_there_is_one():
    place = BatchPlace(5, sequence_len=16)
    plain = build(place, {})
    assert build(place, {}).hash == plain.hash != build(place).hash
    seen = {plain.hash, build(place).hash}
    for name, values in EXTRA.items():
        changed = [torch.as_tensor(value).clone() for value in values]
        changed[1].view(-1)[-1] += 1
        seen.add(build(place, {**EXTRA, name: changed}).hash)
        seen.add(build(place, {name: values}).hash)
        seen.add(build(place, {"renamed": values}).hash)
    assert len(seen) == 2 + 3 * len(EXTRA)


def test_extras_are_trimmed_widened_cut_and_moved_like_tokens():
    extra = {"old": np.arange(64.0).reshape(4, 16), "advantage": np.arange(4.0), "style": np.ones((4, 1, 3))}
    documents = np.where(np.arange(16) < np.array([[3], [9], [5], [7]]), 0, -1).astype(np.int32)
    samples = Samples(np.ones((4, 16), np.int64), np.ones((4, 16), np.int64), documents, True, extra)
    rows = np.array([1, 3])
    for padding, width in ((Padding(multiple=4), 16), (Padding(is_equal=True, multiple=12), 24)):
        chosen = set_width(samples, rows, padding)
        assert chosen.inputs.shape == chosen.extra["old"].shape == (2, width)
        assert chosen.extra["old"][:, :9].tolist() == extra["old"][rows, :9].tolist()
        assert not chosen.extra["old"][:, 16:].any() and chosen.extra["style"].shape == (2, 1, 3)
    whole = build_microbatch(set_width(samples, rows, Padding(multiple=4)), rows, rows)
    part = SequencePart(1, 2)
    cut = whole.cut(part)
    assert torch.equal(cut.extra["old"], part.take(whole.extra["old"])) and cut.extra["old"].shape == cut.labels.shape
    assert torch.equal(cut.extra["advantage"], whole.extra["advantage"])
    assert whole.cut(SequencePart(0, 1)) is whole
    moved = whole.to(torch.device("meta"))
    assert {tensor.device.type for tensor in (moved.labels, moved.documents, *moved.extra.values())} == {"meta"}


def test_extras_can_be_added_per_microbatch():
    batch = build(BatchPlace(2, sequence_len=16))
    scores = [torch.rand(microbatch.labels.shape) for microbatch in batch.microbatches]
    more = batch.with_extra(scores=scores, twice=[2 * each for each in scores])
    assert [microbatch.extra["scores"] for microbatch in more.microbatches] == scores
    assert more.hash == batch.hash and set(more.microbatches[0].extra) == {*EXTRA, "scores", "twice"}
    with pytest.raises(
        DataError, match=r"extra\['scores'\] has the shape \[3\], but the microbatch has 2 sequences of"
    ):
        batch.microbatches[0].with_extra(scores=torch.zeros(3))
    ids = np.zeros(1, np.int64)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(DataError, match=r"give \[1, 8, ...\] for a value per token, or \[1\] or \[1, 1, ...\] for one"):
        Microbatch(tokens, tokens, ids, ids, extra={"old": torch.zeros(1, 7)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": LABELS[:4]}, r"the labels have the lengths \[5, 16, 2, 9\], and the sequences \[5, 16, 2, 9, 12\]"),
        ({"sequences": SEQUENCES[:4]}, r"rank 0 of 1 was given 4 sequences of a batch of 5, but its share has 5; give"),
        ({"sequences": [[], *SEQUENCES[1:]], "labels": [[], *LABELS[1:]]}, r"sequence 0 has no token; leave it out"),
        ({"place": BatchPlace(5, sequence_len=8)}, r"a sequence has 16 tokens, more than data.sequence_len=8; shorten"),
        (
            {"extra": {"old": [[1.0]] * 4 + [[1.0, 2.0]]}},
            r"extra\['old'\] has \[1, 1, 1, 1, 2\] values for sequences of",
        ),
        ({"place": BatchPlace(2, 0, 4)}, r"a batch of 5 sequences leaves a rank of 4 without any, and extra=\['old'\]"),
    ],
)
def test_lists_that_do_not_fit_are_one_error(change, message):
    given = {"sequences": SEQUENCES, "labels": LABELS, "place": BatchPlace(5), "num_sequences": 5, "extra": {}} | change
    if given["place"].size > 1:
        given |= {"sequences": SEQUENCES[:2], "labels": LABELS[:2], "extra": {"old": EXTRA["old"][:2]}}
    with pytest.raises(DataError, match=message):
        build_step_batch(0, **given)


class Counted:
    """A source that writes down what it is asked for, and in which thread."""

    def __init__(self, is_pure, place):
        self.is_pure, self.place, self.asked, self.closed = is_pure, place, [], False

    def batch(self, step):
        self.asked.append((step, threading.current_thread() is threading.main_thread()))
        return replace(build(self.place), step=step)

    def close(self):
        self.closed = True


def test_only_a_pure_source_is_read_ahead():
    place = BatchPlace(5, sequence_len=16)
    with closing(Feed(lambda place: Counted(False, place), place)) as feed:
        assert [feed.batch(step).step for step in (0, 1, 1)] == [0, 1, 1]
        assert feed.source.asked == [(0, True), (1, True), (1, True)]
        assert feed.fed(0).step == 0 and len(feed.source.asked) == 3, "a diagnosis sees what the step was fed"
    assert feed.source.closed
    with closing(Feed(lambda place: Counted(True, place), place)) as feed:
        assert feed.batch(0).step == 0 and feed.fed(0).step == 0
        assert sorted(feed.source.asked) == [(0, False), (0, False), (1, False), (2, False)]
        first = feed.source
        feed.reshare(1, 2)
        assert first.closed and feed.source.place == feed.place == replace(place, rank=1, size=2)


PARTS = """
from echelon.learn.data.loader import BatchPlace
from echelon.learn.data.own_batches import build_step_batch


class Stream:
    is_pure = False

    def __init__(self, recipe, data, place, url="here"):
        self.place = place

    def batch(self, step):
        return build_step_batch(step, [[1, 2, 3]], [[2, 3, -100]], self.place, {"old": [[1.0, 2, 3]], "gain": [2]})

    def close(self):
        pass


class Silent(Stream):
    is_pure = None


class Endless:
    is_pure = True

    def __next__(self):
        pass
"""


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """A module with sources, of a new name in each test, because Python caches imports."""
    name = f"sources_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def recipe_with(**overrides):
    return build_recipe(RECIPE, {key.replace("__", "."): value for key, value in overrides.items()})[0]


def test_a_recipe_names_a_source_and_its_options(parts):
    recipe = recipe_with(data__source=f"{parts}:Stream", data__options={"url": "there"})
    check_extensions(recipe)
    place = BatchPlace(1, sequence_len=16)
    with closing(open_feed(recipe, None, place)) as feed:
        assert feed.source.place is place and not feed.is_pure
        [line] = describe_source(recipe, feed)
    assert "a resumed run is not claimed to be exact" in line and list(describe_source(recipe_with(), feed)) == []
    ids, tokens = np.zeros(4, np.int64), torch.zeros(4, 16, dtype=torch.int64)
    rehearsed = like_source(Microbatch(tokens, tokens, ids, ids), recipe, None, place)
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in rehearsed.extra.items()}
    assert shapes == {"old": ((4, 16), torch.float32), "gain": ((4,), torch.int64)}
    assert recipe_json_schema()["$defs"]["DataConfig"]["properties"]["source"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"data__source": "{}:Endless"},
            r"must be a class with batch, close, like echelon's BatchSource, but it has no",
        ),
        ({"data__source": "{}:Silent"}, r"it must tell whether a batch depends on its step alone; set is_pure = True"),
        ({"data__source": "{}:Stream", "data__options": {"u": 1}}, r"data.options=\{'u': 1\} does not fit"),
        (
            {"data__source": "{}:Stream", "fault__on_lost_process": "continue"},
            r"data.source=\S+:Stream is not pure .* fault.on_lost_process=continue divides a batch again .* use a pure",
        ),
        ({"data__options": {"u": 1}}, r"data.options=\{u: 1\} has no effect without data.source; .* or remove options"),
        ({"data__source": "shuffled"}, r"data.source='?shuffled'? must be package.module:Name"),
    ],
)
def test_a_source_that_cannot_be_used_is_one_error(parts, overrides, message):
    named = {key: value.format(parts) if isinstance(value, str) else value for key, value in overrides.items()}
    with pytest.raises(ConfigError, match=message):
        recipe = recipe_with(**named)
        check_extensions(recipe)
        open_feed(recipe, None, BatchPlace(1))
