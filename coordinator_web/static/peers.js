// The list of peers: a page of it at a time, in the order that the reader chose.

import { again, get } from "/static/api.js";
import { $, cell, element, peerPath, row, say, write } from "/static/dom.js";
import { ago, asOf, count, decimal, percent, plural, rate, reached, tiny } from "/static/format.js";
import { here } from "/static/live.js";
import { Pages } from "/static/paging.js";

// a peer in one of these states adds no samples at this moment
const IDLE = ["not answering", "left", "lost", "line too slow", "catching up"];
const REFRESH_SECONDS = 1;
// a first click on one of these columns puts the greatest value first
const FIRST_DOWN = ["epoch", "rate", "share", "last_seen"];
const FEW = 12; // with no more peers than this the page shows no search field

const asked = { sort: "", q: "" };

export function listPeers() {
  const list = new Pages({
    body: $("peers"),
    load: (offset, limit) => get("peers", { offset, limit, ...asked }),
    keyOf: (peer) => peer.peer_id,
    create: createPeer,
    update: updatePeer,
    onTotal: tellTotal,
  });
  $("peers-search").addEventListener("input", () => {
    asked.q = $("peers-search").value;
    list.restart();
  });
  for (const button of document.querySelectorAll("#peers-table .sort")) {
    button.addEventListener("click", () => {
      sortBy(button);
      list.restart();
    });
  }
  again(REFRESH_SECONDS, () => list.refresh().catch((error) => write($("peers-note"), error.message)));
}

function sortBy(button) {
  const key = button.dataset.sort;
  const first = FIRST_DOWN.includes(key) ? `-${key}` : key;
  const other = first === key ? `-${key}` : key;
  asked.sort = asked.sort === first ? other : asked.sort === other ? "" : first;
  for (const head of document.querySelectorAll("#peers-table th")) head.removeAttribute("aria-sort");
  if (asked.sort) button.closest("th").setAttribute("aria-sort", asked.sort.startsWith("-") ? "descending" : "ascending");
}

function tellTotal(total) {
  const searched = asked.q.trim() !== "";
  say($("peers-empty"), total > 0 ? "" : searched ? "No peer has that name, role, device or state." : "Nobody is here yet.");
  write($("peers-note"), searched ? `${plural(total, "peer")} found` : total > FEW ? plural(total, "peer") : "");
  $("peers-find").hidden = total <= FEW && !searched;
}

function createPeer() {
  const who = cell("Peer", "who");
  who.append(element("a", "name", element("bdi")), element("span", "tag", "this one"), element("span", "sub"));
  const epoch = cell("Epoch", "epoch");
  epoch.append(element("span", "value"), element("span", "health"));
  return row(who, cell("Role", "role"), epoch, ...["Samples/s rate", "Share share", "Loss loss", "Drift drift"].map((each) => cell(each.split(" ")[0], `number ${each.split(" ")[1]}`)), cell("Last seen", "number seen"));
}

function updatePeer(node, peer) {
  const at = (selector) => node.querySelector(selector);
  const short = peer.peer_id.slice(0, 10);
  const now = here.state?.run.now ?? peer.last_seen;
  node.dataset.health = peer.health;
  write(at(".name bdi"), peer.name || short);
  at(".name").href = peerPath(peer.peer_id);
  at(".who").title = peer.peer_id;
  at(".tag").hidden = !peer.me;
  const details = [peer.name && peer.name !== short ? short : "", peer.device, reached(peer), asOf(peer, now)];
  write(at(".who .sub"), details.filter(Boolean).join(" · "));
  write(at(".role"), peer.role);
  write(at(".epoch .value"), count(peer.epoch));
  write(at(".health"), peer.health);
  at(".health").title = peer.health === "line too slow" ? "it follows the run: its samples cannot count" : peer.trouble;
  const computes = peer.role === "trainer";
  write(at(".rate"), computes && !IDLE.includes(peer.health) ? rate(peer.samples_per_second) : "–");
  write(at(".share"), computes ? percent(peer.share) : "–");
  write(at(".loss"), computes && peer.health !== "line too slow" ? decimal(peer.loss) : "–");
  write(at(".drift"), tiny(peer.drift));
  write(at(".seen"), peer.me ? "now" : ago(now - peer.last_seen));
}
