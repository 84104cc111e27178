"""Signatures of the training package are checked where those of the others are."""

import os

import beartype
import jaxtyping

BEARTYPE = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
if os.environ.get("LONGCTX_TEST_SIGNATURES") == "1":
    jaxtyping.install_import_hook("train_cpt", f"{__name__}.BEARTYPE")
