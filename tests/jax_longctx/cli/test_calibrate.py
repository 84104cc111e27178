import json

import numpy as np
import pytest


@pytest.mark.slow
def test_the_file_of_a_checkpoint_says_which_heads_duo_attention_keeps(
    checkpoint, book, run, tmp_path
):
    file = tmp_path / "heads.tsv"
    args = ["calibrate", "-c", checkpoint, "--out", file, "--tokens", 600, "--texts", 2]
    made = json.loads(run(*args, "--json", code=0).stdout)
    scores = np.loadtxt(file, delimiter="\t", ndmin=2)
    np.testing.assert_allclose(scores, made["scores"], atol=1e-5)
    # A model of random weights attends everywhere alike.
    assert scores.shape == (made["layers"], made["kv_heads"])
    assert (scores > 0.1).all() and (scores < 1).all()
    method = f"duo-attention:heads={file},share=0.5,sink=4,recent=16"
    asked = ["ask", book, "Who?", "-c", checkpoint, "-m", method, "--max-tokens", 4, "--json"]
    found = json.loads(run(*asked, code=0).stdout)
    kept = "".join(found["settings"]["heads"].split("/"))
    assert kept.count("1") == round(scores.size / 2) == kept.count("0")
