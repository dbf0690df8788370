// The limits as sliders, switches and fields. What is not touched shows what holds now; a change is sent when it is made.

import { $, element, say, write } from "/static/dom.js";
import { size } from "/static/format.js";

// Steps of a slider; the last one is no limit.
const RATES = [5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7, 2e7, 5e7, 1e8, null];
const SHARES = [0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, null];
const SIZES = [1e9, 2e9, 4e9, 6e9, 8e9, 12e9, 16e9, 24e9, 32e9, 48e9, 64e9, null];
const DISKS = [1e9, 2e9, 5e9, 1e10, 2e10, 5e10, 1e11, 2e11, 5e11, null];
const DEGREES = [50, 55, 60, 65, 70, 75, 80, 85, 90, 95, null];
const MINUTES = [1, 2, 5, 10, 15, 30, 60, null];

const asRate = (value) => `${size(value)}/s`;
const asShare = (value) => `${Math.round(value * 100)}%`;
const asAmount = (value) => (value <= 1 ? asShare(value) : size(value));

const LIMITS = [
  { key: "processor", title: "Processor", steps: SHARES, text: asShare, help: "share of the time in which it computes" },
  { key: "gpu", title: "Graphics card", steps: SHARES, text: asShare, help: "share of the time in which it computes" },
  { key: "upload", title: "Upload", steps: RATES, text: asRate, help: "what is sent to others" },
  { key: "download", title: "Download", steps: RATES, text: asRate, help: "what comes from others" },
  { key: "memory", title: "Memory", steps: SIZES, text: asAmount, help: "of this computer" },
  { key: "disk", title: "Disk", steps: DISKS, text: asAmount, help: "for the files of a run" },
  { key: "temperature", title: "Temperature", steps: DEGREES, text: (value) => `${value} °C`, help: "pauses when the processor or a graphics card is hotter" },
  { key: "only_when_idle", title: "Only when nobody is here", steps: MINUTES, text: (value) => `${value} min`, none: "always", help: "minutes without keyboard and mouse" },
  { key: "on_battery", title: "On battery", choices: [["none", "runs"], ["no", "pauses"]], help: "when the computer runs on its battery" },
  { key: "on_metered", title: "On a paid connection", choices: [["none", "runs"], ["no", "pauses"]], help: "where the network counts what it carries" },
  { key: "hours", title: "Hours", field: "text", placeholder: "always, or 22:00-08:00, sat-sun 00:00-24:00", help: "when it may run; it pauses outside of them" },
];

let send = null;
const shown = new Map(); // key → {set, node}
const unsent = new Set(); // keys that the reader is changing

// `change(key, text)` asks for a limit and resolves to why this trainer's samples cannot count now; "": they can.
export function offerLimits(change) {
  send = change;
  for (const limit of LIMITS) {
    const made = limit.steps ? slider(limit) : limit.choices ? choice(limit) : field(limit);
    shown.set(limit.key, made);
    $("limits").append(made.node);
  }
}

// `limits`: key → {value, text, from}. `allowed`: to change them; null: not known yet. Who may not is shown those that
// are set, as words. `seat`: why its samples cannot count, and what one of them was said to lead to.
export function showLimits(limits, allowed, seat) {
  if (seat === "" && waiting === 0) sayOfSeat("", "");
  const looks = allowed === false;
  for (const part of ["limits-change", "limits-keeping"]) $(part).hidden = looks;
  $("limits-none").hidden = !looks || LIMITS.some(({ key }) => (limits[key]?.value ?? null) !== null);
  for (const { key } of LIMITS) {
    const limit = limits[key];
    const { node, set, input } = shown.get(key);
    node.hidden = limit === undefined || (looks && limit.value === null);
    input.disabled = allowed !== true;
    input.hidden = looks;
    if (limit === undefined || unsent.has(key) || input === document.activeElement && input.matches("[type=text], [type=number]")) continue;
    set(limit.value ?? null, limit.text ?? "");
    say(node.querySelector(".source"), limit.from ?? "");
    const told = node.querySelector(".told");
    if (told) say(told, looks ? input.selectedOptions?.[0].text ?? limit.text : "");
  }
}

