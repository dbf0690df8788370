// Who has given what: the people, or their teams.

import { again, get } from "/static/api.js";
import { $, cell, element, peerPath, row, say, write } from "/static/dom.js";
import { bytes, count, duration, percent, plural } from "/static/format.js";
import { follow, here } from "/static/live.js";
import { pagesOf } from "/static/paging.js";

const REFRESH_SECONDS = 5;
const SUMS = ["samples", "hours", "rounds", "reduced_bytes", "uptime"];
let people = [];

const chosen = () => document.querySelector("[name=by]:checked").value;
const sum = (rows, key) => rows.reduce((all, each) => all + each[key], 0);

function teams() {
  const named = Object.entries(Object.groupBy(people.filter((each) => each.team), (each) => each.team));
  return named.map(([team, those]) => ({ peer: `team ${team}`, name: team, members: those.length, ...Object.fromEntries(SUMS.map((key) => [key, sum(those, key)])) }));
}

const show = pagesOf({ body: $("given"), keyOf: (each) => each.peer, create, update });

function draw() {
  const rows = (chosen() === "team" ? teams() : people).toSorted((a, b) => b.samples - a.samples);
  const placed = rows.map((each) => ({ ...each, place: rows.findIndex((other) => other.samples === each.samples) + 1 })); // equals share one
  const wanted = $("given-search").value.trim().toLowerCase();
  const found = placed.filter((each) => `${each.name}\n${each.peer}\n${each.team ?? ""}`.toLowerCase().includes(wanted));
  const none = wanted ? "Nobody is called that." : chosen() === "team" ? "Nobody has named a team. `swarm join --team NAME` does." : "Nothing has been noted yet. Monitors keep this list, and trainers that write checkpoints; it appears here when one is there.";
  say($("given-empty"), found.length > 0 ? "" : none);
  write($("given-note"), found.length > 0 ? plural(found.length, chosen() === "team" ? "team" : "peer") : "\u00a0");
  show(found);
}

function create({ members, name, peer }) {
  const who = cell("Name", "who");
  const called = element(members === undefined ? "a" : "span", "name", element("bdi", "", name || peer.slice(0, 10)));
  if (members === undefined) called.href = peerPath(peer);
  who.append(called, element("span", "tag", "you"), element("span", "sub"));
  return row(cell("Place", "number place"), who, ...["Samples", "Computed", "Rounds", "Reduced", "There"].map((label) => cell(label, "number")));
}

function update(node, each) {
  const whole = sum(people, "samples");
  const [place, who, samples, time, rounds, reduced, there] = node.children;
  write(place, each.samples > 0 ? count(each.place) : "–");
  who.querySelector(".tag").hidden = each.peer !== here.state?.me.peer_id;
  write(who.querySelector(".sub"), each.members !== undefined ? plural(each.members, "peer") : each.team ? `team ${each.team}` : each.peer.slice(0, 10));
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
for (const choice of document.querySelectorAll("[name=by]")) choice.addEventListener("change", draw);

follow();
