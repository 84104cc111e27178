// The text of a context, with marks where answers were read.

import { servers } from "./api.js";
import { $, el, warn } from "./dom.js";

// Characters of one block; the browser lays out those in view alone.
const BLOCK = 4000;
let shown = null;

$("hide-text").addEventListener("click", hideText);

export function hideText() {
  $("text").hidden = true;
  shown = null;
}

// The text as the server has it, which for a PDF is not the file.
export async function fetchText(group) {
  const [own] = servers;
  group.text ??= (await own.get(`v1/contexts/${group.ids[own.url]}/text`)).text;
  return group.text;
}

// Shows a group's text with marks at its sources, and scrolls to the one of number `first`.
export async function showText(group, sources, first = 0) {
  try {
    await fetchText(group);
  } catch (error) {
    warn(error);
    return;
  }
  const found = places(group.text, sources);
  const lost = found.filter((place) => place === null).length;
  $("text-title").textContent = `Text of ${group.name}`;
  $("text-note").textContent = lost ? `${lost} of ${sources.length} passages are not in the text as the server gives it.` : "";
  $("text").hidden = false;
  // The same marks stay where they are.
  if (shown?.group !== group || shown.sources !== sources) {
    $("pages").replaceChildren(...blocks(group.text, found.flatMap((place, number) => (place ? [{ ...place, number }] : []))));
    shown = { group, sources };
  }
  for (const mark of $("pages").querySelectorAll("mark")) mark.classList.toggle("first", mark.dataset.number === String(first));
  const mark = $("pages").querySelector("mark.first");
  if (mark) bring(mark);
  return mark;
}

// Scrolls the text alone; over some frames, because blocks have their heights once they were in view.
function bring(mark, frames = 5) {
  const [pane, place] = [$("pages").getBoundingClientRect(), mark.getBoundingClientRect()];
  $("pages").scrollTop += place.top - pane.top - pane.height / 3;
  if (frames) requestAnimationFrame(() => bring(mark, frames - 1));
}

// Where each source is in the text, in UTF-16 units; null where it is not. Sources count characters.
function places(text, sources) {
  const units = unitsOf(text, sources.flatMap(({ start, end }) => [start, end]));
  return sources.map(({ start, end, text: passage }) => {
    const place = { start: units.get(start), end: units.get(end) };
    if (text.slice(place.start, place.end) === passage) return place;
    const near = text.indexOf(passage, Math.max(0, place.start - BLOCK));
    const at = near < 0 ? text.indexOf(passage) : near;
    return passage && at >= 0 ? { start: at, end: at + passage.length } : null;
  });
}

function unitsOf(text, points) {
  const units = new Map();
  let unit = 0;
  let point = 0;
  for (const wanted of [...points].sort((a, b) => a - b)) {
    for (; point < wanted && unit < text.length; point++) unit += text.codePointAt(unit) > 0xffff ? 2 : 1;
    units.set(wanted, unit);
  }
  return units;
}

// The text in blocks that end with a line where there is one.
function blocks(text, marks) {
  marks.sort((a, b) => a.start - b.start);
  const made = [];
  for (let start = 0; start < text.length; ) {
    const line = text.indexOf("\n", start + BLOCK);
    let end = line >= 0 && line < start + 2 * BLOCK ? line + 1 : Math.min(text.length, start + 2 * BLOCK);
    // Both halves of a character stay together.
    if (end < text.length && text.codePointAt(end - 1) > 0xffff) end++;
    made.push(block(text, start, end, marks));
    start = end;
  }
  return made;
}

function block(text, start, end, marks) {
  const made = el("div", { class: "block" });
  let at = start;
  for (const mark of marks) {
    const from = Math.max(at, mark.start);
    const to = Math.min(end, mark.end);
    if (from >= to) continue;
    made.classList.add("marked");
    made.append(text.slice(at, from), el("mark", { "data-number": mark.number }, text.slice(from, to)));
    at = to;
  }
  made.append(text.slice(at, end));
  return made;
}
