// Questions and their answers, a column for each server.

import { servers } from "./api.js";
import { keep, read } from "./documents.js";
import { $, bytes, count, el, say, seconds, warn } from "./dom.js";
import { showText } from "./text.js";

// Asks the servers about a group's text; ends when all have answered.
export async function ask(group, question, how, active, signal) {
  const columns = el("div", { class: "columns" });
  const about = el("p", { class: "facts" }, `about ${group.name}`);
  $("answers").prepend(el("article", { "aria-label": question }, el("h3", {}, question), about, columns));
  say("Asked");
  await Promise.all(active.map((server) => answered(group, question, how, server, signal, columns)));
  say(signal.aborted ? "Cancelled" : "Answered");
}

async function answered(group, question, how, server, signal, columns) {
  const answer = el("p", { class: "answer", "aria-live": "polite", "aria-busy": "true" });
  const figures = el("p", { class: "figures facts" });
  const column = el("section", { "aria-label": `Answer under ${server.method}` }, el("h4", {}, server.method), answer, figures);
  columns.append(column);
  const told = { begun: performance.now(), first: null, last: null, usage: null, finish: null, sources: null };
  try {
    if (!group.ids[server.url]) {
      await read(group, server, column, signal);
      keep(group.ids[servers[0].url], group);
      told.begun = performance.now();
    }
    const body = { ...how, context: group.ids[server.url], messages: [{ role: "user", content: question }] };
    for await (const chunk of server.ask(body, signal)) take(chunk, told, answer);
    figures.textContent = await figuresOf(told, group, server);
    column.append(sourcesOf(told.sources, group, server));
  } catch (error) {
    figures.textContent = signal.aborted ? "Cancelled." : `Failed: ${error.message}`;
    column.classList.toggle("failed", !signal.aborted);
    // The other server may have forgotten the text: the next question has it read again.
    if (error.param === "context" && server !== servers[0]) delete group.ids[server.url];
  } finally {
    answer.normalize();
    answer.setAttribute("aria-busy", "false");
  }
}

function take(chunk, told, answer) {
  told.usage = chunk.usage ?? told.usage;
  const [choice] = chunk.choices;
  if (!choice) return;
  const text = choice.delta?.content;
  if (text) {
    told.last = performance.now();
    told.first ??= told.last;
    answer.append(text);
  }
  told.finish = choice.finish_reason ?? told.finish;
  told.sources = choice.sources ?? told.sources;
}

// Speed and memory of an answer.
async function figuresOf({ begun, first, last, usage, finish }, group, server) {
  const parts = [];
  if (first !== null) parts.push(`first words after ${seconds((first - begun) / 1000)}`);
  const tokens = usage?.completion_tokens ?? 0;
  if (last > first && tokens > 1) parts.push(`${((tokens - 1) / ((last - first) / 1000)).toFixed(1)} tokens a second`);
  parts.push(`${count(tokens)} tokens`);
  if (finish === "length") parts.push("cut at the longest answer");
  const known = usage?.prompt_tokens_details?.cached_tokens;
  if (usage) parts.push(`${count(known ?? 0)} of ${count(usage.prompt_tokens)} tokens were read before`);
  const record = await server.get(`v1/contexts/${group.ids[server.url]}`).catch(() => null);
  if (record?.bytes) parts.push(`the text takes ${bytes(record.bytes)}`);
  return parts.join(" · ");
}

// Where the answer was read, as buttons that show the place.
function sourcesOf(sources, group, server) {
  if (!sources) return el("p", { class: "facts" }, "The server did not tell where it read the answer.");
  const listed = sources.map(({ document, page, score, text }, number) => {
    const place = [document, page !== null && `page ${page}`].filter(Boolean).join(", ");
    const show = async () => (await showText(group, sources, number)) && $("pages").focus();
    return el(
      "li",
      {},
      el("button", { type: "button", class: "source", click: show }, place || `passage ${number + 1}`),
      el("span", { class: "facts" }, ` ${Number(score).toFixed(2)} `),
      el("q", {}, text.length > 160 ? `${text.slice(0, 160)}…` : text),
    );
  });
  if (sources.length && server === servers[0]) showText(group, sources).catch(warn);
  return el("div", {}, el("h5", {}, "Read most at"), el("ol", { class: "sources" }, ...listed));
}
