// The page of the run.

import { again, get } from "/static/api.js";
import "/static/copy.js";
import { drawCurves } from "/static/curves.js";
import { $, element, link, say, write } from "/static/dom.js";
import { bytes, clock, count, day, decimal, duration, plural, rate, roughly } from "/static/format.js";
import { follow } from "/static/live.js";
import { pagesOf } from "/static/paging.js";
import { listPeers } from "/static/peers.js";
import { learnNames, named, showFailures, showRounds } from "/static/rounds.js";

const MOST = { rounds: 60, events: 120 };
const SLOWLY_SECONDS = 10; // between two requests for what seldom changes
const view = { rounds: [], events: [], epoch: null };

// ---- how the run stands

function drawState({ run, counts }) {
  write($("run-eta"), run.run_eta_seconds === null || run.state === "finished" ? "" : `about ${roughly(run.run_eta_seconds)} to the last epoch`);
  write($("throughput"), run.rests ? "–" : rate(run.samples_per_second));
  write($("loss"), decimal(run.losses.at(-1) ?? null));
  write($("loss-sub"), run.evaluated ? `on data kept aside, ${run.evaluated}` : "\u00a0");
  write($("peer-sub"), roles(counts) || "\u00a0");
  // a peer has no figures of an epoch whose result it downloaded
  const last = run.last_epoch?.samples > 0 ? run.last_epoch : null;
  write($("last-epoch"), last ? duration(last.seconds) : "–");
  write($("last-epoch-sub"), last ? `${duration(last.averaging_seconds)} of it averaging` : "\u00a0");
  drawProgress(run);
  say($("result"), run.state === "finished" ? run.result : "");
  drawInvite(run);
}

function roles(counts) {
  const present = [[counts.trainers, "trainer"], [counts.auxiliaries, "auxiliary", "auxiliaries"], [counts.monitors, "monitor"]];
  const words = present.filter(([number]) => number > 0).map((each) => plural(...each));
  if (counts.paused > 0) words.push(`${count(counts.paused)} of them paused`);
  if (counts.following > 0) words.push(`${count(counts.following)} of them computing nothing`);
  return words.join(", ");
}

function drawProgress(run) {
  const done = run.state === "finished";
  const part = done ? 1 : Math.min(1, run.target > 0 ? run.samples / run.target : 0);
  const fill = $("progress-fill");
  // at a new epoch the bar jumps to its start instead of sliding back
  fill.classList.toggle("jump", part < Number(fill.dataset.part ?? 0));
  fill.dataset.part = part;
  fill.style.transform = `scaleX(${part})`;
  const text = `${count(run.samples)} of ${count(run.target)} samples`;
  $("progress").setAttribute("aria-valuenow", Math.round(part * 100));
  $("progress").setAttribute("aria-valuetext", text);
  write($("samples"), done ? "\u00a0" : text);
}

function drawInvite(run) {
  $("invite").hidden = run.join_line === "" || run.state === "finished";
  const first = run.state === "waiting";
  write($("invite-heading"), first && run.epoch === 0 ? "Waiting for the first trainer" : "Let others join");
  $("invite").classList.toggle("prominent", first);
  write($("invite-hint"), run.link !== "" ? "To be typed on a computer that has swarm installed." : "To be typed on a computer that has swarm and the recipe file.");
}

const reloadCurves = drawCurves();

// ---- rounds and events

function drawRounds() {
  $("rounds-empty").hidden = view.rounds.length > 0;
  showRounds(view.rounds.toReversed());
}

const showEvents = pagesOf({
  body: $("events"),
  keyOf: (event) => event.id,
  create(event) {
    const time = element("time", "", clock(event.time));
    time.title = day(event.time);
    const level = event.level === "warning" || event.level === "error" ? [element("span", "level", event.level)] : [];
    return element("li", event.level, time, ...level, element("bdi"));
  },
  update: (node, event) => write(node.lastChild, named(event.text)),
  onTotal(total) { $("events-empty").hidden = total > 0; },
});

// ---- what seldom changes

let checkpoints = [];

const showCheckpoints = pagesOf({
  body: $("checkpoints"),
  keyOf: (each) => each.name,
  create({ name, epoch }) {
    const download = link(`/api/v1/checkpoints/${encodeURIComponent(name)}.tar`, "Download");
    download.setAttribute("download", "");
    download.setAttribute("aria-label", `Download the checkpoint of epoch ${count(epoch)}`);
    return element("li", "", element("span", "name", `Epoch ${count(epoch)}`), download, element("span", "sub"));
  },
  update(node, each) {
    const best = checkpoints.find((other) => other.best);
    // a newer checkpoint that is not evaluated yet may be better
    const open = best && checkpoints.some((other) => other.loss === null && other.epoch > best.epoch);
    const marks = [each.latest ? "newest" : "", each.best ? (open ? "best of those evaluated" : "best") : ""].filter(Boolean).join(", ");
    const loss = each.loss !== null ? `loss ${decimal(each.loss)} on data kept aside` : best ? "not evaluated yet" : "";
    write(node.querySelector(".sub"), [marks, bytes(each.bytes), day(each.time), loss].filter(Boolean).join(" · "));
  },
  onTotal: (total) => say($("checkpoints-empty"), total ? "" : "None at this peer. Where the recipe asks for them, a monitor writes them; without a monitor, a trainer does."),
});

async function lookSlowly() {
  const failures = await get("failures");
  checkpoints = await get("checkpoints");
  showFailures(failures);
  showCheckpoints(checkpoints);
}

// ---- all of it

listPeers();

// Asks for the rows after the last one shown; for the newest ones if none is shown. Returns whether there were any.
async function learn(what, rowsOf = (found) => found) {
  const found = await get(what, { after: view[what].at(-1)?.id, limit: MOST[what] });
  const fresh = rowsOf(found);
  view[what] = [...view[what], ...fresh].slice(-MOST[what]);
  return fresh.length > 0;
}

async function drawNews() {
  const rounds = await learn("rounds", (found) => {
    learnNames(found.names);
    return found.rows;
  });
  if (rounds) drawRounds();
  if (await learn("events")) showEvents(view.events.toReversed());
}

async function draw(state) {
  drawState(state);
  if (view.epoch !== state.run.epoch) reloadCurves();
  view.epoch = state.run.epoch;
  await drawNews().catch(() => {}); // live.js shows a lost connection
}

follow(draw, () => {
  Object.assign(view, { rounds: [], events: [] }); // after a lost connection the page asks for all rows again
  reloadCurves();
});

again(SLOWLY_SECONDS, () => lookSlowly().catch(() => {}));
