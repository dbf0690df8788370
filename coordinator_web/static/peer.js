// The page of one peer, which the address names.

import { again, get } from "/static/api.js";
import { Chart } from "/static/chart.js";
import { $, element, few, reconcile, say, write } from "/static/dom.js";
import { ago, asOf, bytes, clock, count, day, decimal, hours, percent, rate, reached, tiny } from "/static/format.js";
import { follow, here } from "/static/live.js";

const REFRESH_SECONDS = 2;
const peerId = decodeURIComponent(location.pathname.split("/").at(-1));

function curve(name, label, digits, fromZero) {
  const chart = new Chart($(`${name}-chart`), {
    label,
    empty: "It has reported no epoch yet.",
    describe: (point) => `epoch ${count(point.x)}: ${digits(point.value)}`,
    onLook: (text) => write($(`${name}-readout`), text),
    onRange: (range) => charts.forEach((each) => each.set({ range, looked: null })),
    fromZero,
    smoothed: true,
  });
  return chart;
}

const charts = [
  curve("rate", "Samples per second by epoch", rate, true),
  curve("loss", "Loss on its own data by epoch", (value) => decimal(value, 4), false),
];

function draw({ peer, first_seen: first, history, rounds, contribution }) {
  const trains = peer.role === "trainer";
  write($("peer-role"), peer.me ? `${peer.role}, the one that shows this page` : peer.role);
  write($("peer-name"), peer.name || peer.peer_id.slice(0, 10));
  const now = here.state?.run.now ?? Date.now() / 1000;
  write($("peer-id"), [peer.peer_id, peer.device, reached(peer), asOf(peer, now)].filter(Boolean).join(" · "));
  write($("health"), peer.health);
  document.body.dataset.health = peer.health;
  write($("peer-epoch"), count(peer.epoch));
  write($("peer-drift"), peer.drift === null ? "\u00a0" : `drift ${tiny(peer.drift)}`);
  write($("peer-rate"), trains ? rate(peer.samples_per_second) : "–");
  write($("peer-share"), trains ? percent(peer.share) : "–");
  write($("peer-loss"), trains ? decimal(peer.loss) : "–");
  write($("peer-seen"), peer.me ? "now" : ago(now - peer.last_seen));
  write($("peer-first"), first === null ? "\u00a0" : `first ${day(first)}`);
  say($("trouble"), peer.trouble);
  charts[0].show(history.map((each) => ({ x: each.epoch, value: each.samples_per_second })));
  charts[1].show(history.filter((each) => each.loss !== null).map((each) => ({ x: each.epoch, value: each.loss })));
  drawGiven(contribution);
  drawRounds(rounds);
}

function drawRounds(rounds) {
  $("own-rounds-empty").hidden = rounds.length > 0;
  reconcile($("own-rounds"), few($("own-rounds"), rounds, () => drawRounds(rounds)), (each) => each.id, createRound, () => {});
}

function drawGiven(given) {
  $("given").hidden = given === null;
  if (given === null) return;
  write($("given-samples"), count(given.samples));
  write($("given-hours"), hours(given.hours));
  write($("given-rounds"), count(given.rounds));
  write($("given-bytes"), bytes(given.reduced_bytes));
  write($("given-team"), given.team || "none");
}

function createRound(each) {
  const time = element("td", "time", clock(each.time));
  time.title = day(each.time);
  const out = each.left_out[peerId];
  const part = out !== undefined ? "left out" : each.contributors.includes(peerId) ? "contributed" : "helped";
  return element(
    "tr", "", time,
    element("td", "", each.epoch >= 0 ? count(each.epoch) : "–"),
    element("td", "", each.leader === peerId ? `${part}, led` : part),
    element("td", "", element("span", `badge ${each.outcome}`, each.outcome)),
    element("td", "", element("bdi", "", out ?? each.reason)),
  );
}

again(REFRESH_SECONDS, async () => {
  try {
    draw(await get(`peers/${encodeURIComponent(peerId)}`));
    say($("peer-error"), "");
  } catch (error) {
    say($("peer-error"), error.message);
    if ($("peer-id").textContent === "") write($("peer-name"), peerId.slice(0, 10)); // nothing is known of it
  }
});

follow({});
