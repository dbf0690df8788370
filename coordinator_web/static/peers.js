// The list of peers: a page of it at a time, in the order that the reader chose.

import { again, get } from "/static/api.js";
import { $, cell, element, peerPath, row, say, write } from "/static/dom.js";
import { ago, asOf, count, decimal, percent, plural, rate, reached, tiny } from "/static/format.js";
import { WindowedRows } from "/static/windowed.js";

const IDLE = ["not answering", "left", "lost", "link too slow", "catching up"]; // they add nothing at this moment
const REFRESH_SECONDS = 1;
const FIRST_DOWN = ["epoch", "rate", "share", "last_seen"]; // of these the greatest comes first

const asked = { sort: "", q: "" };
let now = 0;

export function listPeers() {
  const list = new WindowedRows({
    scroller: $("peers-scroll"),
    body: $("peers"),
    load: (offset, limit) => get("peers", { offset, limit, ...asked }),
    keyOf: (peer) => peer.peer_id,
    create: createPeer,
    update: updatePeer,
    onTotal: tellTotal,
    onError: (error) => write($("peers-note"), error.message),
  });
  $("peers-search").addEventListener("input", () => {
    asked.q = $("peers-search").value;
    list.restart();
  });
  for (const button of document.querySelectorAll("#peers-table .sort")) button.addEventListener("click", () => sortBy(button, list));
  again(REFRESH_SECONDS, () => list.refresh());
  return (moment) => { now = moment; };
}

function sortBy(button, list) {
  const key = button.dataset.sort;
  const first = FIRST_DOWN.includes(key) ? `-${key}` : key;
  const other = first === key ? `-${key}` : key;
  asked.sort = asked.sort === first ? other : asked.sort === other ? "" : first;
  for (const head of document.querySelectorAll("#peers-table th")) {
    const mine = head.contains(button) && asked.sort !== "";
    if (mine) head.setAttribute("aria-sort", asked.sort.startsWith("-") ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  }
  list.restart();
}

function tellTotal(total) {
  const searched = asked.q.trim() !== "";
  say($("peers-empty"), total > 0 ? "" : searched ? "No peer is called or doing that." : "Nobody is here yet.");
  write($("peers-note"), searched ? plural(total, "peer") + " found" : total > 12 ? plural(total, "peer") : "");
  $("peers-find").hidden = total <= 12 && !searched;
}

function createPeer() {
  const who = cell("Peer", "who");
  who.append(element("a", "name", element("bdi")), element("span", "tag", "this one"), element("span", "sub"));
  const epoch = cell("Epoch", "epoch");
  epoch.append(element("span", "value"), element("span", "health"));
  const share = cell("Share", "share");
  const meter = element("span", "meter", element("span"));
  meter.setAttribute("aria-hidden", "true");
  share.append(meter, element("span", "value"));
  return row(who, cell("Role", "role"), epoch, cell("Samples/s", "number rate"), share, cell("Loss", "number loss"), cell("Drift", "number drift"), cell("Last seen", "number seen"));
}

function updatePeer(node, peer) {
  const at = (selector) => node.querySelector(selector);
  node.dataset.health = peer.health;
  write(at(".name bdi"), peer.name || short(peer));
  at(".name").href = peerPath(peer.peer_id);
  at(".who").title = peer.peer_id;
  at(".tag").hidden = !peer.me;
  const details = [peer.name && peer.name !== short(peer) ? short(peer) : "", peer.device, reached(peer), asOf(peer, now)];
  write(at(".who .sub"), details.filter(Boolean).join(" · "));
  write(at(".role"), peer.role);
  write(at(".epoch .value"), count(peer.epoch));
  write(at(".health"), peer.health);
  at(".health").title = peer.health === "link too slow" ? "it follows the run: its samples cannot count" : peer.trouble;
  const computes = peer.role === "trainer";
  write(at(".rate"), computes && !IDLE.includes(peer.health) ? rate(peer.samples_per_second) : "–");
  write(at(".share .value"), computes ? percent(peer.share) : "–");
  at(".meter").hidden = !computes;
  at(".meter span").style.transform = `scaleX(${computes ? Math.min(1, peer.share ?? 0) : 0})`;
  write(at(".loss"), computes && peer.health !== "link too slow" ? decimal(peer.loss) : "–");
  write(at(".drift"), tiny(peer.drift));
  write(at(".seen"), peer.me ? "now" : ago(now - peer.last_seen));
}

function short(peer) {
  return peer.peer_id.slice(0, 10);
}

