"""Suspicious data and skipped files are reported; merged rows, and text on both sides of the split, are refused."""

import json
import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echelon.cli.main import app
from echelon.ground.errors import DataError
from echelon.learn.data.corpus import describe_left_out, list_corpus
from echelon.learn.data.record_counts import SAMPLED_DOCUMENTS, CopySample
from echelon.learn.data.source import LeftOut, Source, list_files
from tests.unit.recipe_samples import SMALL

TRAINED = ["tokenizer={train: {vocab_size: 300}}", "data.sequence_len=64", "data.validation_fraction=0"]
CHAT = [*TRAINED, "data.chat_template=chatml", "model.new_tokens=['<|im_start|>', '<|im_end|>']"]


@pytest.fixture
def look(tmp_path, monkeypatch):
    """Write a file and run `echelon data` on it; return its messages, or raise its error."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(SMALL)

    def run(content: str, *overrides: str, name: str = "x.jsonl") -> list[str]:
        Path(name).write_text(content)
        arguments = ["data", "recipe.yaml", f"data.train={name}", "data.prepare_workers=1", "--samples", "0"]
        result = CliRunner().invoke(app, [*arguments, *overrides])
        if result.exception is not None:
            raise result.exception
        return result.output.splitlines()

    return run


def jsonl(records):
    return "".join(json.dumps(record) + "\n" for record in records)


def chat(*texts):
    roles = ("user", "assistant") * len(texts)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}


def sharegpt(*turns):
    return {"conversations": [{"from": role, "value": text} for role, text in turns]}


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"instruction": "Add 1 and 1.", "output": "2"}, {"instruction": "Add 1 and 2.", "output": ""}),
        (chat("a?", "b"), chat("seven?", " ")),
        (chat("a?", "b"), chat("c?", "", "and now?", "d")),
        (sharegpt(("human", "a?"), ("gpt", "b")), sharegpt(("human", "a?"), ("gpt", "\n"))),
        ({"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": ""}),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "q", "chosen": "", "rejected": "b"}),
    ],
    ids=["alpaca", "messages", "an earlier turn", "sharegpt", "completion", "chosen"],
)
def test_an_empty_answer_that_is_trained_on_is_broken(look, good, bad):
    overrides = [*CHAT, *(["objective.name=dpo"] if "chosen" in good else [])]
    records = [good] * 9
    records[3] = bad
    with pytest.raises(DataError, match=r"1 of 9 records cannot be used.*x\.jsonl:4 has an empty answer, from which "):
        look(jsonl(records), *overrides)
    for _ in range(2):  # the second call finds the prepared data
        lines = look(jsonl(records), *overrides, "data.max_broken_fraction=0.2")
        assert any("1 broken records left out" in line for line in lines)


def test_examples_that_look_like_a_mistake_are_counted(look):
    talks = [chat(f"question {number}", f"answer {number}") for number in range(30)]
    talks[9] = chat("a", "b", "and then?")
    talks[12] = {"messages": [{"role": "system", "content": "s"}, *chat("x", "y", "z?", "last")["messages"][1:]]}
    talks[15] = chat("c", "", "and now?", "d")
    talks[15]["messages"][1]["train"] = False
    for _ in range(2):  # the second call finds the prepared data
        lines = "\n".join(look(jsonl(talks), *CHAT))
        for what, line in (
            ("an assistant turn at the beginning: no question precedes it", 13),
            ("a user turn at the end: no answer follows", 10),
            ("an empty answer that is not trained on: the model reads it before later turns", 16),
        ):
            assert (
                f"data.train.0: 1 of 30 examples have {what} (the first: {Path('x.jsonl').resolve()}:{line})" in lines
            )
    last = "\n".join(look(jsonl([*talks[:20], chat("c", "", "and now?", "d")]), *CHAT, "data.train_on=last"))
    assert "2 of 21 examples have an empty answer that is not trained on" in last
    pairs = [{"prompt": "q", "chosen": "a", "rejected": "b" * (number != 3)} for number in range(9)]
    lines = "\n".join(look(jsonl(pairs), *TRAINED, "objective.name=dpo"))
    assert "1 of 9 examples have an empty rejected answer: the model learns to answer at all" in lines
    tool = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    answered = [*chat("use it")["messages"], tool, {"role": "tool", "content": "1"}, *chat("x", "y")["messages"][1:]]
    assert not [line for line in look(jsonl([{"messages": answered}] * 9), *CHAT) if "empty" in line]


def test_the_share_of_copies_is_reported(look):
    words = [f"this is the text of number {number}" for number in range(60)]
    texts = jsonl({"text": text} for text in (*words, *words[:20], *words[:20]))
    assert "data.train: 40% of the 100 documents are copies of others; data.deduplicate=true drops them" in look(
        texts, *TRAINED
    )
    assert not [line for line in look(texts, *TRAINED, "data.deduplicate=true") if "are copies of others" in line]
    assert not [line for line in look(jsonl({"text": text} for text in words), *TRAINED) if "copies" in line]


def test_documents_that_are_also_validation_text_are_reported(look):
    Path("held.jsonl").write_text(jsonl({"text": f"text of number {number}"} for number in range(10)))
    lines = look(
        jsonl({"text": f"text of number {number}"} for number in range(5, 105)),
        *TRAINED[:-1],
        "data.validation=held.jsonl",
        "data.validation_fraction=null",
    )
    assert (
        "data.train: 5% of the 100 documents are also validation text; data.deduplicate=true does not train on them"
        in lines
    )


@pytest.mark.parametrize("distinct", [1000, 30_000])
def test_the_share_of_copies_equals_an_exact_count(distinct):
    rng = random.Random(distinct)
    hashes = [rng.getrandbits(64) for _ in range(distinct)]
    documents = hashes + rng.choices(hashes, k=distinct // 2)
    rng.shuffle(documents)
    sample = CopySample()
    for document in documents:
        sample.add(document, is_validation=False)
    exact = sum(count - 1 for count in Counter(documents).values()) / len(documents)
    assert len(sample.seen) <= SAMPLED_DOCUMENTS
    assert sample.copies / sample.counted == pytest.approx(exact, abs=0 if distinct < SAMPLED_DOCUMENTS else 0.03)


def table(*rows):
    return "\n".join(("id,text", *rows)) + "\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            table("0,zero", '1,"one', *(f"{number},text" for number in range(2, 2001))),
            r"2,000 of 2,001 records .*x\.csv:3 opens a quote that is never closed, so that 2,000 lines up to line "
            r"2,002 became one row",
        ),
        (
            table("0,zero", '1,"one', *(f"{number},text" for number in range(2, 50)), '50,"fifty"', "51,x", "52,y"),
            r"50 of 53 records .*x\.csv:3 has a quote that is neither closed nor doubled, so that 50 lines up to line "
            r"52 became one row",
        ),
    ],
)
def test_an_unclosed_quote_is_refused(look, text, words):
    with pytest.raises(DataError, match=words):
        look(text, *TRAINED, name="x.csv")


def test_valid_quotes_are_read(look):
    good = table('1,"two\nlines, with ""quotes"""', '2,5" pipes', *(f"{number},plain text" for number in range(3, 9)))
    assert any("train: 8 documents" in line for line in look(good, *TRAINED, name="x.csv"))


