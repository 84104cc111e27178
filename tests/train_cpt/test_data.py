import hashlib
import json
import os
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jax_longctx.errors import CheckpointError, ConfigError, InputError
from jax_longctx.files import seal
from train_cpt.data import (
    batches,
    document_files,
    file_record,
    open_windows,
    prepare,
    read_documents,
    split_of,
)

LENGTH = 8
SHARES = (0.6, 0.2, 0.2)


def encode(text):
    return list(text.encode())


def texts(count, size=20):
    return [(f"d{i}", chr(33 + i) * size) for i in range(count)]


def prepared(directory, documents=None, **changes):
    how = {"length": LENGTH, "vocab_size": 256, "tokenizer": "bytes", "shares": SHARES, **changes}
    documents = texts(40) if documents is None else documents
    return prepare(documents, encode, directory, **how)


def opened(directory, split="train"):
    return open_windows(directory, split, length=LENGTH, tokenizer="bytes")


def read(*sources, field="text"):
    return list(read_documents(document_files(sources), field))


def write_table(path, texts, column="text"):
    """A Parquet file, or an Arrow stream as `datasets` writes one, in several batches."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": range(len(texts)), column: texts})
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
    else:
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table, max_chunksize=2)


def save_dataset(folder, texts):
    """What `Dataset.save_to_disk` leaves, with a cache of a transformation beside it."""
    names = [f"data-{number:05}-of-00002.arrow" for number in range(2)]
    write_table(folder / names[0], texts[:3])
    write_table(folder / names[1], texts[3:])
    write_table(folder / "cache-0123.arrow", ["cached"])
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


WORDS = ["one", "two", "three", "four", "five"]


def test_documents_and_rows_of_tables_are_read_in_order_with_their_names(tmp_path):
    (tmp_path / "b.txt").write_text("plain")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    (tmp_path / "ignored.bin").write_text("other")
    lines = [(f"{tmp_path}/a.jsonl:1", "one"), (f"{tmp_path}/a.jsonl:3", "two")]
    assert read(tmp_path, tmp_path / "b.txt") == [*lines, *[(f"{tmp_path}/b.txt", "plain")] * 2]
    table = tmp_path / "t.parquet"
    write_table(table, WORDS, "body")
    rows = [(f"{table}:{number}", text) for number, text in enumerate(WORDS, start=1)]
    assert read(table, field="body") == rows
    write_table(table, ["x" * 9] * 200)
    assert len(read(table)) == 200


def test_saved_datasets_are_read_by_what_they_list(tmp_path):
    save_dataset(tmp_path / "single", WORDS)
    assert [text for _, text in read(tmp_path / "single")] == WORDS
    # A `DatasetDict`: its splits are folders.
    for split in ("train", "test"):
        save_dataset(tmp_path / "both" / split, [f"{split} {word}" for word in WORDS])
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    found = [text for _, text in read(tmp_path / "both")]
    assert found == [f"{split} {word}" for split in ("test", "train") for word in WORDS]
    (tmp_path / "single" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(InputError, match=r"data-00001-of-00002\.arrow cannot be read"):
        read(tmp_path / "single")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b'{"text": "a"}\n{"body": "b"}', r"x.jsonl:2: expected an object with a text"),
        ("x.jsonl", b"[", "x.jsonl:1: this line is not JSON"),
        ("x.jsonl", b"[" * 200_000, "x.jsonl:1: this line is not JSON"),
        ("x.jsonl", b'{"text": "a"}\n{"text": "b\\udc80"}', r"x.jsonl:2: half of a surrogate pair"),
        ("x.jsonl", None, "x.jsonl cannot be read: it is a FIFO"),
        ("x.parquet", None, "x.parquet cannot be read: it is a FIFO"),
        ("x.txt", b"ab\xff", r"x.txt is not UTF-8 text \(byte 2\)"),
        ("x.pdf", b"", "x.pdf has an unknown suffix; expected .txt"),
        ("x.parquet", b"PAR1 but no more", "x.parquet is damaged: Parquet"),
        ("x.arrow", b"nothing of the kind", "x.arrow is damaged: "),
        ("x.parquet", {"body": ["a"]}, "has no column 'text' but id, body; name the field"),
        ("x.arrow", {"text": [1]}, "column 'text' is of int64, expected text"),
        ("x.parquet", {"text": ["a", None]}, "x.parquet: row 2 has no text 'text'"),
        (None, b"", "gone does not exist"),
    ],
)
def test_bad_documents_are_refused(tmp_path, name, content, message):
    path = tmp_path / (name or "gone")
    if isinstance(content, dict):
        ((column, values),) = content.items()
        write_table(path, values, column)
    elif content is None:
        os.mkfifo(path)
    elif name:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read(path)


def test_tables_without_pyarrow_say_what_to_install(tmp_path, monkeypatch):
    write_table(tmp_path / "t.parquet", ["one"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"need the package pyarrow; .*jax-longctx\[parquet\]"):
        read(tmp_path)


def test_windows_follow_each_other_and_everything_is_counted_and_recorded(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefgh")
    (record,) = map(file_record, document_files([tmp_path]))
    digest = hashlib.sha256(b"abcdefgh").hexdigest()
    assert record == {"path": f"{tmp_path}/a.txt", "bytes": 8, "sha256": digest}
    documents = [("a", "abcdefghABCDEFGH!"), ("b", "short"), ("again", "abcdefghABCDEFGH!")]
    shares = (1.0, 0.0, 0.0)
    manifest = prepared(tmp_path / "data", documents, shares=shares, sources=[record])
    rows = opened(tmp_path / "data")
    assert [bytes(row.tolist()) for row in rows] == [b"abcdefgh", b"ABCDEFGH"]
    assert manifest.documents == {"used": 1, "short": 1, "repeated": 1}
    assert manifest.dropped_tokens == 1
    assert json.loads((tmp_path / "data" / "sources.jsonl").read_text()) == record
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "data"]


def test_a_split_depends_on_the_text_alone_and_has_its_windows_in_the_smallest_dtype(tmp_path):
    prepared(tmp_path / "some", texts(40)[::-2])
    small = prepared(tmp_path / "small")
    wide = prepared(tmp_path / "wide", vocab_size=128256)
    for split in ("train", "dev", "test"):
        own = [text for _, text in texts(40) if split_of(text, SHARES) == split]
        some = {chr(row[0]) for row in opened(tmp_path / "some", split)}
        assert some and some <= {text[0] for text in own}
        expected = np.array([encode(text)[:LENGTH] for text in own for _ in range(2)])
        for name, manifest, dtype in (("small", small, "uint16"), ("wide", wide, "uint32")):
            found = opened(tmp_path / name, split)
            assert found.dtype == dtype and len(found) == manifest.windows[split]
            np.testing.assert_array_equal(found, expected)
    assert small.windows["train"] > small.windows["dev"]
    assert {split_of(text, (0.0, 1.0, 0.0)) for _, text in texts(40)} == {"dev"}


def test_bad_data_sets_are_refused_and_nothing_is_overwritten(tmp_path):
    data = tmp_path / "data"
    for changes, error, message in (
        ({"length": 21}, InputError, "of 40 documents 0 have the 21 tokens .*longest has 20"),
        ({"shares": (0.5, 0.1, 0.1)}, ConfigError, "must add up to 1"),
        ({"length": 1}, ConfigError, "at least 2 tokens, got 1"),
        ({"vocab_size": 34}, InputError, "d1 holds token id 34, the model has 34 embeddings"),
    ):
        with pytest.raises(error, match=message):
            prepared(data, **changes)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match="not a prepared data set"):
        opened(tmp_path)
    prepared(data)
    before = {path.name: path.read_bytes() for path in data.iterdir()}
    with pytest.raises(InputError, match="exists already"):
        prepared(data)
    assert {path.name: path.read_bytes() for path in data.iterdir()} == before
    with pytest.raises(InputError, match="windows of 8 tokens, the run asks for 9"):
        open_windows(data, "train", length=9, tokenizer="bytes")
    with pytest.raises(InputError, match="another tokenizer"):
        open_windows(data, "train", length=LENGTH, tokenizer="other")
    stored = data / "train.npy"
    stored.write_bytes(stored.read_bytes()[:-1] + b"?")
    with pytest.raises(InputError, match=r"train.npy is damaged \(SHA-256"):
        opened(data)
    stored.unlink()
    with pytest.raises(InputError, match=r"train\.npy cannot be read"):
        opened(data)
    fields = json.loads((data / "manifest.json").read_text())
    for changes, message in (
        ({"format": 1}, r"manifest\.json has format 1, expected 2: .* prepare the data again"),
        ({"length": 4}, r"manifest\.json is damaged: its sha256 does not match"),
    ):
        (data / "manifest.json").write_text(json.dumps({**fields, **changes}))
        with pytest.raises(CheckpointError, match=message):
            opened(data)
    # A checkpoint's is sealed too, with the same format.
    (data / "manifest.json").write_text(json.dumps(seal(2, {"config": {}})))
    with pytest.raises(InputError, match=r"is not a prepared data set .* train prepared one"):
        opened(data)


def test_batches_go_through_every_epoch_and_their_position_can_be_taken_up(tmp_path):
    prepared(tmp_path / "data", shares=(1.0, 0.0, 0.0))
    windows = opened(tmp_path / "data")
    assert len(windows) == 80

    def start(seed=0):
        return batches(windows, micro_batches=2, rows=4, seed=seed)

    whole = start()
    taken = [next(whole) for _ in range(15)]
    assert taken[0].shape == (2, 4)
    order = np.concatenate([batch.ravel() for batch in taken])
    first, rest = order[:80], order[80:]
    np.testing.assert_array_equal(np.sort(first), np.arange(80))
    assert not np.array_equal(first, np.sort(first)) and not np.array_equal(rest, first[:40])

    again, resumed = start(), start()
    for _ in range(9):
        next(again)
    resumed.set_state(json.loads(json.dumps(again.get_state())))
    for expected in taken[9:]:
        np.testing.assert_array_equal(next(resumed), expected)
    assert not np.array_equal(next(start(seed=1)), taken[0])

    # A batch of one text never ends either, and a split of none is refused.
    alone = batches(windows, micro_batches=1, rows=1, seed=0)
    ones, others = ([next(alone).tobytes() for _ in windows] for _ in range(2))
    assert sorted(ones) == sorted(others) and ones != others
    with pytest.raises(InputError, match="no text"):
        batches(opened(tmp_path / "data", "dev"), micro_batches=1, rows=1, seed=0)
