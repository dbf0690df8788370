// The peers, rounds and events. Whatever a peer chose (names, reasons) becomes text nodes and nothing else.

import { ago, bytes, clock, count, day, decimal, duration, percent, plural, rate, tiny } from "/static/format.js";

export const GONE = ["not answering", "left", "lost"]; // they add nothing at this moment
const MOST_PEERS = 200; // rows of peers that are drawn; the heading tells of the others

export function element(tag, className = "", ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

// Sets a text only when it changed, so that a selection in it survives.
export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Makes the children of `parent` show `items`, in order; keeps the nodes of items that stay.
function reconcile(parent, items, keyOf, create, update) {
  const old = new Map(Array.from(parent.children, (node) => [node.dataset.key, node]));
  items.forEach((item, index) => {
    const key = String(keyOf(item));
    let node = old.get(key);
    if (node === undefined) {
      node = create(item);
      node.dataset.key = key;
    }
    old.delete(key);
    update(node, item);
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] ?? null);
  });
  for (const node of old.values()) node.remove();
}

function cell(label, className = "") {
  const node = element("td", className);
  node.setAttribute("role", "cell");
  node.dataset.label = label;
  return node;
}

function row(...cells) {
  const node = element("tr", "", ...cells);
  node.setAttribute("role", "row");
  return node;
}

// ---- peers

export function showPeers(parent, peers, now) {
  reconcile(parent, peers.slice(0, MOST_PEERS), (peer) => peer.peer_id, createPeer, (node, peer) => updatePeer(node, peer, now));
}

function createPeer() {
  const who = cell("Peer", "who");
  who.append(element("bdi", "name"), element("span", "tag", "this one"), element("span", "sub"));
  const epoch = cell("Epoch", "epoch");
  epoch.append(element("span", "value"), element("span", "health"));
  const share = cell("Share", "share");
  const meter = element("span", "meter", element("span"));
  meter.setAttribute("aria-hidden", "true");
  share.append(meter, element("span", "value"));
  return row(who, cell("Role", "role"), epoch, cell("Samples/s", "number rate"), share, cell("Loss", "number loss"), cell("Drift", "number drift"), cell("Last seen", "number seen"));
}

function updatePeer(node, peer, now) {
  const at = (selector) => node.querySelector(selector);
  node.dataset.health = peer.health;
  write(at(".name"), peer.name || short(peer));
  at(".who").title = peer.peer_id;
  at(".tag").hidden = !peer.me;
  const details = [peer.name && peer.name !== short(peer) ? short(peer) : "", peer.device, peer.client_mode ? "behind a firewall" : ""];
  write(at(".who .sub"), details.filter(Boolean).join(" · "));
  write(at(".role"), peer.role);
  write(at(".epoch .value"), count(peer.epoch));
  write(at(".health"), peer.health);
  at(".health").title = peer.trouble;
  const computes = peer.role === "trainer";
  write(at(".rate"), computes && !GONE.includes(peer.health) ? rate(peer.samples_per_second) : "–");
  write(at(".share .value"), computes ? percent(peer.share) : "–");
  at(".meter").hidden = !computes;
  at(".meter span").style.transform = `scaleX(${computes ? Math.min(1, peer.share ?? 0) : 0})`;
  write(at(".loss"), computes ? decimal(peer.loss) : "–");
  write(at(".drift"), tiny(peer.drift));
  write(at(".seen"), peer.me ? "now" : ago(now - peer.last_seen));
}

function short(peer) {
  return peer.peer_id.slice(0, 10);
}

export function hiddenPeers(peers) {
  return Math.max(0, peers.length - MOST_PEERS);
}

// ---- rounds, newest first; what went wrong stands under the round, and who and how long once it is opened

const MOST_MEMBERS = 12; // of a group, that are named
const opened = new Set(); // ids of rounds

