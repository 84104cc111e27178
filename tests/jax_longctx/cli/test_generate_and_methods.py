import json

import pytest

from jax_longctx.methods import METHODS
from tests.jax_longctx.cli.conftest import refused


def test_prompts_are_continued_or_give_a_record(run, loads, tiny):
    (answer,) = tiny.generate("The pass key", max_tokens=12)
    given = ("generate", "The pass key", "-c", "m", "--max-tokens", 12)
    result = run(*given, code=0)
    assert result.stdout == answer.text + "\n"
    assert "context 3 tokens" in result.stderr or "tokens/s" in result.stderr
    (line,) = run(*given, "--json").stdout.splitlines()
    record = json.loads(line)
    assert (record["prompt"], record["answer"]) == ("The pass key", answer.text)
    prompt = tiny.tokenizer.encode("The pass key", bos=True)
    assert record["tokens"] == {"prompt": len(prompt), "answer": len(answer.tokens)}
    assert record["seconds"]["prefill"] > 0
    # From stdin without the last line break.
    limit = ("-c", "m", "--max-tokens", 6)
    given = run("generate", "The pass", *limit).stdout
    assert run("generate", "-", *limit, stdin="The pass\n").stdout == given
    assert run("generate", *limit, stdin="The pass").stdout == given
    # The seed decides the draw, and forms of numbers reach the model.
    how = ("--temperature", 1.5, "--kv", "int8", "--weights", "int8", "--seed")
    drawn = [run("generate", "The", *limit, *how, seed).stdout for seed in (1, 1, 0, 2, 3)]
    assert drawn[0] == drawn[1] and len(set(drawn)) > 1
    assert (loads[-1][1]["kv"], loads[-1][1]["weights"]) == ("int8", "int8")


def test_methods_table_and_json_say_the_same(run, monkeypatch):
    found = [json.loads(line) for line in run("methods", "--json").stdout.splitlines()]
    assert [record["name"] for record in found] == list(METHODS)
    assert [record["summary"] for record in found] == [each.summary for each in METHODS.values()]
    records = {record["name"]: record for record in found}
    few = {name: METHODS.data[name] for name in ("full", "citrus", "infllm")}
    monkeypatch.setattr(METHODS, "data", few)
    table = run("methods").stdout
    for name in few:
        assert name in table
        shown = " ".join(run("methods", name).stdout.split())
        for said in (records[name]["source"], records[name]["summary"], *records[name]["settings"]):
            assert said in shown
        (alone,) = run("methods", name, "--json").stdout.splitlines()
        assert json.loads(alone) == records[name]


def test_methods_lists_the_others_where_one_file_is_bad(run, monkeypatch, tmp_path):
    (tmp_path / "bad_method.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    kept = {name: METHODS.data[name] for name in ("full", "quest")}
    monkeypatch.setattr(METHODS, "data", {**kept, "bad": "bad_method"})
    for flags in ((), ("--json",)):
        result = run("methods", *flags)
        assert result.exit_code == 2
        assert "full" in result.stdout and "quest" in result.stdout
        said = "error: method 'bad': bad_method cannot be imported: SyntaxError: "
        assert result.stderr.splitlines()[-1].startswith(said)


def test_methods_show_what_their_caches_cost(run):
    def memory(*args):
        return json.loads(run("methods", *args, "--json").stdout)["memory"]

    # 8B shape: 32 layers x 8 heads x 128 x (k, v) x 2 bytes a token.
    token = 32 * 8 * 128 * 2 * 2
    full = memory("full", "--context", "8192")
    assert full["kept_bytes"] == pytest.approx((8192 + 384) * token, rel=0.01)
    small = memory("streaming-llm", "--set", "budget=512", "--context", "100000", "--batch", "2")
    # The context's 512 tokens, and the answer's in whole tiles of 128 slots.
    assert small["peak_bytes"] == pytest.approx(2 * (512 + 640) * token, rel=0.02)
    assert small["resident_bytes"] == pytest.approx(2 * 640 * token, rel=0.02)
    assert small["read_bytes"] == pytest.approx(2 * 512 * token, rel=0.02)
    assert "rope scaling" in memory("dynamic-ntk")["refused"]
    shown = run("methods", "full", "--context", "8192").stdout
    assert "kept after prefill" in shown and "1.0 GiB" in shown


def test_mistakes_are_named(run, loads):
    for args, stdin, message in [
        (("methods", "--set", "budget=4"), None, "name the method"),
        (("methods", "full", "--context", "0"), None, "must be at least 1"),
        (("methods", "ful"), None, "error: unknown method 'ful'; known: "),
        (("methods", "ful"), None, "did you mean 'full'?"),
        (("generate", "-c", "m", ""), None, "error: the prompt is empty"),
        (("generate", "-c", "m", "-"), "", "error: stdin is empty"),
        (("generate", "-c", "m"), "", "error: stdin is empty"),
        (("generate", "-c", "m", __file__), None, "is a file; to continue its text"),
        (("plan", "-m", "full", "-m", "quest"), None, "--method/-m is given 2 times"),
        (("generate", "a", "-c", "m", "--seed", 1, "--seed", 1), None, "--seed is given 2 times"),
        (("ask", "-", "a", "--chat", "--no-chat"), None, "--chat/--no-chat is given 2 times"),
        (("eval", "run", "-o", "a", "--output", "b"), None, "--output/-o is given 2"),
    ]:
        refused(run(*args, stdin=stdin), message)
    assert loads == []


@pytest.mark.slow
def test_methods_and_plan_count_keys_and_values_in_8_bits(run):
    def told(*args):
        return json.loads(run(*args, "--json").stdout)

    methods = ("methods", "quest", "--context", 4096)
    wide, kept = told(*methods)["memory"], told(*methods, "--kv", "int8")["memory"]
    assert (wide["kv"], kept["kv"]) == (None, "int8")
    # Digests of pages stay floats.
    assert 0.5 < kept["kept_bytes"] / wide["kept_bytes"] < 0.6
    where, forms = ("plan", "--target", "h200x1", "--context", 131072), ("--weights", "int8")
    plans = [told(*where), told(*where, "--kv", "int8", *forms)]
    assert [plan["kv"] for plan in plans] == [plan["weights"] for plan in plans] == [None, "int8"]
    wide, kept = (plan["memory_bytes"]["weights"] for plan in plans)
    assert 0.5 < kept / wide < 0.6
    shown = run(*where, "--kv", "int8").stdout
    assert "llama-3.1-8b, bfloat16, keys and values in int8, full" in shown
    shown = run(*where, "--kv", "int8", *forms).stdout
    assert "llama-3.1-8b, bfloat16, weights in int8, keys and values in int8, full" in shown
    for form in ("--kv", "--weights"):
        refused(run(*where, form, "int4"), f"unknown {form[2:]} 'int4'; known: bfloat16, int8")