let last = Promise.resolve(); // changes go one after the other, or an older one might arrive last
let waiting = 0;

function changed(key, text) {
  unsent.add(key);
  write($("limits-note"), "…");
  waiting += 1;
  last = last.then(() => change(key, text));
}

async function change(key, text) {
  try {
    const seat = await send(key, text);
    sayOfSeat(key, seat ?? "");
    refused(key, "");
    unsent.delete(key);
  } catch (error) {
    refused(key, error.message);
    // What was typed stays, to be put right; a slider goes back to what holds.
    if (!shown.get(key).typed) unsent.delete(key);
  }
  waiting -= 1;
  if (waiting === 0) write($("limits-note"), $("limits").querySelector("[aria-invalid=true]") ? "\u00a0" : "Saved");
}

function sayOfSeat(key, seat) {
  for (const [each, { node }] of shown) say(node.querySelector(".seat"), each === key ? seat : "");
}

function refused(key, why) {
  const { node, input } = shown.get(key);
  input.setAttribute("aria-invalid", String(why !== ""));
  say(node.querySelector(".refused"), why);
}

function frame({ key, title, help }, input, ...more) {
  input.id = `limit-${key}`;
  const label = element("label", "", title);
  label.htmlFor = input.id;
  const about = element("p", "hint", help);
  about.id = `${input.id}-help`;
  input.setAttribute("aria-describedby", about.id);
  const source = element("p", "source");
  source.hidden = true;
  const seat = element("p", "notice seat");
  seat.hidden = true;
  const why = element("p", "alarm refused");
  why.role = "alert";
  why.hidden = true;
  return element("div", "limit", label, ...more, input, about, source, seat, why);
}

function slider({ steps, text, none = "no limit", ...limit }) {
  const input = element("input");
  Object.assign(input, { type: "range", min: 0, step: 1, value: steps.length - 1, max: steps.length - 1 });
  const value = element("output", "value");
  let here = steps; // with a value of its own where what holds is none of the steps
  const show = () => {
    const step = here[Number(input.value)];
    const words = step === null ? none : text(step);
    write(value, words);
    input.setAttribute("aria-valuetext", words);
  };
  const set = (wanted) => {
    here = steps.includes(wanted) ? steps : [...steps.slice(0, -1), wanted].toSorted((a, b) => a - b).concat(null);
    input.max = here.length - 1;
    input.value = here.indexOf(wanted);
    show();
  };
  input.addEventListener("input", () => {
    unsent.add(limit.key);
    show();
  });
  input.addEventListener("change", () => {
    const step = here[Number(input.value)];
    changed(limit.key, step === null ? "none" : text(step));
  });
  const node = frame(limit, input, value);
  value.setAttribute("for", input.id);
  return { node, input, set };
}

// What a field or a choice says in words, as the value beside a slider does.
function inWords() {
  const told = element("p", "value told");
  told.hidden = true;
  return told;
}

function choice({ choices, ...limit }) {
  const input = element("select");
  for (const [value, words] of choices) {
    const option = element("option", "", words);
    option.value = value;
    input.append(option);
  }
  input.addEventListener("change", () => changed(limit.key, input.value));
  const set = (value) => { input.value = value === false ? "no" : "none"; };
  return { node: frame(limit, input, inWords()), input, set };
}

function field({ field: type, placeholder, ...limit }) {
  const input = element("input");
  Object.assign(input, { type, placeholder, autocomplete: "off" });
  if (type === "number") Object.assign(input, { min: 1, max: 4096, step: 1 });
  input.addEventListener("change", () => changed(limit.key, input.value.trim() || "none"));
  const set = (value) => { input.value = value === null ? "" : type === "number" ? String(value) : value; };
  return { node: frame(limit, input, inWords()), input, set, typed: true };
}

