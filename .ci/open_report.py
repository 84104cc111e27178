"""Opens an evaluation's report in headless Chromium and says whether all of it is there.

    python .ci/open_report.py DIR/report.html [--browser chromium]

Counts tables, cells and drawings as the browser lays them out, on a wide and on a narrow window;
fails on console messages, on anything fetched, on a page wider than its window, on drawings of no
size. Writes wide.png, narrow.png and dark.png beside the page. Standard library only.
"""

import argparse
import html.parser
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

# Runs in the page once it is laid out; what it finds is read from the dumped document.
PROBE = """<script>
addEventListener("load", () => {
  const drawn = [...document.querySelectorAll("figure svg")].map(s => s.getBoundingClientRect());
  const ids = [...document.querySelectorAll("[id]")].map(e => e.id);
  const found = {
    tables: document.querySelectorAll("table").length,
    cells: document.querySelectorAll("td").length,
    drawings: drawn.length,
    empty: drawn.filter(box => box.width < 50 || box.height < 50).length,
    fetched: performance.getEntriesByType("resource").map(e => e.name),
    wider: document.documentElement.scrollWidth - innerWidth,
    twice: ids.filter((id, i) => ids.indexOf(id) !== i),
  };
  const out = document.createElement("template");
  out.id = "probe";
  out.setAttribute("data-found", JSON.stringify(found));
  document.body.append(out);
});
</script>"""
WINDOWS = {"wide": (1280, 1600), "narrow": (390, 1600)}


class _Probe(html.parser.HTMLParser):
    """Finds what the probe wrote."""

    found = None

    def handle_starttag(self, tag, attrs):
        if tag == "template" and dict(attrs).get("id") == "probe":
            self.found = json.loads(dict(attrs)["data-found"])


def browse(browser, page, *options):
    """The browser over a page: its stdout, and what the page said on the console."""
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [
                browser,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--enable-logging=stderr",
                f"--user-data-dir={profile}",
                *options,
                page.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
    if done.returncode:
        sys.exit(f"{browser} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout, re.findall(r".*CONSOLE.*", done.stderr)


def probe(browser, page, name):
    """What is laid out in a window, and what is wrong with it."""
    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        probed = Path(folder, "page.html")
        probed.write_text(text.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
        size = "--window-size={},{}".format(*WINDOWS[name])
        dumped, said = browse(browser, probed, size, "--dump-dom")
    reader = _Probe()
    reader.feed(dumped)
    found = reader.found
    if found is None:
        return found, ["the page did not load"]
    wrong = [f"console: {line}" for line in said]
    wrong += [f"no {what}" for what in ("tables", "cells", "drawings") if not found[what]]
    wrong += [f"{found['empty']} drawings of no size"] if found["empty"] else []
    wrong += [f"fetched {name}" for name in found["fetched"] if not name.startswith("data:")]
    wrong += [f"{found['wider']} pixels wider than its window"] if found["wider"] > 0 else []
    wrong += [f"id {name!r} is there twice" for name in found["twice"]]
    return found, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("--browser", default="chromium")
    given = parser.parse_args()
    page, failed = given.page.resolve(), False
    for name in WINDOWS:
        found, wrong = probe(given.browser, page, name)
        print(f"{name}: {json.dumps(found)}")
        for line in wrong:
            failed = True
            print(f"{name}: WRONG: {line}")
    # Tall enough for a whole page, but for the longest.
    for name, width, options in (
        ("wide", 1280, ()),
        ("narrow", 390, ()),
        ("dark", 1280, ("--blink-settings=preferredColorScheme=0",)),
    ):
        shot = page.with_name(f"{name}.png")
        browse(given.browser, page, f"--window-size={width},3600", f"--screenshot={shot}", *options)
        print(f"{name}: {shot}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