// `names`: of peers, by id.
export function showRounds(parent, rounds, names) {
  const called = (peer) => names.get(peer) || peer.slice(0, 10);
  const rows = rounds.flatMap((round) => [
    { round, kind: "" },
    ...(explanation(round, called) ? [{ round, kind: "why" }] : []),
    ...(opened.has(round.id) ? [{ round, kind: "detail" }] : []),
  ]);
  const show = () => showRounds(parent, rounds, names);
  reconcile(parent, rows, (each) => `${each.round.id}${each.kind}`, (each) => createRow(each, called), (node, each) => updateRow(node, each, called, show));
}

function explanation(round, called) {
  const left = Object.entries(round.left_out).map(([peer, reason]) => `${called(peer)} left out: ${reason || "no reason given"}`);
  const reason = round.reason || (round.outcome === "committed" ? "" : "no reason given");
  return [reason, ...left].filter(Boolean).join(" · ");
}

function createRow({ round, kind }, called) {
  if (kind === "why") return underneath("Why", "why", element("bdi"));
  if (kind === "detail") return underneath("Group", "detail", ...detail(round, called));
  return createRound(round, called);
}

function underneath(label, className, ...children) {
  const text = cell(label, className);
  text.colSpan = 6;
  text.append(...children);
  const node = row(text);
  node.className = "explanation";
  return node;
}

// From when the group was there; of a round that found none, the seconds of looking for one.
function took(round) {
  const all = Object.values(round.seconds).reduce((sum, each) => sum + each, 0);
  return all - (round.round_id ? (round.seconds["looking for group"] ?? 0) : 0);
}

function detail(round, called) {
  const stages = Object.entries(round.seconds).map(([stage, seconds]) => `${stage} ${duration(seconds)}`);
  const names = round.members.slice(0, MOST_MEMBERS).map((peer) => {
    const notes = [peer === round.leader ? "led" : "", round.contributors.includes(peer) ? "" : "no tensors"].filter(Boolean).join(", ");
    return element("bdi", "", notes ? `${called(peer)} (${notes})` : called(peer));
  });
  const more = round.members.length - names.length;
  if (more > 0) names.push(`${count(more)} more`);
  const group = element("span", "line", names.length ? "" : "No group came about.");
  names.forEach((name, index) => group.append(index ? ", " : "", name));
  return stages.length ? [group, element("span", "line", stages.join(" · "))] : [group];
}

function createRound(round, called) {
  const time = cell("Time", "time");
  const button = element("button", "opener", element("time", "", clock(round.time)));
  button.type = "button";
  time.append(button);
  time.title = day(round.time);
  const outcome = cell("Outcome", "outcome");
  outcome.append(element("span", `badge ${round.outcome}`, round.outcome));
  if (round.purpose.endsWith("_state")) outcome.append(element("span", "what", "states"));
  const numbers = [
    ["Epoch", round.epoch >= 0 ? count(round.epoch) : "–"],
    ["Took", duration(took(round))],
    ["Peers", round.contributors.length === round.members.length ? count(round.members.length) : `${count(round.contributors.length)} contributed, ${plural(round.members.length, "member")}`],
    ["Sent, received", `${bytes(round.bytes_sent)}, ${bytes(round.bytes_received)}`],
  ];
  const node = row(time, outcome, ...numbers.map(([label, text]) => {
    const each = cell(label, "number");
    each.textContent = text;
    return each;
  }));
  node.title = `${round.purpose}, led by ${round.leader ? called(round.leader) : "nobody"}`;
  return node;
}

function updateRow(node, { round, kind }, called, show) {
  const open = opened.has(round.id);
  if (kind === "why") {
    node.classList.toggle("explained", open);
    write(node.querySelector("bdi"), explanation(round, called)); // a name may have come after the round
  }
  if (kind) return;
  node.classList.toggle("explained", open || explanation(round, called) !== "");
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

// ---- events, newest first

export function showEvents(parent, events) {
  reconcile(parent, events, (event) => event.id, createEvent, () => {});
}

function createEvent(event) {
  const time = element("time", "", clock(event.time));
  time.title = day(event.time);
  const node = element("li", event.level, time, element("bdi", "", event.text));
  if (event.level === "warning" || event.level === "error") node.insertBefore(element("span", "level", event.level), node.lastChild);
  return node;
}
