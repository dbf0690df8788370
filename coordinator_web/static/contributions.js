// Who has given what: the people, or their teams.

import { again, get } from "/static/api.js";
import { $, cell, element, peerPath, row, say, write } from "/static/dom.js";
import { bytes, count, duration, hours, percent, plural } from "/static/format.js";
import { follow, here } from "/static/live.js";
import { WindowedRows } from "/static/windowed.js";

const REFRESH_SECONDS = 5;
const SUMS = ["samples", "hours", "rounds", "reduced_bytes", "uptime"];
const view = { people: [], by: "peer", query: "" };

function teams(people) {
  const found = new Map();
  for (const each of people) {
    if (!each.team) continue;
    const team = found.get(each.team) ?? { peer: `team ${each.team}`, name: each.team, members: 0, ...Object.fromEntries(SUMS.map((key) => [key, 0])) };
    for (const key of SUMS) team[key] += each[key];
    team.members += 1;
    found.set(each.team, team);
  }
  return Array.from(found.values());
}

// Equals share a place.
function ranked(rows) {
  const sorted = rows.toSorted((a, b) => b.samples - a.samples);
  let place = 0;
  return sorted.map((each, index) => {
    if (index === 0 || each.samples < sorted[index - 1].samples) place = index + 1;
    return { ...each, place };
  });
}

function shown() {
  const all = ranked(view.by === "team" ? teams(view.people) : view.people);
  const wanted = view.query.trim().toLowerCase();
  return wanted ? all.filter((each) => `${each.name}\n${each.peer}\n${each.team ?? ""}`.toLowerCase().includes(wanted)) : all;
}

function create(each) {
  const who = cell("Name", "who");
  const isTeam = each.members !== undefined;
  const name = element(isTeam ? "span" : "a", "name", element("bdi", "", each.name || each.peer.slice(0, 10)));
  if (!isTeam) name.href = peerPath(each.peer);
  who.append(name, element("span", "tag", "you"), element("span", "sub"));
  return row(cell("Place", "number place"), who, ...["Samples", "Computed", "Rounds", "Reduced", "There"].map((label) => cell(label, "number")));
}

function update(node, each) {
  const whole = view.people.reduce((sum, one) => sum + one.samples, 0);
  const isTeam = each.members !== undefined;
  const mine = each.peer === here.state?.me.peer_id;
  const [place, , samples, time, rounds, reduced, there] = node.children;
  write(place, each.samples > 0 ? count(each.place) : "–");
  node.querySelector(".tag").hidden = !mine;
  write(node.querySelector(".sub"), isTeam ? plural(each.members, "peer") : each.team ? `team ${each.team}` : each.peer.slice(0, 10));
  write(samples, whole > 0 ? `${count(each.samples)} (${percent(each.samples / whole)})` : count(each.samples));
  write(time, hours(each.hours));
  write(rounds, count(each.rounds));
  write(reduced, bytes(each.reduced_bytes));
  write(there, duration(each.uptime));
}

const list = new WindowedRows({
  scroller: $("given-scroll"),
  body: $("given"),
  load: async (offset, limit) => {
    const all = shown();
    return { total: all.length, rows: all.slice(offset, offset + limit) };
  },
  keyOf: (each) => each.peer,
  create,
  update,
  onTotal(total) {
    const none = view.query.trim() ? "Nobody is called that." : view.by === "team" ? "Nobody has named a team. `swarm join --team NAME` does." : "Nothing has been noted yet. Monitors keep this list, and trainers that write checkpoints; it appears here when one is there.";
    say($("given-empty"), total > 0 ? "" : none);
    write($("given-note"), total > 0 ? plural(total, view.by === "team" ? "team" : "peer") : "\u00a0");
  },
  onError: (error) => say($("given-error"), error.message),
});

again(REFRESH_SECONDS, async () => {
  try {
    view.people = await get("contributions");
    say($("given-error"), "");
    await list.refresh();
  } catch (error) {
    say($("given-error"), error.message);
  }
});

$("given-search").addEventListener("input", () => {
  view.query = $("given-search").value;
  list.restart();
});
for (const choice of document.querySelectorAll("[name=by]")) {
  choice.addEventListener("change", () => {
    view.by = choice.value;
    list.restart();
  });
}

follow({ state: ({ me }) => say($("given-word"), me.rests_on) });
