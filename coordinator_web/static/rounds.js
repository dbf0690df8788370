// Averaging rounds, newest first: how the time of each went by, what went wrong, and once it is opened who took part.

import { $, cell, element, link, peerPath, reconcile, row, say, write } from "/static/dom.js";
import { bytes, clock, count, day, duration, plural } from "/static/format.js";

const MOST_MEMBERS = 12; // of a group, that are named
const STAGES = { "looking for group": "look", "awaiting trigger": "wait", "running all-reduce": "reduce" };
const opened = new Set(); // ids of rounds
const names = new Map(); // of peers, by id

export function learnNames(some) {
  for (const [id, name] of Object.entries(some ?? {})) names.set(id, name).set(id.slice(0, 10), name);
}

// A text with names in place of short ids.
export function named(text) {
  return text.replace(/\b[a-z2-7]{10}\b/g, (id) => names.get(id) || id);
}

export function called(peer) {
  return names.get(peer) || peer.slice(0, 10);
}

export function showRounds(parent, rounds) {
  const rows = rounds.flatMap((round) => [
    { round, kind: "" },
    ...(explanation(round) ? [{ round, kind: "why" }] : []),
    ...(opened.has(round.id) ? [{ round, kind: "detail" }] : []),
  ]);
  const longest = scale(rounds);
  const show = () => showRounds(parent, rounds);
  reconcile(parent, rows, (each) => `${each.round.id}${each.kind}`, createRow, (node, each) => updateRow(node, each, longest, show));
}

// Seconds that the whole width of a bar stands for: nine of ten rounds fit, and the slowest are cut off there, such as the
// first one, which waited for the run to begin.
function scale(rounds) {
  const totals = rounds.map((round) => sum(Object.values(round.seconds))).toSorted((a, b) => a - b);
  const at = (share) => totals[Math.max(0, Math.ceil(totals.length * share) - 1)] || 1;
  return Math.min(at(0.9), 4 * at(0.5));
}

// Seconds from when the group was there: while it formed, its members may well have computed.
function took(round) {
  return sum(Object.values(round.seconds)) - (round.round_id ? round.seconds["looking for group"] ?? 0 : 0);
}

function sum(values) {
  return values.reduce((all, each) => all + each, 0);
}

function explanation(round) {
  const left = Object.entries(round.left_out).map(([peer, reason]) => `${called(peer)} left out: ${reason || "no reason given"}`);
  if (left.length > MOST_MEMBERS) left.splice(MOST_MEMBERS, Infinity, `${count(left.length - MOST_MEMBERS)} more left out`);
  const reason = round.reason || (round.outcome === "committed" ? "" : "no reason given");
  return named([reason, ...left].filter(Boolean).join(" · "));
}

function createRow({ round, kind }) {
  if (kind === "why") return underneath("Why", "why", element("bdi"));
  if (kind === "detail") return underneath("Group", "detail", ...detail(round));
  return createRound(round);
}

function underneath(label, className, ...children) {
  const text = cell(label, className);
  text.colSpan = 6;
  text.append(...children);
  const node = row(text);
  node.className = "explanation";
  return node;
}

function detail(round) {
  const stages = Object.entries(round.seconds).map(([stage, seconds]) => `${stage} ${duration(seconds)}`);
  const members = round.members.slice(0, MOST_MEMBERS).map((peer) => {
    const notes = [peer === round.leader ? "led" : "", round.contributors.includes(peer) ? "" : "no tensors"].filter(Boolean).join(", ");
    return [link(peerPath(peer), called(peer)), notes ? ` (${notes})` : ""];
  });
  const group = element("span", "line", members.length ? "" : "No group came about.");
  members.forEach((parts, index) => group.append(index ? ", " : "", ...parts));
  const more = round.members.length - members.length;
  if (more > 0) group.append(`, ${count(more)} more`);
  return stages.length ? [group, element("span", "line", stages.join(" · "))] : [group];
}

