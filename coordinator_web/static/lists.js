// The peers, rounds and events. Whatever a peer chose (names, reasons) becomes text nodes and nothing else.

import { ago, bytes, clock, count, day, decimal, duration, percent, plural, rate } from "/static/format.js";

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
  return row(who, cell("Role", "role"), epoch, cell("Samples/s", "number rate"), share, cell("Loss", "number loss"), cell("Last seen", "number seen"));
}

function updatePeer(node, peer, now) {
  const at = (selector) => node.querySelector(selector);
  node.dataset.health = peer.health;
  write(at(".name"), peer.name || peer.short_id);
  at(".who").title = peer.peer_id;
  at(".tag").hidden = !peer.me;
  const details = [peer.name && peer.name !== peer.short_id ? peer.short_id : "", peer.device, peer.client_mode ? "behind a firewall" : ""];
  write(at(".who .sub"), details.filter(Boolean).join(" · "));
  write(at(".role"), peer.role);
  write(at(".epoch .value"), count(peer.epoch));
  write(at(".health"), peer.health);
  at(".health").title = peer.trouble;
  const computes = peer.role === "trainer";
  write(at(".rate"), computes ? rate(peer.samples_per_second) : "–");
  write(at(".share .value"), computes ? percent(peer.share) : "–");
  at(".meter").hidden = !computes;
  at(".meter span").style.transform = `scaleX(${computes ? Math.min(1, peer.share ?? 0) : 0})`;
  write(at(".loss"), computes ? decimal(peer.loss) : "–");
  write(at(".seen"), peer.me ? "now" : ago(now - peer.last_seen));
}

export function hiddenPeers(peers) {
  return Math.max(0, peers.length - MOST_PEERS);
}

// ---- rounds, newest first; what went wrong stands in a row of its own under the round

export function showRounds(parent, rounds) {
  const rows = rounds.flatMap((round) => (explanation(round) ? [{ round }, { round, why: explanation(round) }] : [{ round }]));
  reconcile(parent, rows, (each) => `${each.round.id}${each.why ? "why" : ""}`, createRound, () => {});
}

function explanation(round) {
  const left = round.left_out.map((peer) => `${peer.name} left out: ${peer.reason || "no reason given"}`);
  return [round.outcome === "committed" ? "" : round.reason || "no reason given", ...left].filter(Boolean).join(" · ");
}

function createRound({ round, why }) {
  if (why) {
    const text = cell("Why", "why");
    text.colSpan = 6;
    text.append(element("bdi", "", why));
    const node = row(text);
    node.className = "explanation";
    return node;
  }
  const time = cell("Time", "time");
  time.append(element("time", "", clock(round.time)));
  time.title = day(round.time);
  const outcome = cell("Outcome", "outcome");
  outcome.append(element("span", `badge ${round.outcome}`, round.outcome));
  const numbers = [
    ["Epoch", round.epoch >= 0 ? count(round.epoch) : "–"],
    ["Took", duration(round.seconds)],
    ["Peers", round.contributors === round.members ? count(round.members) : `${count(round.contributors)} contributed, ${plural(round.members, "member")}`],
    ["Sent, received", `${bytes(round.bytes_sent)}, ${bytes(round.bytes_received)}`],
  ];
  const node = row(time, outcome, ...numbers.map(([label, text]) => {
    const each = cell(label, "number");
    each.textContent = text;
    return each;
  }));
  node.title = `${round.purpose}, led by ${round.leader || "nobody"}`;
  if (explanation(round)) node.className = "explained";
  return node;
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
