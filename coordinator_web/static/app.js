// Follows /api/v1/stream and shows what it says.

import { Chart } from "/static/chart.js";
import { copyButtons } from "/static/copy.js";
import { bytes, clock, count, decimal, duration, percent, plural, rate, roughly } from "/static/format.js";
import { GONE, hiddenPeers, roundsNote, showEvents, showPeers, showRounds, write } from "/static/lists.js";

const MOST_EPOCHS = 1200; // points kept for the curves; beyond that every other one goes
const MOST_ROUNDS = 60;
const MOST_EVENTS = 120;
const SILENCE_MS = 6000; // a stream that says nothing for this long is taken for lost
const RETRY_MS = [500, 1000, 2000, 3000, 5000];

const STATES = {
  waiting: "Waiting for trainers",
  training: "Training",
  averaging: "Averaging",
  synchronizing: "Synchronizing",
  stranded: "Waiting, out of reach",
  finished: "Finished",
};
const ROLES = ["trainer", "auxiliary", "monitor"];

const $ = (id) => document.getElementById(id);
const view = { status: null, peers: new Map(), names: new Map(), epochs: [], rounds: [], events: [], heard: 0 };

// ---- what arrives

function merge(old, fresh, key, most) {
  const known = new Map(old.map((item) => [item[key], item]));
  for (const item of fresh) known.set(item[key], item);
  return Array.from(known.values()).slice(-most);
}

function thin(epochs) {
  if (epochs.length <= MOST_EPOCHS) return epochs;
  return epochs.filter((_, index) => index % 2 === 0 || index === epochs.length - 1);
}

const take = {
  begin() {
    Object.assign(view, { peers: new Map(), epochs: [], rounds: [], events: [] }); // all of it comes anew
  },
  status(data) {
    view.status = data;
    drawStatus();
    drawPeers();
  },
  peers({ changed, gone }) {
    for (const peer of changed) {
      view.peers.set(peer.peer_id, peer);
      view.names.set(peer.peer_id, peer.name); // rounds tell of peers that are gone, too
    }
    for (const id of gone) view.peers.delete(id);
  },
  epochs(data) {
    view.epochs = thin(merge(view.epochs, data, "epoch", Infinity));
    drawEpochs();
  },
  rounds(data) {
    view.rounds = merge(view.rounds, data, "id", MOST_ROUNDS);
    drawRounds();
  },
  events(data) {
    view.events = merge(view.events, data, "id", MOST_EVENTS);
    drawEvents();
  },
};

// ---- what is drawn

const lossChart = new Chart($("loss-chart"), {
  label: "Loss by epoch",
  empty: "The loss appears here after the first epoch.",
  describe: (point) => `epoch ${point.epoch}: ${decimal(point.value, 4)}`,
  onLook: (text) => write($("loss-readout"), text),
  smoothed: true,
});
const rateChart = new Chart($("rate-chart"), {
  label: "Samples per second by epoch, all peers together",
  empty: "The throughput appears here after the first epoch.",
  describe: (point) => `epoch ${point.epoch}: ${rate(point.value)}`,
  onLook: (text) => write($("rate-readout"), text),
  fromZero: true,
});

function drawStatus() {
  const { status } = view;
  document.body.dataset.state = status.state;
  write($("run-id"), status.run_id);
  write($("epoch"), count(status.epoch));
  write($("max-epochs"), status.max_epochs === null ? "" : ` of ${count(status.max_epochs)}`);
  write($("run-eta"), status.run_eta_seconds === null || status.state === "finished" ? "" : `about ${roughly(status.run_eta_seconds)} to the last epoch`);
  write($("state"), STATES[status.state] ?? status.state);
  write($("mode"), status.mode);
  const name = status.name || status.peer_id.slice(0, 10);
  write($("viewer"), name === status.role ? `the ${name}` : `${status.role} ${name}`);
  write($("throughput"), status.state === "finished" ? "–" : rate(status.samples_per_second));
  $("result").hidden = status.state !== "finished" || status.result === "";
  write($("result"), status.result);
  const loss = status.losses.at(-1) ?? null;
  write($("loss"), decimal(loss));
  document.title = `epoch ${status.epoch}${loss === null ? "" : ` · loss ${decimal(loss)}`} · ${status.run_id} · swarm`;
  drawProgress(status);
  $("alarm").hidden = status.alarm === "";
  write($("alarm"), status.alarm);
  $("reach").hidden = status.reach === "";
  write($("reach"), status.reach);
  $("notice").hidden = status.notice === "";
  write($("notice"), status.notice);
  drawInvite(status);
  drawOwn(status.own);
}

