// The limits as fields. A field that is not being edited shows what holds now; a change is sent when it is made.

import { $, element, say, write } from "/static/dom.js";

const YES = [["none", "runs"], ["no", "pauses"]];
// Every key of `Limits` (swarmcli/recipe/limits.py), in the order of the page.
const LIMITS = { // key → its name, an example or the choices, what it means
  processor: ["Processor", "no limit, or 50%", "share of the time in which it computes"],
  gpu: ["Graphics card", "no limit, or 50%", "share of the time in which it computes"],
  upload: ["Upload", "no limit, or 2 MB/s", "what is sent to others"],
  download: ["Download", "no limit, or 2 MB/s", "what comes from others"],
  memory: ["Memory", "no limit, or 8 GB, or 50%", "of this computer"],
  disk: ["Disk", "no limit, or 20 GB, or 10%", "for the files of a run"],
  hours: ["Hours", "always, or 22:00-08:00, sat-sun 00:00-24:00", "when it may run; it pauses outside of them"],
  only_when_idle: ["Only when nobody is here", "always, or 5 min", "minutes without keyboard and mouse"],
  temperature: ["Temperature", "no limit, or 80 °C", "pauses when the processor or a graphics card is hotter"],
  on_battery: ["On battery", YES, "when the computer runs on its battery"],
  on_metered: ["On a paid connection", YES, "where you pay for what it carries"],
};

const shown = new Map(); // key → {node, input, part}
const unsent = new Set(); // keys that the user is changing
let last = Promise.resolve(); // changes are sent one after the other, or an older one might arrive last
let waiting = 0;

// `send(key, text)` asks for a limit and resolves to why this trainer's samples cannot count now; "": they can.
export function offerLimits(send) {
  for (const key of Object.keys(LIMITS)) {
    const made = field(key);
    made.input.addEventListener("change", () => {
      unsent.add(key);
      waiting += 1;
      write($("limits-note"), "…");
      last = last.then(() => change(send, key, made.input.value.trim() || "none"));
    });
    shown.set(key, made);
    $("limits").append(made.node);
  }
}

function field(key) {
  const [title, written, help] = LIMITS[key];
  const id = `limit-${key}`;
  const choices = Array.isArray(written) ? written.map(([value, words]) => Object.assign(element("option", "", words), { value })) : null;
  const input = Object.assign(choices ? element("select", "", ...choices) : element("input"), { id });
  if (!choices) Object.assign(input, { type: "text", placeholder: written, autocomplete: "off" });
  input.setAttribute("aria-describedby", `${id}-help`);
  const label = Object.assign(element("label", "", title), { htmlFor: id });
  const about = Object.assign(element("p", "hint", help), { id: `${id}-help` });
  const names = { source: "source", seat: "notice seat", refused: "alarm refused" };
  const part = Object.fromEntries(Object.entries(names).map(([name, classes]) => [name, Object.assign(element("p", classes), { hidden: true })]));
  part.refused.role = "alert";
  return { node: element("div", "limit", label, input, about, part.source, part.seat, part.refused), input, part };
}

// `limits`: key → {value, text, from}. `allowed`: whether the user may change them; if not, only limits that are set
// are shown. `seat`: why the trainer's samples cannot count; when they can again, what a change was said to lead to is
// removed.
export function showLimits(limits, allowed, seat) {
  if (seat === "" && waiting === 0) sayOfSeat("", "");
  for (const part of ["limits-change", "limits-keeping"]) $(part).hidden = !allowed;
  $("limits-none").hidden = allowed || Object.keys(LIMITS).some((key) => (limits[key]?.value ?? null) !== null);
  for (const [key, { node, input, part }] of shown) {
    const { value = null, text = "", from = "" } = limits[key] ?? {};
    node.hidden = limits[key] === undefined || (!allowed && value === null);
    input.disabled = !allowed;
    if (unsent.has(key) || input === document.activeElement) continue;
    input.value = input.matches("select") ? (value === false ? "no" : "none") : value === null ? "" : text;
    say(part.source, from);
  }
}

async function change(send, key, text) {
  try {
    sayOfSeat(key, (await send(key, text)) ?? "");
    refuse(key, "");
    unsent.delete(key);
  } catch (error) {
    refuse(key, error.message); // what was typed stays, to be corrected
  }
  waiting -= 1;
  if (waiting === 0) write($("limits-note"), $("limits").querySelector("[aria-invalid=true]") ? "\u00a0" : "Saved");
}

function sayOfSeat(key, seat) {
  for (const [each, { part }] of shown) say(part.seat, each === key ? seat : "");
}

function refuse(key, why) {
  const { input, part } = shown.get(key);
  input.setAttribute("aria-invalid", String(why !== ""));
  say(part.refused, why);
}
