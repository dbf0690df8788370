// Who has given what.

import { again, get } from "/static/api.js";
import { $, cell, element, link, peerPath, row, say, write } from "/static/dom.js";
import { bytes, count, duration, percent, plural } from "/static/format.js";
import { follow, here } from "/static/live.js";
import { pagesOf } from "/static/paging.js";

const REFRESH_SECONDS = 5;
let people = [];

const show = pagesOf({ body: $("given"), keyOf: (each) => each.peer, create, update });

function draw() {
  const placed = people.map((each) => ({ ...each, place: people.findIndex((other) => other.samples === each.samples) + 1 })); // equals share one
  const wanted = $("given-search").value.trim().toLowerCase();
  const found = placed.filter((each) => `${each.name}\n${each.peer}\n${each.team ?? ""}`.toLowerCase().includes(wanted));
  const none = wanted ? "Nobody is called that." : "Nothing has been noted yet. Monitors keep this list, and trainers that write checkpoints; it appears here when one is there.";
  say($("given-empty"), found.length > 0 ? "" : none);
  write($("given-note"), found.length > 0 ? plural(found.length, "peer") : "\u00a0");
  show(found);
}

function create({ name, peer }) {
  const who = cell("Name", "who");
  who.append(link(peerPath(peer), name || peer.slice(0, 10), "name"), element("span", "tag", "you"), element("span", "sub"));
  return row(cell("Place", "number place"), who, ...["Samples", "Computed", "Rounds", "Added up", "Time there"].map((label) => cell(label, "number")));
}

function update(node, each) {
  const whole = people.reduce((sum, other) => sum + other.samples, 0);
  const [place, who, samples, time, rounds, reduced, there] = node.children;
  const ranked = people.filter((other) => other.samples > 0).length;
  write(place, each.samples > 0 && ranked > 1 ? count(each.place) : "–"); // a peer that is ranked alone has no place
  who.querySelector(".tag").hidden = each.peer !== here.state?.run.peer_id;
  write(who.querySelector(".sub"), each.team ? `team ${each.team}` : each.peer.slice(0, 10));
  write(samples, whole > 0 ? `${count(each.samples)} (${percent(each.samples / whole)})` : count(each.samples));
  write(time, duration(3600 * each.hours));
  write(rounds, count(each.rounds));
  write(reduced, bytes(each.reduced_bytes));
  write(there, duration(each.uptime));
}

again(REFRESH_SECONDS, async () => {
  try {
    people = await get("contributions");
    say($("given-error"), "");
    draw();
  } catch (error) {
    say($("given-error"), error.message);
  }
});
$("given-search").addEventListener("input", draw);

follow();
