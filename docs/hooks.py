"""What the site has beside the pages of `docs/`: the notebook, CONTRIBUTING.md, and a last check.

mkdocs calls these functions while it builds (`hooks` in mkdocs.yml).
"""

import ast
import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = "one-context-many-questions"
# A script, style sheet or picture of another site.
_LOADED = re.compile(
    r'<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)="?((?:https?:)?//[^\s">]+)'
)


def on_config(config: Any) -> None:
    """Puts the files that match in place of a pattern in the navigation."""
    docs = Path(config["docs_dir"])
    for entry in [*config["nav"]]:
        for title, pages in entry.items():
            if isinstance(pages, str) and "*" in pages:
                entry[title] = [path.relative_to(docs).as_posix() for path in docs.glob(pages)]
                entry[title].sort()
                if not entry[title]:
                    config["nav"].remove(entry)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made from other files."""
    notebook = json.loads((ROOT / "docs" / f"{NOTEBOOK}.ipynb").read_text(encoding="utf-8"))
    page, pictures = notebook_page(notebook, NOTEBOOK)
    made: dict[str, str | bytes] = {f"{NOTEBOOK}.md": page, **pictures}
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    # Links are relative to the repository's root there, to `docs/` here.
    made["contributing.md"] = text.replace("](docs/", "](")
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_post_build(config: Any) -> None:
    """Shows the navigation on narrower windows, and checks the pages.

    Raises:
      PluginError: the API reference lacks a public name, a page loads from another site, or the
        theme has other widths.
    """
    site = Path(config["site_dir"])
    ids: set[str] = set()
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        if loaded := _LOADED.search(text):
            raise PluginError(f"{page.relative_to(site)} loads {loaded[1]}; keep a copy in docs/")
        if page.parent.name == "api":
            ids |= set(re.findall(r'id="([\w.]+)"', text))
    missing = sorted(set(public_names()) - ids)
    if missing:
        raise PluginError(
            f"the API reference lacks {', '.join(missing)}; name their modules in docs/api/*.md"
        )
    for pattern in ("stylesheets/main.*.css", "javascripts/bundle.*.js"):
        (path,) = site.joinpath("assets").glob(pattern)
        path.write_text(with_navigation(path.read_text("utf-8")), "utf-8")


def with_navigation(text: str) -> str:
    """The theme's style or script, which hides the navigation below 1,120 pixels, not 1,220."""
    if "76.25em" not in text:
        raise PluginError("the theme's width of 76.25em is gone; mend docs/hooks.py")
    return text.replace("76.25em", "70em").replace("76.234375em", "69.984375em")


def public_names() -> Iterator[str]:
    """Dotted names of all that the documented packages export in `__all__`."""
    packages = ["jax_longctx", "checkpoints_convert"]
    packages += [f"jax_longctx.{name}" for name in ("caches", "contract", "engine", "methods")]
    packages += [
        f"pallas_kernels.{path.parent.name}" for path in ROOT.glob("pallas_kernels/*/__init__.py")
    ]
    for package in packages:
        path = ROOT / package.replace(".", "/") / "__init__.py"
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                yield from (f"{package}.{name}" for name in ast.literal_eval(node.value))


def notebook_page(notebook: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """An executed notebook as Markdown, and its pictures by path."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            for kind, data in output.get("data", {}).items():
                if kind == "image/png":
                    path = f"assets/{name}-{len(pictures) + 1}.png"
                    pictures[path] = base64.b64decode("".join(data))
                    parts.append(f"![The figure that this cell draws]({path})")
    title, _, rest = parts[0].partition("\n")
    parts[0] = f"{title}\n\n[This page as a notebook]({name}.ipynb)\n{rest}"
    return "\n\n".join(parts) + "\n", pictures
