// The page of one peer, which the address names.

import { again, get } from "/static/api.js";
import { Chart } from "/static/chart.js";
import { $, element, fill, say, write } from "/static/dom.js";
import { ago, asOf, clock, count, day, decimal, percent, rate, reached, tiny } from "/static/format.js";
import { follow, here } from "/static/live.js";
import { pagesOf } from "/static/paging.js";

const REFRESH_SECONDS = 2;
const peerId = decodeURIComponent(location.pathname.split("/").at(-1));

const empty = "It has reported no epoch yet.";
const rates = new Chart("rate", { label: "Samples per second by epoch", empty, describe: (point) => `epoch ${count(point.x)}: ${rate(point.value)}` });
const losses = new Chart("loss", { label: "Loss on its own data by epoch", empty, describe: (point) => `epoch ${count(point.x)}: ${decimal(point.value, 4)}`, fromZero: false });

function draw(details) {
  const { peer, first_seen: first, history, rounds, contribution } = details;
  fill(details);
  const trains = peer.role === "trainer";
  write($("peer-role"), peer.me ? `${peer.role}, the one that shows this page` : peer.role);
  write($("peer-name"), peer.name || peer.peer_id.slice(0, 10));
  const now = here.state?.run.now ?? Date.now() / 1000;
  write($("peer-id"), [peer.peer_id, peer.device, peer.version && `swarm ${peer.version}`, reached(peer), asOf(peer, now)].filter(Boolean).join(" · "));
  document.body.dataset.health = peer.health;
  write($("peer-drift"), peer.drift === null ? "\u00a0" : `drift ${tiny(peer.drift)}`);
  write($("peer-rate"), trains ? rate(peer.samples_per_second) : "–");
  write($("peer-share"), trains ? percent(peer.share) : "–");
  write($("peer-loss"), trains ? decimal(peer.loss) : "–");
  write($("peer-seen"), peer.me ? "now" : ago(now - peer.last_seen));
  write($("peer-first"), first === null ? "\u00a0" : `first ${day(first)}`);
  rates.show(history.map((each) => ({ x: each.epoch, value: each.samples_per_second })));
  losses.show(history.filter((each) => each.loss !== null).map((each) => ({ x: each.epoch, value: each.loss })));
  $("given").hidden = contribution === null;
  write($("given-team"), contribution?.team || "none");
  showRounds(rounds);
}

const showRounds = pagesOf({
  body: $("own-rounds"),
  keyOf: (each) => each.id,
  create: createRound,
  onTotal(total) { $("own-rounds-empty").hidden = total > 0; },
});

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
    // the page knows nothing but the address yet
    if ($("peer-id").textContent === "") write($("peer-name"), peerId.slice(0, 10));
  }
});

follow();
