import json

import pytest

from jax_longctx.errors import InputError, OriginError
from jax_longctx.jobs.journal import Journal, read_journal
from jax_longctx.jobs.loop import compute_pieces, finish_pieces
from jax_longctx.locks import only_writer
from tests.jax_longctx.cli.conftest import die_at

COUNT = 4


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.json"


@pytest.fixture
def computed():
    return []


@pytest.fixture
def pieces(out, computed):
    def compute(number):
        computed.append(number)
        return {"square": number**2}

    def run(into=out, overwrite=False, **given):
        found = compute_pieces(into, {"seed": 0, **given}, COUNT, compute, overwrite=overwrite)
        assert [each["square"] for each in found] == [0, 1, 4, 9]

    return run


@pytest.mark.parametrize("fatal", range(1, COUNT + 1))
def test_no_piece_on_the_disk_is_computed_again(pieces, out, computed, monkeypatch, fatal):
    with monkeypatch.context() as patch, pytest.raises(SystemError):
        die_at(patch, fatal)
        pieces()
    assert computed == list(range(fatal)) and not out.exists()
    # What was being written is; a last line without its end is dropped.
    computed.clear()
    pieces()
    assert computed == list(range(fatal - 1, COUNT))
    computed.clear()
    pieces()
    assert computed == []
    finish_pieces(out, {"made_from": {"seed": 0}})
    assert [path.name for path in out.parent.iterdir()] == ["out.json"]
    # A finished file is replaced by one of the same origin alone.
    with pytest.raises(OriginError, match="was made with seed 0, now it is 1"):
        pieces(seed=1)
    assert computed == []
    pieces()
    assert computed == list(range(COUNT))


def test_another_origin_and_damage_are_refused_or_replaced(pieces, out, computed):
    pieces()
    journal = out.with_name("out.json.journal")
    whole = journal.read_text()
    lines = whole.splitlines(keepends=True)
    pieces_of_another = whole.replace('"seed": 0', '"seed": 1', 1)
    # Results are none without the first line, which is not to be removed by itself.
    alone, again = r"differs\); remove it, or give", "remove that line to compute it again, or"
    for text, said in (
        (pieces_of_another, f"journal is damaged: line 1 is not what was written .*{alone}"),
        (whole.replace('"square": 4', '"square": 5'), f"journal is damaged: line 4 is.*{again}"),
        ("".join([lines[0], "[]\n"]), "line 2 is no JSON object"),
        ('{"format": 0}\n', "another version or program wrote it; go on with that one, or remove"),
    ):
        journal.write_text(text)
        with pytest.raises(OriginError, match=said):
            pieces()
        assert journal.read_text() == text
    journal.write_text(whole)
    with pytest.raises(OriginError, match="journal was made with seed 0, now it is 1; run with"):
        pieces(seed=1)
    assert computed == list(range(COUNT))
    computed.clear()
    pieces(seed=1, overwrite=True)
    assert computed == list(range(COUNT)) and json.loads(journal.read_text().split("\n")[0])
    # Without a result nothing is lost.
    journal.write_text(lines[0])
    pieces(seed=2)
    with only_writer(out), pytest.raises(InputError, match="another process is writing"):
        pieces(seed=1)
    journal.unlink()
    journal.symlink_to(out.with_name("precious"))
    with pytest.raises(InputError, match="is a link or no plain file; remove it"):
        pieces()


def test_a_journal_holds_no_result_in_memory_that_is_on_the_disk(tmp_path):
    path = tmp_path / "journal"
    for added in ([], [{"row": 0}, {"row": 1}]):
        with Journal(path, 1, {"seed": 0}, "remove it") as journal:
            journal.add(added)
            assert journal.entries == []
        assert path.exists() == bool(added)
    assert read_journal(path, 1, "")[1:] == [{"row": 0}, {"row": 1}]


def test_without_a_file_nothing_is_kept(pieces, computed, tmp_path):
    pieces(into=None)
    finish_pieces(None, {})
    assert computed == list(range(COUNT)) and list(tmp_path.iterdir()) == []
