// All peers of this user on this computer.

import { again } from "/static/api.js";
import { send } from "/static/control.js";
import { $, element, reconcile, say, write } from "/static/dom.js";
import { moment } from "/static/format.js";
import { follow } from "/static/live.js";

const REFRESH_SECONDS = 3;

function create(peer) {
  const name = element(peer.url && !peer.me ? "a" : "span", "name", element("bdi"));
  if (peer.url && !peer.me) name.href = peer.url;
  return element("li", "", element("p", "who", name, element("span", "tag", "this one"), element("span", "role")), element("p", "doing"), element("p", "hint"));
}

function update(node, peer) {
  write(node.querySelector("bdi"), peer.run_id);
  node.querySelector(".tag").hidden = !peer.me;
  write(node.querySelector(".role"), ` ${peer.role}${peer.name && peer.name !== peer.role ? ` ${peer.name}` : ""}`);
  write(node.querySelector(".doing"), peer.sentence || "does not answer; it may still be joining");
  write(node.querySelector(".hint"), [`since ${moment(peer.started)}`, peer.home, `process ${peer.pid}`].filter(Boolean).join(" · "));
}

again(REFRESH_SECONDS, async () => {
  try {
    const peers = await send("GET", "machine");
    say($("machine-error"), "");
    $("machine-empty").hidden = peers.length > 0;
    reconcile($("machine"), peers, (peer) => peer.pid, create, update);
  } catch (error) {
    say($("machine-error"), error.message);
  }
});

follow();