function createRound(round) {
  const time = cell("Time", "time");
  const button = element("button", "opener", element("time", "", clock(round.time)));
  button.type = "button";
  time.append(button);
  time.title = day(round.time);
  const outcome = cell("Outcome", "outcome");
  outcome.append(element("span", `badge ${round.outcome}`, round.outcome));
  if (round.purpose.endsWith("_state")) outcome.append(element("span", "what", "states"));
  const spent = cell("Stages", "spent");
  const bar = element("span", "stages");
  bar.setAttribute("aria-hidden", "true"); // the same in words, once the round is opened
  spent.append(bar, element("span", "took", duration(took(round))));
  const all = round.contributors.length === round.members.length;
  const node = row(
    time,
    outcome,
    cell("Epoch", "number", round.epoch >= 0 ? count(round.epoch) : "–"),
    spent,
    cell("Peers", "number", all ? plural(round.members.length, "member") : `${count(round.contributors.length)} contributed, ${plural(round.members.length, "member")}`),
    cell("Sent, received", "number", `${bytes(round.bytes_sent)}, ${bytes(round.bytes_received)}`),
  );
  node.title = `${round.purpose}, led by ${round.leader ? called(round.leader) : "nobody"}`;
  return node;
}

function drawStages(bar, round, longest) {
  let left = 1; // of the width
  const parts = Object.entries(round.seconds).map(([stage, seconds]) => {
    const share = Math.min(left, seconds / longest);
    left -= share;
    return { stage, seconds, share };
  });
  reconcile(bar, parts, (part) => part.stage, ({ stage }) => element("span", STAGES[stage] ?? "other"), (node, { stage, seconds, share }) => {
    node.style.width = `${(share * 100).toFixed(2)}%`;
    node.title = `${stage} ${duration(seconds)}`;
  });
}

function updateRow(node, { round, kind }, longest, show) {
  const open = opened.has(round.id);
  if (kind === "why") {
    node.classList.toggle("explained", open);
    write(node.querySelector("bdi"), explanation(round)); // a name may have come after the round
  }
  if (kind) return;
  drawStages(node.querySelector(".stages"), round, longest);
  node.classList.toggle("explained", open || explanation(round) !== "");
  const button = node.querySelector(".opener");
  button.setAttribute("aria-expanded", String(open));
  button.setAttribute("aria-label", `${clock(round.time)}: who took part and how long it took`);
  node.onclick = () => {
    if (!opened.delete(round.id)) opened.add(round.id);
    show();
  };
}

export function roundsNote(rounds) {
  const failed = rounds.filter((round) => round.outcome !== "committed").length;
  if (rounds.length === 0) return "";
  return failed ? `${failed} of the last ${rounds.length} did not succeed` : `the last ${plural(rounds.length, "round")} all succeeded`;
}

// ---- whom rounds went on without, and why rounds failed

export function showStragglers(rounds) {
  const found = new Map();
  for (const { members, left_out: left } of rounds) {
    for (const peer of new Set([...members, ...Object.keys(left)])) {
      const each = found.get(peer) ?? { peer, rounds: 0, times: 0, reason: "" };
      found.set(peer, { ...each, rounds: each.rounds + 1, times: each.times + (peer in left), reason: left[peer] ?? each.reason });
    }
  }
  const shown = Array.from(found.values()).filter(({ times }) => times > 0).toSorted((a, b) => b.times - a.times).slice(0, 10);
  $("stragglers-part").hidden = shown.length === 0;
  reconcile($("stragglers"), shown, (each) => each.peer, createStraggler, (node, each) => {
    write(node.querySelector(".times"), `left out of ${count(each.times)} of its ${plural(each.rounds, "last round")}`);
    write(node.querySelector(".why"), named(each.reason));
  });
}

function createStraggler({ peer }) {
  return element("li", "", link(peerPath(peer), called(peer)), " ", element("span", "times"), element("bdi", "why"));
}

export function showFailures(failures) {
  say($("failures-empty"), failures.length ? "" : "No round has failed, and none went on without somebody.");
  reconcile($("failures"), failures, (each) => `${each.what} ${each.reason}`, createFailure, (node, each) => {
    write(node.querySelector(".times"), `${count(each.count)}×`);
    write(node.querySelector(".why"), named(each.example || each.reason));
    write(node.querySelector(".last"), `${each.what === "round" ? "round failed" : "went on without a peer"}, last at ${clock(each.last)}`);
    node.querySelector(".last").title = `first ${day(each.first)}, last ${day(each.last)}`;
  });
}

function createFailure() {
  return element("li", "", element("span", "times"), element("bdi", "why"), element("span", "last"));
}
