"""What commands read comes whole or is refused; what they write is looked at before the work."""

import json
from pathlib import Path

import pytest

from jax_longctx.cli import process, terminal
from jax_longctx.cli.options import Output
from jax_longctx.cli.terminal import read_text
from jax_longctx.errors import InputError


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("leads", [True, False])
def test_the_first_process_alone_writes_and_shows(tmp_path, monkeypatch, capsys, leads, as_json):
    monkeypatch.setattr(process, "is_leader", lambda: leads)
    out = tmp_path / "found.json"
    found = {"seconds": 1.5}
    Output(out=out, as_json=as_json).hand_over(found, lambda result: [f"in {result['seconds']} s"])
    printed = capsys.readouterr().out
    assert printed == ("" if not leads else json.dumps(found) + "\n" if as_json else "in 1.5 s\n")
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"] * leads
    if leads:
        assert json.loads(out.read_text()) == found


def test_a_file_is_replaced_whole(tmp_path):
    out = tmp_path / "found.json"
    out.write_text("before")
    with pytest.raises(TypeError):
        Output(out=out).hand_over({"bad": object()}, lambda result: [result])
    assert out.read_text() == "before"


@pytest.mark.parametrize("check", [terminal.check_file, terminal.check_folder])
def test_where_nothing_can_be_written_is_named_before_the_work(check, tmp_path):
    check(None)
    (tmp_path / "file").write_text("")
    for folder, why in ((tmp_path / "file" / "more", "Not a directory"), (Path("/proc"), "")):
        out = folder / "found.json" if check is terminal.check_file else folder
        with pytest.raises(InputError, match=f"to the folder {folder}: {why}"):
            check(out, "--where")


def test_a_folder_is_made_and_left_empty(tmp_path, monkeypatch):
    terminal.check_file(tmp_path / "a" / "b" / "found.json")
    terminal.check_folder(tmp_path / "c" / "d")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b", "c", "d"]
    with pytest.raises(InputError, match="is a folder; name a file"):
        terminal.check_file(tmp_path / "a")
    # Of several processes the first looks, on whose machine it is written.
    monkeypatch.setattr(process, "is_leader", lambda: False)
    terminal.check_folder(Path("/proc"))
    terminal.check_file(tmp_path / "e" / "found.json")
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize(
    "command",
    [
        "train evaluate -c model --data model --out",
        "train plot run --out",
        "train collect folder --out",
        "train bench --out",
        "bench kernels --out",
        "bench e2e --out",
        "bench decode --method h2o --out",
        "bench prefill --method h2o --out",
        "eval run -c model -t passkey --length 4096 --output",
        "eval passkey -c model --out",
        "eval passkey -c model --heatmap",
        "eval table runs.json --heatmap",
        "eval perplexity -c model --out",
        "eval perplexity -c model --plot",
        "eval agreement -c model --out",
        "eval citrus-overlap -c model --out",
        "eval resa-spectrum -c model --out",
        "eval resa-errors -c model --out",
    ],
)
def test_commands_look_where_they_write_before_they_work(
    run, loads, tmp_path, command, monkeypatch
):
    words = command.split()
    option = words[-1]
    (tmp_path / "file").write_text("")
    found = tmp_path / "file" / "more" / "found"
    refused = [(found, f"{found}: nothing can be written"), ("/proc/found", "nothing can be")]
    if words[0] == "eval" and option != "--output":
        refused.append((tmp_path, "is a folder; name a file"))
    if option in ("--plot", "--heatmap"):
        refused.append((tmp_path / "plot.png", "needs matplotlib"))
    for out, message in refused:
        if message == "needs matplotlib":
            monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        result = run(*words, out)
        assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output
        assert f"error: {option} " in result.stderr and message in result.stderr
    assert loads == []


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "found.json.partial").mkdir()
    with pytest.raises(InputError, match=r"found\.json could not be written: Is a directory"):
        terminal.save({}, tmp_path / "found.json")


def test_reads_utf8_and_drops_the_byte_order_mark(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffGröße\r\n".encode())
    assert read_text(str(path)) == "Größe\r\n"


def test_what_is_no_text_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    for content, message in [
        (b"", "is empty"),
        (b" \n\t", "is empty"),
        (b"abc\xff", r"not UTF-8 text \(byte 3 is 0xff\)"),
        ("ÿ".encode("utf-16"), "not UTF-8"),
    ]:
        path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            read_text(str(path))
    with pytest.raises(InputError, match=r"none\.txt cannot be read: No such file"):
        read_text(str(tmp_path / "none.txt"))
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        read_text(str(tmp_path))
