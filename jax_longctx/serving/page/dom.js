// Elements and figures. A text becomes a text node always, HTML never.

export const $ = (id) => document.getElementById(id);

// An element: a function among its attributes listens, true and false set and leave out, and
// children are elements or texts.
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== false && value != null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

// For screen readers; what is seen says it already.
export function say(text) {
  $("said").textContent = text;
}

export function warn(error) {
  const text = error?.message ?? "";
  $("alert").textContent = text;
  $("alert").hidden = !text;
}

export const count = (number) => number.toLocaleString("en");

export function bytes(number) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; number >= 1024 && unit < units.length - 1; unit++) number /= 1024;
  return `${unit && number < 10 ? number.toFixed(1) : Math.round(number)} ${units[unit]}`;
}

export function seconds(number) {
  return number < 10 ? `${number.toFixed(number < 1 ? 2 : 1)} s` : `${Math.round(number)} s`;
}

// How long from now until a time in seconds since the epoch.
export function left(until) {
  const minutes = Math.max(0, until - Date.now() / 1000) / 60;
  if (minutes < 1) return "less than a minute";
  if (minutes < 120) return `${Math.floor(minutes)} min`;
  return minutes < 2880 ? `${Math.floor(minutes / 60)} h` : `${Math.floor(minutes / 1440)} days`;
}
