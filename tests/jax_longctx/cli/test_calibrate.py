import json

import numpy as np
import pytest


@pytest.mark.slow
def test_the_files_of_a_checkpoint_say_what_duo_attention_and_q_filters_keep(
    checkpoint, book, run, tmp_path
):
    args = ["calibrate", "-c", checkpoint, "--out", tmp_path, "--tokens", 600, "--texts", 2]
    made = json.loads(run(*args, "--json", code=0).stdout)
    heads, filters = tmp_path / "retrieval_heads.tsv", tmp_path / "query_filters.tsv"
    assert [made["heads"], made["filters"]] == [str(heads), str(filters)]
    scores = np.loadtxt(heads, delimiter="\t", ndmin=2)
    np.testing.assert_allclose(scores, made["scores"], atol=1e-5)
    # A model of random weights attends everywhere alike.
    assert scores.shape == (made["layers"], made["kv_heads"])
    assert (scores > 0.1).all() and (scores < 1).all()

    def settings(method):
        asked = ["ask", book, "Who?", "-c", checkpoint, "-m", method, "--max-tokens", 4, "--json"]
        return json.loads(run(*asked, code=0).stdout)["settings"]

    found = settings(f"duo-attention:heads={heads},share=0.5,sink=4,recent=16")
    kept = found["heads"].partition("#")[0].replace("/", "")
    assert kept.count("1") == round(scores.size / 2) == kept.count("0")
    table = np.loadtxt(filters, delimiter="\t", ndmin=2).reshape(*scores.shape, -1)
    norms = np.linalg.norm(table, axis=-1)
    # The mean of unit vectors.
    assert (norms > 0).all() and (norms < 1.001).all()
    assert settings(f"q-filters:filters={filters}")["filters"].startswith(f"{filters}#")
