"""`generate` continues a prompt; `methods` says what the metadata says."""

import json

import pytest

from jax_longctx.cli.main import app  # noqa: F401  (the app must load before METHODS does)


def test_streams_the_continuation_or_gives_a_record(run, loads, tiny):
    (answer,) = tiny.generate("The pass key", max_tokens=12)
    given = ("generate", "The pass key", "-c", "m", "--max-tokens", 12)
    result = run(*given)
    assert result.exit_code == 0, result.output
    assert result.stdout == answer.text + "\n"
    assert "context 3 tokens" in result.stderr or "tokens/s" in result.stderr
    (line,) = run(*given, "--json").stdout.splitlines()
    record = json.loads(line)
    assert (record["prompt"], record["answer"]) == ("The pass key", answer.text)
    prompt = tiny.tokenizer.encode("The pass key", bos=True)
    assert record["tokens"] == {"prompt": len(prompt), "answer": len(answer.tokens)}
    assert record["seconds"]["prefill"] > 0


def test_stdin_is_a_prompt_without_its_last_line_break(run, loads):
    given = run("generate", "The pass", "-c", "m", "--max-tokens", 6).stdout
    assert run("generate", "-", "-c", "m", "--max-tokens", 6, stdin="The pass\n").stdout == given
    assert run("generate", "-c", "m", "--max-tokens", 6, stdin="The pass").stdout == given


def test_seed_decides_the_draw(run, loads):
    def draw(seed):
        options = ("--temperature", 1.5, "--seed", seed, "--max-tokens", 12)
        return run("generate", "The", "-c", "m", *options).stdout

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(4)}) > 1


def test_empty_prompts(run, loads):
    for args, stdin, message in [
        ([""], None, "the prompt is empty"),
        (["-"], "", "stdin is empty"),
        ([], "", "stdin is empty"),
    ]:
        result = run("generate", *args, "-c", "m", stdin=stdin)
        assert result.exit_code == 2
        assert result.stderr.startswith("error: ") and message in result.stderr
    assert loads == []


def test_methods_table_and_json_say_the_same(run, monkeypatch):
    from jax_longctx.methods import METHODS

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


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_methods_lists_the_others_where_one_file_is_bad(run, monkeypatch, tmp_path, flags):
    from jax_longctx.methods import METHODS

    (tmp_path / "bad_method.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    kept = {name: METHODS.data[name] for name in ("full", "quest")}
    monkeypatch.setattr(METHODS, "data", {**kept, "bad": "bad_method"})
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


def test_methods_mistakes_are_named(run):
    for args, message in [
        (["--set", "budget=4"], "name the method"),
        (["full", "--context", "0"], "must be at least 1"),
        (["full", "--model", "gpt"], "gpt"),
        (["ful"], "error: unknown method 'ful'; known: "),
        (["ful"], "did you mean 'full'?"),
    ]:
        result = run("methods", *args)
        assert result.exit_code == 2 and message in result.stderr


@pytest.mark.slow
def test_methods_and_plan_count_keys_and_values_in_8_bits(run):
    def bytes_of(*options):
        (line,) = run("methods", "quest", "--json", "--context", 4096, *options).stdout.splitlines()
        return json.loads(line)["memory"]

    wide, kept = bytes_of(), bytes_of("--kv", "int8")
    assert (wide["kv"], kept["kv"]) == (None, "int8")
    # Digests of pages stay floats.
    assert 0.5 < kept["kept_bytes"] / wide["kept_bytes"] < 0.6
    where = ("plan", "--target", "h200x1", "--context", 131072, "--json")
    plans = [json.loads(run(*where, *options).stdout) for options in ((), ("--kv", "int8"))]
    assert [plan["kv"] for plan in plans] == [None, "int8"]
    shown = run(*where[:-1], "--kv", "int8").stdout
    assert "llama-3.1-8b, bfloat16, keys and values in int8, full" in shown
    refused = run("plan", "--target", "h200x1", "--kv", "int4")
    assert refused.exit_code == 2
    assert "--kv 'int4' is not one of bfloat16, fp8, int8" in refused.stderr


@pytest.mark.slow
def test_plan_counts_weights_in_8_bits(run):
    where = ("plan", "--target", "h200x1", "--context", 131072)
    wide, kept = (
        json.loads(run(*where, "--json", *options).stdout)
        for options in ((), ("--weights", "int8"))
    )
    assert (wide["weights"], kept["weights"]) == (None, "int8")
    assert 0.5 < kept["memory_bytes"]["weights"] / wide["memory_bytes"]["weights"] < 0.6
    shown = run(*where, "--kv", "fp8", "--weights", "int8").stdout
    assert "llama-3.1-8b, bfloat16, weights in int8, keys and values in fp8, full" in shown
    refused = run(*where, "--weights", "int4")
    assert refused.exit_code == 2
    assert "--weights 'int4' is not one of bfloat16, fp8, int8" in refused.stderr


def test_forms_reach_the_model(run, loads):
    forms = ("--kv", "fp8", "--weights", "int8")
    assert run("generate", "The", "-c", "m", "--max-tokens", 2, *forms).exit_code == 0
    ((_, options),) = loads
    assert (options["kv"], options["weights"]) == ("fp8", "int8")
