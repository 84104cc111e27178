"""Signatures of the training package are checked at run time, as those of the others are."""

import beartype
import jaxtyping

BEARTYPE = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
jaxtyping.install_import_hook("train_cpt", f"{__name__}.BEARTYPE")