function drawProgress(status) {
  const done = status.state === "finished";
  const part = done ? 1 : Math.min(1, status.target > 0 ? status.samples / status.target : 0);
  const fill = $("progress-fill");
  const backwards = part < Number(fill.dataset.part ?? 0);
  fill.classList.toggle("jump", backwards); // a new epoch begins at once, it does not run back
  fill.dataset.part = part;
  fill.style.transform = `scaleX(${part})`;
  const text = `${count(status.samples)} of ${count(status.target)} samples`;
  $("progress").setAttribute("aria-valuenow", Math.round(part * 100));
  $("progress").setAttribute("aria-valuetext", text);
  write($("samples"), done ? "\u00a0" : text);
  write($("eta"), eta(status));
}

function eta(status) {
  switch (status.state) {
    case "finished": return "the run is complete";
    case "averaging": return "averaging with the others…";
    case "synchronizing": return "downloading the state…";
    case "waiting": return "nobody computes yet";
    case "stranded": return "waiting for somebody who can hand over the state…";
  }
  return status.eta_seconds === null ? "\u00a0" : `about ${roughly(status.eta_seconds)} left`;
}

function drawInvite(status) {
  $("invite").hidden = status.join_line === "" || status.state === "finished";
  write($("join-line"), status.join_line);
  const first = status.state === "waiting";
  write($("invite-heading"), first ? "Waiting for the first trainer" : "Join this run");
  $("invite").classList.toggle("prominent", first);
  $("link-reach").hidden = status.link_reach === "";
  write($("link-reach"), status.link_reach);
  const linked = status.link !== "";
  write($("invite-hint"), linked ? "Run this on any computer that has swarm installed." : "Run this on a computer that has swarm and the recipe file.");
  $("qr-toggle").hidden = !linked;
  const picture = $("qr");
  picture.hidden = !linked || !(first || $("qr-toggle").getAttribute("aria-expanded") === "true");
  $("invite").classList.toggle("with-code", !picture.hidden);
  if (!picture.hidden && picture.dataset.link !== status.link) {
    picture.dataset.link = status.link;
    picture.src = `/link.svg?${encodeURIComponent(status.link)}`; // another link, another picture
  }
}

function drawOwn(own) {
  $("own").hidden = own === null;
  if (own === null) return;
  const me = Array.from(view.peers.values()).find((peer) => peer.me);
  const rounds = own.rounds_committed + own.rounds_failed + own.rounds_undecided;
  write($("own-share"), percent(me?.share ?? null));
  write($("own-samples"), count(own.own_samples + (me?.samples ?? 0)));
  write($("own-rate"), rate(me?.samples_per_second ?? 0));
  write($("own-epochs"), count(own.epochs));
  write($("own-rounds"), rounds > own.rounds_committed ? `${count(own.rounds_committed)} of ${count(rounds)}` : count(rounds));
  write($("own-bytes"), `${bytes(own.bytes_sent)}, ${bytes(own.bytes_received)}`);
}