def test_a_refusal_states_the_fraction_that_would_pass(look):
    records = [{"text": f"text number {number}"} for number in range(60)]
    records[30] = {"txet": "misspelt"}
    with pytest.raises(DataError, match=r"1 of 60 records .* or drop them with data\.max_broken_fraction=0\.017\.$"):
        look(jsonl(records), *TRAINED)
    lines = look(jsonl(records), *TRAINED, "data.max_broken_fraction=0.017")
    assert any("dropped 1 of 60 records" in line for line in lines)


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv"])
def test_unknown_fields_are_refused_with_the_expected_ones(look, name):
    records = jsonl({"question": "q", "reply": "r"} for _ in range(5))
    content = records if name.endswith("jsonl") else "question,reply\nq,r\n"
    with pytest.raises(DataError) as told:
        look(content, *TRAINED, name=name)
    for words in ("by the fields text or input_ids", "messages (messages)", "alpaca (instruction, output)"):
        assert words in str(told.value)
    assert "max_broken_fraction=1" not in str(told.value)


def test_text_that_is_repeated_many_times_is_reported(look):
    text = jsonl({"text": f"text number {number}"} for number in range(10))
    lines = look(text, *TRAINED, "train.steps=1000", "train.global_batch_size=4")
    [line] = [line for line in lines if "each token is seen" in line]
    sequences = next(int(line.split()[1]) for line in lines if line.startswith("train: "))
    assert line.startswith(
        f"data.train: each token is seen about {4000 / sequences:,.0f} times in the run's 1,000 steps"
    )
    assert sequences == 1
    [line] = [line for line in look(text, *TRAINED, "train.steps=5", "train.global_batch_size=1") if "is seen" in line]
    assert "about 5 times" in line
    few = look(text, *TRAINED, "train.steps=4", "train.global_batch_size=1")
    assert not [line for line in few if "each token is seen" in line]


def source(path, **fields):
    return Source("data.train.0", str(path), **fields)


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def names_of(path):
    return [file.name for file in list_files(source(path))]


def messages_of(path, **fields):
    return list(describe_left_out(list_corpus([source(path, **fields)], [])))


def test_one_message_counts_all_skipped_files(tmp_path):
    write(
        tmp_path, "a.txt", ".x.txt", ".git/config", "node_modules/y.js", "sub/image.png", "image.bin", "table.parquet"
    )
    (tmp_path / "table.parquet").unlink()
    (tmp_path / "empty.md").touch()
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    assert names_of(tmp_path) == ["a.txt", "empty.md"]
    assert messages_of(tmp_path) == [
        f"data.train.0: not read in {tmp_path}: broken links and special files: 1 (gone.txt); "
        "empty files: 1 (empty.md); files of other formats: 2 (image.bin, ...); "
        "folders of caches and packages: 1 (node_modules); hidden files: 1 (.x.txt); hidden folders: 1 (.git)"
    ]
    write(tmp_path / "plain", "a.txt", "b.md")
    assert messages_of(tmp_path / "plain") == []


