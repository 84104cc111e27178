// Texts: those that are being read, and those that were, which the servers call contexts.
//
// A group is one text as the page knows it: its name, its context's id at each server (`ids`, by
// address), and, unless the page was loaded anew, what was read.

import { servers } from "./api.js";
import { $, bytes, count, el, left, say, seconds, warn } from "./dom.js";
import { fetchText, hideText } from "./text.js";

// By the id at this page's own server.
const groups = new Map(JSON.parse(sessionStorage.getItem("texts") ?? "[]"));
// Ids of what is being read here, until it is a group.
const pending = new Set();
let chosen = null;
let choose = () => {};

// `told` is called when another text, or none, is chosen.
export function onChoice(told) {
  choose = told;
}

export const chosenGroup = () => groups.get(chosen);

// Reads documents, or a pasted text, into these servers.
export async function add(given, into) {
  const group = { name: given.name ?? given.files.map((file) => file.name).join(", "), ids: {}, took: {}, ...given };
  warn(null);
  const stop = new AbortController();
  const cancel = el("button", { type: "button", "aria-label": `Cancel reading ${group.name}`, click: () => stop.abort() }, "Cancel");
  const row = el("li", {}, el("span", { class: "name" }, group.name), cancel);
  $("reading").append(row);
  say(`Reading ${group.name}`);
  const ended = await Promise.allSettled(into.map((server) => read(group, server, row, stop.signal)));
  row.remove();
  const failed = ended.find((each) => each.status === "rejected");
  if (stop.signal.aborted) say(`Reading of ${group.name} was cancelled`);
  else if (failed) warn(failed.reason);
  const id = group.ids[servers[0].url];
  if (id) {
    keep(id, group);
    if (!failed) say(`${group.name} was read`);
    chosen = id;
  }
  pending.delete(group.reading);
  await refresh();
}

// Reads a group into one server, with a line of progress in `row`.
export async function read(group, server, row, signal) {
  const bar = el("progress", { "aria-label": `Reading ${group.name} with ${server.method}` });
  const note = el("span", { class: "facts" }, "being sent");
  const line = el("div", { class: "progress" }, el("span", {}, server.method), bar, note);
  row.append(line);
  const begun = performance.now();
  try {
    if (!group.files && !group.text) await fetchText(group);
    for await (const record of server.read(group, $("ttl").valueAsNumber * 60, signal)) {
      if (server === servers[0]) pending.add((group.reading = record.id));
      const took = (performance.now() - begun) / 1000;
      bar.max = record.tokens;
      bar.value = record.tokens_read;
      const speed = count(Math.round(record.tokens_read / took));
      note.textContent = `${count(record.tokens_read)} of ${count(record.tokens)} tokens, ${speed} a second`;
      if (record.object === "context") {
        group.ids[server.url] = record.id;
        group.took[server.url] = took;
      }
    }
  } finally {
    line.remove();
  }
}

export function keep(id, group) {
  groups.set(id, group);
  const kept = [...groups].map(([key, { name, ids, took }]) => [key, { name, ids, took }]);
  sessionStorage.setItem("texts", JSON.stringify(kept));
}

// Shows the contexts that the own server has now.
export async function refresh() {
  const [own] = servers;
  const before = [...groups.keys()];
  const listed = (await own.get("v1/contexts")).data.filter(({ id }) => !pending.has(id));
  const ids = new Set(listed.map(({ id }) => id));
  for (const row of [...$("contexts").children]) if (!ids.has(row.dataset.id)) row.remove();
  for (const id of before) if (!ids.has(id)) groups.delete(id);
  for (const record of listed) {
    if (!groups.has(record.id)) groups.set(record.id, { name: record.id, ids: { [own.url]: record.id }, took: {} });
    const group = groups.get(record.id);
    const row = [...$("contexts").children].find((each) => each.dataset.id === record.id) ?? newRow(record.id, group);
    row.querySelector(".facts").textContent = facts(record, group.took[own.url]);
  }
  $("none").hidden = listed.length > 0;
  if (!ids.has(chosen)) chosen = null;
  for (const radio of $("contexts").querySelectorAll("input")) radio.checked = radio.value === chosen;
  choose();
}

function facts(record, took) {
  const place = { ready: `${bytes(record.bytes)} in memory`, saved: "on the disk" }[record.state];
  const reading = `being read, ${count(record.tokens_read)} so far`;
  const parts = [`${count(record.tokens)} tokens`, place ?? reading];
  if (took) parts.push(`read in ${seconds(took)}`);
  if (record.expires_at !== null) parts.push(`${left(record.expires_at)} to live`);
  parts.push(...record.notes);
  return parts.join(" · ");
}

function newRow(id, group) {
  const pick = () => {
    chosen = id;
    hideText();
    choose();
  };
  const radio = el("input", { type: "radio", name: "context", id: `of-${id}`, value: id, change: pick });
  const label = el("label", { for: `of-${id}` }, el("span", { class: "name" }, group.name), el("span", { class: "facts" }));
  const row = el("li", { "data-id": id }, radio, label, deleteButton(id, group));
  $("contexts").append(row);
  return row;
}

// Pressed twice: others may use the same text.
function deleteButton(id, group) {
  const button = el("button", { type: "button", "aria-label": `Delete ${group.name}` }, "Delete");
  button.addEventListener("blur", () => (button.textContent = "Delete"));
  button.addEventListener("click", async () => {
    if (button.textContent === "Delete") {
      button.textContent = "Really?";
      say(`Press again to delete ${group.name}`);
      return;
    }
    button.disabled = true;
    try {
      const gone = servers.filter((server) => groups.get(id).ids[server.url]);
      for (const server of gone) await remove(server, groups.get(id).ids[server.url]);
      if (chosen === id) hideText();
      say(`${group.name} was deleted`);
      await refresh();
      $("files").focus();
    } catch (error) {
      button.disabled = false;
      warn(error);
    }
  });
  return button;
}

async function remove(server, id) {
  try {
    await server.fetch(`v1/contexts/${id}`, { method: "DELETE" });
  } catch (error) {
    // Its time was over already.
    if (error.status !== 404) throw error;
  }
}
