// The page: what the servers are, and what the forms do.

import { ask } from "./answers.js";
import { Server, servers } from "./api.js";
import { add, chosenGroup, onChoice, refresh } from "./documents.js";
import { $, bytes, el, warn } from "./dom.js";
import { showText } from "./text.js";

const EVERY = 5000;
const own = new URL(".", document.baseURI).href;
const others = document.querySelector("meta[name=beside]").content.split(" ").filter(Boolean);
servers.push(...[own, ...others.map((url) => `${url}/`)].map((url) => new Server(url)));
let asking = null;

// Those that read and answer now: the own server, and what was ticked.
function active() {
  return servers.filter((server, number) => !number || $(`with-${number}`)?.checked);
}

async function meet() {
  const lines = await Promise.all(servers.map(introduced));
  $("servers").replaceChildren(...lines);
  const boxes = servers.slice(1).map((server, number) => {
    const name = `with-${number + 1}`;
    const box = el("input", { type: "checkbox", id: name, disabled: !server.entry, checked: $(name)?.checked });
    return el("label", { for: name }, box, ` ${server.method} of ${server.url}`);
  });
  $("beside").replaceChildren($("beside").querySelector("legend"), ...boxes);
  $("beside").hidden = !boxes.length;
  if (servers[0].entry) await update();
}

async function introduced(server) {
  const line = el("li", {});
  try {
    await server.meet();
  } catch (error) {
    if (error.status === 401) showKeys(true);
    warn(error);
    line.append(`${server.url}: ${error.message}`);
    return line;
  }
  const settings = Object.entries(server.entry.method?.settings ?? {}).filter(([, value]) => value !== null);
  line.append(el("strong", {}, server.method), ` · ${server.entry.id} `, el("span", { class: "memory" }));
  if (settings.length) {
    const text = settings.map(([name, value]) => `${name} ${value}`).join(", ");
    line.append(el("details", {}, el("summary", {}, "Settings"), text));
  }
  return line;
}

// Contexts and memory as they are now.
async function update() {
  try {
    await refresh();
    for (const [number, server] of servers.entries()) {
      if (!server.entry) continue;
      const { all, texts } = await server.memory();
      const place = $("servers").children[number]?.querySelector(".memory");
      if (place) place.textContent = `· ${bytes(all)} of memory, ${bytes(texts)} for texts`;
    }
  } catch (error) {
    if (error.status === 401) showKeys(true);
    warn(error);
  }
}

function showKeys(open) {
  $("keys").hidden = !open;
  $("show-keys").setAttribute("aria-expanded", open);
  if (open && !$("keys").childElementCount) {
    const fields = servers.map((server, number) =>
      el("label", { for: `key-${number}` }, `API key of ${server.url} `, el("input", { id: `key-${number}`, type: "password", autocomplete: "off" })),
    );
    $("keys").append(...fields, el("button", {}, "Use"));
  }
  for (const [number, server] of servers.entries()) if (open) $(`key-${number}`).value = server.key;
}

$("show-keys").addEventListener("click", () => {
  showKeys($("keys").hidden);
  if (!$("keys").hidden) $("key-0").focus();
});

$("keys").addEventListener("submit", (event) => {
  event.preventDefault();
  warn(null);
  for (const [number, server] of servers.entries()) server.key = $(`key-${number}`).value.trim();
  showKeys(false);
  meet();
});

function readFiles(given) {
  const files = [...given];
  if (files.length) add({ files }, active()).catch(warn);
}

$("files").addEventListener("change", () => {
  readFiles($("files").files);
  // The same files may be chosen again.
  $("files").value = "";
});

$("paste").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("pasted").value;
  const [line] = text.trim().split("\n");
  add({ text, name: line.length > 40 ? `${line.slice(0, 40)}…` : line || "pasted text" }, active()).catch(warn);
  $("paste").reset();
});

for (const kind of ["dragenter", "dragover", "dragleave", "drop"]) {
  addEventListener(kind, (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    $("drop").classList.toggle("over", kind === "dragenter" || kind === "dragover");
    if (kind !== "drop") return;
    const folder = [...event.dataTransfer.items].find((item) => item.webkitGetAsEntry?.()?.isDirectory);
    if (folder) warn(new Error("a folder cannot be read here; drop the files in it, or zip it"));
    else readFiles(event.dataTransfer.files);
  });
}

onChoice(() => {
  const group = chosenGroup();
  $("about").textContent = group ? group.name : "a text: choose one first";
  $("send").disabled = !group || asking !== null;
  $("show-text").disabled = !group;
});

$("show-text").addEventListener("click", () => showText(chosenGroup(), []));

$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const [group, question] = [chosenGroup(), $("question").value];
  if (!group || asking || !question.trim()) return;
  warn(null);
  asking = new AbortController();
  $("send").disabled = true;
  $("cancel").hidden = false;
  const how = {};
  if ($("longest").value) how.max_tokens = $("longest").valueAsNumber;
  if ($("temperature").value) how.temperature = $("temperature").valueAsNumber;
  await ask(group, question, how, active(), asking.signal).catch(warn);
  asking = null;
  $("cancel").hidden = true;
  $("send").disabled = !chosenGroup();
  update();
});

$("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});

$("cancel").addEventListener("click", () => asking?.abort());
addEventListener("keydown", (event) => event.key === "Escape" && asking?.abort());
setInterval(() => !document.hidden && servers[0].entry && update(), EVERY);
meet();