def test_files_of_other_formats_are_skipped_and_counted(tmp_path):
    write(tmp_path, "a.md", "b.csv", "c.md")
    (tmp_path / "x.jsonl").write_text('{"text": "x"}\n')
    assert messages_of(tmp_path, format="jsonl") == [
        f"data.train.0: not read in {tmp_path}: files of other formats: 3 (a.md, ...)"
    ]


def test_links_to_folders_are_followed_each_real_folder_once(tmp_path):
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    write(data, "b/one.txt", "z.txt")
    write(elsewhere, "two.txt", "deep/three.txt", ".hidden.txt")
    (data / "a").symlink_to(data / "b")  # real folders keep their own names
    (data / "far").symlink_to(elsewhere)
    (data / "far-again").symlink_to(elsewhere)
    (data / "up").symlink_to(tmp_path)  # contains the folder itself
    (elsewhere / "round").symlink_to(elsewhere)
    (elsewhere / "deep" / "back").symlink_to(data)
    assert names_of(data) == ["b/one.txt", "far/deep/three.txt", "far/two.txt", "z.txt"]
    [line] = messages_of(data)
    assert "links to folders that are already read or contain this one: 5 (a, ...)" in line
    assert "hidden files: 1 (far/.hidden.txt)" in line


def test_a_glob_that_links_make_endless_is_refused(tmp_path):
    """Python's would visit 2^40 folders. The folder itself is read, each part once."""
    write(tmp_path / "text", "a.txt", "b/c.txt")
    (tmp_path / "text" / "again").symlink_to(".")
    assert len(list_files(source(tmp_path / "text" / "**" / "*.txt"))) == 2
    (tmp_path / "text" / "b" / "back").symlink_to("..")
    with pytest.raises(
        DataError, match=r"data\.train\.0\.path=.*: links lead to the same folders in more than 10,000,000"
    ):
        list_files(source(tmp_path / "text" / "**" / "*.txt"))
    for number in range(30):  # no circle, but 3^30 ways to its end
        write(tmp_path / "chain" / f"{number}", "x.txt")
        for name in "abc":
            (tmp_path / "chain" / f"{number}" / name).symlink_to(f"../{number + 1}")
    with pytest.raises(DataError, match="links lead to the same folders"):
        list_files(source(tmp_path / "chain" / "0" / "**" / "*.txt"))
    assert names_of(tmp_path / "text") == ["a.txt", "b/c.txt"]
    assert len(names_of(tmp_path / "chain" / "0")) == 30


def test_a_folder_that_cannot_be_listed_is_refused_as_a_file_is(tmp_path, monkeypatch):
    write(tmp_path, "a.txt", "locked/b.txt")
    listed = os.scandir

    def scandir(path):
        if Path(path).name == "locked":  # the tests may run as root
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(
        DataError, match=r"data\.train\.0\.path=.*: the folder .*locked cannot be read \(Permission den"
    ):
        list_files(source(tmp_path))


@pytest.mark.parametrize("way", ["the same path", "symbolic link", "hard link", "copy"])
def test_a_copy_of_validation_text_is_refused_as_training_text(tmp_path, way):
    write(tmp_path, "train/a.txt", "train/b.txt", "held/other.txt")
    train, held = tmp_path / "train" / "a.txt", tmp_path / "held" / "c.txt"
    match way:
        case "symbolic link":
            held.symlink_to(train)
        case "hard link":
            held.hardlink_to(train)
        case "copy":
            held.write_bytes(train.read_bytes())
        case _:
            held = train
    validation = replace(source(held.parent), key="data.validation.0")
    with pytest.raises(DataError, match=r"data\.validation\.0\.path=.*must not be trained on"):
        list_corpus([source(train.parent)], [validation])
    if held != train:
        held.unlink()
        held.write_text("train/x.txt")  # different text of the same size
        assert len(list_corpus([source(train.parent)], [validation])) == 2


def test_megatron_files_of_equal_indices_are_compared_by_their_ids(tmp_path):
    for name, ids in (("a", b"\1\0" * 8), ("b", b"\2\0" * 8)):
        (tmp_path / f"{name}.bin").write_bytes(ids)
        (tmp_path / f"{name}.idx").write_bytes(b"MMIDIDX\x00\x00" + bytes(40))
    train = source(tmp_path / "a.idx", format="megatron")
    validation = Source("data.validation.0", str(tmp_path / "b.idx"), "megatron")
    assert len(list_corpus([train], [validation])) == 2
    (tmp_path / "b.bin").write_bytes((tmp_path / "a.bin").read_bytes())
    with pytest.raises(DataError, match=r"a copy of .*a\.idx in data\.train"):
        list_corpus([train], [validation])


def test_skipped_files_are_reported_with_the_first_path_per_reason():
    left_out = LeftOut()
    assert left_out.describe() is None
    for place in ("b", "a", "c"):
        left_out.note("odd files", place)
    assert left_out.describe() == "odd files: 3 (a, ...)"