function drawPeers() {
  const rank = (peer) => [peer.me ? 0 : 1, ROLES.indexOf(peer.role) + 1 || 9, peer.name || "\uffff", peer.peer_id];
  const peers = Array.from(view.peers.values()).sort((a, b) => {
    const [left, right] = [rank(a), rank(b)];
    const differing = left.findIndex((value, i) => value !== right[i]);
    return differing < 0 ? 0 : left[differing] < right[differing] ? -1 : 1;
  });
  const { status } = view;
  const here = peers.filter((peer) => !GONE.includes(peer.health));
  write($("peer-count"), count(here.length));
  const parts = ROLES.map((role) => [here.filter((peer) => peer.role === role).length, role, role.replace(/y$/, "ie") + "s"]);
  write($("peer-sub"), parts.filter(([number]) => number > 0).map((part) => plural(...part)).join(", ") || "\u00a0");
  const hidden = hiddenPeers(peers);
  write($("peers-note"), hidden ? `and ${plural(hidden, "more peer")} not listed` : "\u00a0");
  $("peers-empty").hidden = peers.length > 0;
  showPeers($("peers"), peers, status.now);
}

function drawEpochs() {
  const { epochs } = view;
  const points = (rows, value) => rows.map((row) => ({ epoch: row.epoch, value: value(row) }));
  const losses = points(epochs.filter((row) => row.loss !== null), (row) => row.loss);
  const stepped = epochs.filter((row) => row.samples > 0 && row.seconds > 0); // of one that was taken over nobody knows
  lossChart.show(losses);
  rateChart.show(points(stepped, (row) => row.samples / row.seconds));
  const last = stepped.at(-1);
  write($("last-epoch"), last ? duration(last.seconds) : "–");
  write($("last-epoch-sub"), last ? `${duration(last.averaging_seconds)} of it averaging` : "\u00a0");
  write($("loss-sub"), losses.length > 1 ? `from ${decimal(losses[0].value)} at epoch ${losses[0].epoch}` : "\u00a0");
}

function drawRounds() {
  write($("rounds-note"), roundsNote(view.rounds) || "\u00a0");
  $("rounds-empty").hidden = view.rounds.length > 0;
  showRounds($("rounds"), view.rounds.toReversed(), view.names);
}

function drawEvents() {
  $("events-empty").hidden = view.events.length > 0;
  showEvents($("events"), view.events.toReversed());
}

// ---- the connection

let stream = null;
let failures = 0;
let retry = null;

function connect() {
  clearTimeout(retry);
  stream?.close();
  stream = new EventSource("/api/v1/stream");
  view.heard = Date.now();
  for (const [name, handle] of Object.entries(take)) {
    stream.addEventListener(name, (event) => {
      view.heard = Date.now();
      handle(JSON.parse(event.data));
      if (name === "status" && (failures || document.body.dataset.connection !== "live")) connected(); // it comes last
    });
  }
  stream.onerror = () => lose(failures > 0); // a server that restarts in place is back before anyone reads a banner
}

function connected() {
  failures = 0;
  document.body.dataset.connection = "live";
  write($("connection"), "live");
  $("lost").hidden = true;
}

// EventSource tries again by itself after some failures and never after others; here it is always us.
function lose(tell) {
  stream.close();
  clearTimeout(retry);
  retry = setTimeout(connect, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]);
  failures += 1;
  view.heard = Date.now();
  if (!tell) return;
  document.body.dataset.connection = "lost";
  write($("connection"), "not connected");
  const since = view.status ? ` What you see is from ${clock(view.status.now)}.` : "";
  write($("lost"), `The connection to this peer is lost; trying again.${since}`);
  $("lost").hidden = false;
}

setInterval(() => {
  if (Date.now() - view.heard > SILENCE_MS) lose(true);
}, 1000);
window.addEventListener("online", connect);
document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "visible" && document.body.dataset.connection !== "live") connect();
});

// ---- the link as a picture

$("qr-toggle").addEventListener("click", () => {
  const shown = $("qr-toggle").getAttribute("aria-expanded") !== "true";
  $("qr-toggle").setAttribute("aria-expanded", String(shown));
  drawInvite(view.status);
});

copyButtons();
connect();
