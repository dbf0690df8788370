// Averaging rounds, newest first. One that the reader opens also shows its members and its stages. Below them stands
// what went wrong.

import { $, cell, element, link, peerPath, reconcile, row, say, write } from "/static/dom.js";
import { bytes, clock, count, day, duration, plural } from "/static/format.js";
import { pagesOf } from "/static/paging.js";

const MOST_MEMBERS = 12; // members of a group that the page names; it counts the rest
const opened = new Set(); // ids of the rounds that the reader has opened
const names = new Map(); // names of peers, by id and by its first ten characters

export function learnNames(some) {
  for (const [id, name] of Object.entries(some ?? {})) names.set(id, name).set(id.slice(0, 10), name);
}

// Returns the text with peers' names in place of their short ids.
export function named(text) {
  return text.replace(/\b[a-z2-7]{10}\b/g, (id) => names.get(id) || id);
}

const called = (peer) => names.get(peer) || peer.slice(0, 10);

// Seconds since the group formed, since its members may have computed until then. Where no group formed: the seconds of
// looking for one.
function took(round) {
  const all = Object.values(round.seconds).reduce((sum, each) => sum + each, 0);
  return all - (round.round_id ? round.seconds["looking for group"] ?? 0 : 0);
}

function explanation(round) {
  const left = Object.entries(round.left_out).map(([peer, reason]) => `${called(peer)} left out: ${reason || "no reason given"}`);
  if (left.length > MOST_MEMBERS) left.splice(MOST_MEMBERS, Infinity, `${count(left.length - MOST_MEMBERS)} more left out`);
  const reason = round.reason || (round.outcome === "committed" ? "" : "no reason given");
  return named([reason, ...left].filter(Boolean).join(" · "));
}

const pages = pagesOf({ body: $("rounds"), keyOf: ({ round, below }) => `${round.id}${below}`, create, update, expand });
let shown = [];

export function showRounds(rounds) {
  shown = rounds;
  return pages(rounds);
}

// Adds a second row below each round that has something to explain, such as a failure, and below each that the reader
// has opened.
function expand(rounds) {
  return rounds.flatMap((round) => [{ round, below: "" }, ...(opened.has(round.id) || explanation(round) ? [{ round, below: "below" }] : [])]);
}

function create({ round, below }) {
  if (!below) return createRound(round);
  const text = cell("Why", "below", "");
  text.colSpan = 6;
  text.append(element("bdi", "why"), element("span", "detail", ...detail(round)));
  const node = row(text);
  node.className = "explanation";
  return node;
}

function detail(round) {
  const group = element("span", "line", round.members.length ? "" : "No group came about.");
  round.members.slice(0, MOST_MEMBERS).forEach((peer, index) => {
    const notes = [peer === round.leader ? "led" : "", round.contributors.includes(peer) ? "" : "no tensors"].filter(Boolean).join(", ");
    group.append(index ? ", " : "", link(peerPath(peer), called(peer)), notes ? ` (${notes})` : "");
  });
  const more = round.members.length - MOST_MEMBERS;
  if (more > 0) group.append(`, ${count(more)} more`);
  const stages = Object.entries(round.seconds).map(([stage, seconds]) => `${stage} ${duration(seconds)}`).join(" · ");
  return [group, element("span", "line", stages)];
}

function createRound(round) {
  const opener = element("button", "opener", element("time", "", clock(round.time)));
  opener.type = "button";
  opener.setAttribute("aria-label", `${clock(round.time)}: who took part and how long it took`);
  const time = cell("Time", "time");
  time.append(opener);
  time.title = day(round.time);
  const outcome = cell("Outcome", "outcome");
  outcome.append(element("span", `badge ${round.outcome}`, round.outcome));
  if (round.purpose.endsWith("_state")) outcome.append(element("span", "what", "states"));
  const [members, gave] = [round.members.length, round.contributors.length];
  const node = row(
    time,
    outcome,
    cell("At epoch", "number", round.epoch >= 0 ? count(round.epoch) : "–"),
    cell("Took", "number", duration(took(round))),
    cell("Peers", "number", gave === members ? plural(members, "member") : `${count(gave)} contributed, ${plural(members, "member")}`),
    cell("Sent, received", "number", `${bytes(round.bytes_sent)}, ${bytes(round.bytes_received)}`),
  );
  node.addEventListener("click", () => {
    if (!opened.delete(round.id)) opened.add(round.id);
    pages(shown);
  });
  return node;
}

function update(node, { round, below }) {
  const open = opened.has(round.id);
  if (below) {
    write(node.querySelector(".why"), explanation(round)); // a peer's name may arrive after the round
    node.querySelector(".detail").hidden = !open;
    return;
  }
  node.classList.toggle("explained", open || explanation(round) !== "");
  node.querySelector(".opener").setAttribute("aria-expanded", String(open));
}

export function showFailures(failures) {
  say($("failures-empty"), failures.length ? "" : "No round has failed, and none went on without a peer.");
  const made = () => element("li", "", element("span", "times"), element("bdi", "why"), element("span", "last"));
  reconcile($("failures"), failures, (each) => `${each.what} ${each.reason}`, made, (node, each) => {
    write(node.querySelector(".times"), `${count(each.count)}×`);
    write(node.querySelector(".why"), named(each.example || each.reason));
    write(node.querySelector(".last"), `${each.what === "round" ? "round failed" : "went on without a peer"}, last at ${clock(each.last)}`);
    node.querySelector(".last").title = `first ${day(each.first)}, last ${day(each.last)}`;
  });
}
