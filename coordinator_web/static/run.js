// The page of the run.

import { again, get } from "/static/api.js";
import { copyButtons } from "/static/copy.js";
import { Curves } from "/static/curves.js";
import { $, element, few, link, reconcile, say, write } from "/static/dom.js";
import { bytes, capital, clock, count, day, decimal, duration, percent, plural, rate, roughly } from "/static/format.js";
import { follow, here } from "/static/live.js";
import { listPeers } from "/static/peers.js";
import { learnNames, named, roundsNote, showFailures, showRounds, showStragglers } from "/static/rounds.js";

const MOST_ROUNDS = 60;
const MOST_EVENTS = 120;
const SLOWLY_SECONDS = 10; // between two looks at what seldom changes
const WRITTEN_MS = 1000; // from an evaluation until the loss of its checkpoint is written down

const CODE = document.body.dataset.code; // a picture of the address of /join; none where only this computer can open it
const view = { rounds: [], events: [], epoch: null, evaluated: null };

function merge(old, fresh, most) {
  const known = new Map(old.map((item) => [item.id, item]));
  for (const item of fresh) known.set(item.id, item);
  return Array.from(known.values()).slice(-most);
}

// ---- how the run stands

function drawState({ run, counts }) {
  const { evaluation } = run;
  write($("epoch"), count(run.epoch));
  write($("max-epochs"), run.max_epochs === null ? "" : ` of ${count(run.max_epochs)}`);
  write($("run-eta"), run.run_eta_seconds === null || run.state === "finished" ? "" : `about ${roughly(run.run_eta_seconds)} to the last epoch`);
  write($("state"), capital(run.state_in_words));
  write($("mode"), run.mode);
  write($("throughput"), run.rests ? "–" : rate(run.samples_per_second));
  write($("loss"), decimal(run.losses.at(-1) ?? null));
  if (evaluation) write($("loss-sub"), `${[decimal(evaluation.loss), ...metrics(evaluation)].join(", ")} on data kept aside${evaluation.name && `, by ${evaluation.name}`}${run.best && run.best.loss < evaluation.loss ? `; best ${decimal(run.best.loss)} at epoch ${count(run.best.epoch)}` : ""}`);
  write($("peer-count"), count(counts.alive));
  write($("peer-sub"), roles(counts) || "\u00a0");
  const last = run.last_epoch;
  const timed = last !== null && last.samples > 0; // of one that was taken over nobody knows
  write($("last-epoch"), timed ? duration(last.seconds) : "–");
  write($("last-epoch-sub"), timed ? `${duration(last.averaging_seconds)} of it averaging` : "\u00a0");
  drawProgress(run);
  say($("result"), run.state === "finished" ? run.result : "");
  say($("alarm"), run.alarm);
  say($("waits"), run.waits);
  say($("seat"), run.seat);
  say($("reach"), run.reach);
  say($("notice"), run.notice);
  drawInvite(run);
  drawOwn();
}

// What the task measures beside the loss; its names are a peer's words.
function metrics(evaluation) {
  return Object.entries(evaluation.metrics ?? {}).map(([name, value]) => `${name} ${decimal(value)}`);
}

function roles(counts) {
  const named = [[counts.trainers, "trainer"], [counts.auxiliaries, "auxiliary", "auxiliaries"], [counts.monitors, "monitor"]];
  const words = named.filter(([number]) => number > 0).map((each) => plural(...each));
  if (counts.paused > 0) words.push(`${count(counts.paused)} of them paused`);
  if (counts.following > 0) words.push(`${count(counts.following)} with no part in it`);
  return words.join(", ");
}

function drawProgress(run) {
  const done = run.state === "finished";
  const part = done ? 1 : Math.min(1, run.target > 0 ? run.samples / run.target : 0);
  const fill = $("progress-fill");
  const backwards = part < Number(fill.dataset.part ?? 0);
  fill.classList.toggle("jump", backwards); // a new epoch begins at once, it does not run back
  fill.dataset.part = part;
  fill.style.transform = `scaleX(${part})`;
  const text = `${count(run.samples)} of ${count(run.target)} samples`;
  $("progress").setAttribute("aria-valuenow", Math.round(part * 100));
  $("progress").setAttribute("aria-valuetext", text);
  write($("samples"), done ? "\u00a0" : text);
  write($("eta"), run.left || "\u00a0");
}

function drawInvite(run) {
  $("invite").hidden = run.join_line === "" || run.state === "finished";
  write($("join-line"), run.join_line);
  const first = run.state === "waiting";
  write($("invite-heading"), first && run.epoch === 0 ? "Waiting for the first trainer" : "Join this run");
  $("invite").classList.toggle("prominent", first);
  say($("link-reach"), run.link_reach);
  write($("invite-hint"), run.link !== "" ? "Run this on any computer that has swarm installed." : "Run this on a computer that has swarm and the recipe file.");
  $("qr-toggle").hidden = !CODE;
  const picture = $("qr");
  picture.hidden = !CODE || !(first || $("qr-toggle").getAttribute("aria-expanded") === "true");
  $("invite").classList.toggle("with-code", !picture.hidden);
  if (!picture.hidden && !picture.src) picture.src = CODE;
}

function drawOwn() {
  const { me } = here.state;
  const own = me.totals;
  $("own").hidden = me.role === "monitor"; // it contributes nothing
  const rounds = own.rounds_committed + own.rounds_failed + own.rounds_undecided;
  write($("own-share"), percent(me.share));
  write($("own-samples"), count(Math.max(me.samples, own.own_samples)));
  write($("own-epochs"), count(own.epochs));
  write($("own-rounds"), rounds > own.rounds_committed ? `${count(own.rounds_committed)} of ${count(rounds)}` : count(rounds));
  write($("own-bytes"), `${bytes(own.bytes_sent)}, ${bytes(own.bytes_received)}`);
}

// ---- curves

const curves = new Curves({
  epochFrom(first) {
    if (here.state?.run.evaluation) return; // the loss on data kept aside says more
    write($("loss-sub"), first ? `from ${decimal(first.value)} at epoch ${count(first.epoch)}` : "\u00a0");
  },
});

// ---- rounds and events

function drawRounds() {
  write($("rounds-note"), roundsNote(view.rounds) || "\u00a0");
  $("rounds-empty").hidden = view.rounds.length > 0;
  showStragglers(view.rounds);
  showRounds($("rounds"), few($("rounds"), view.rounds.toReversed(), drawRounds));
}

function drawEvents() {
  $("events-empty").hidden = view.events.length > 0;
  reconcile($("events"), few($("events"), view.events.toReversed(), drawEvents), (event) => event.id, createEvent, (node, event) => write(node.lastChild, named(event.text)));
}

function createEvent(event) {
  const time = element("time", "", clock(event.time));
  time.title = day(event.time);
  const node = element("li", event.level, time, element("bdi"));
  if (event.level === "warning" || event.level === "error") node.insertBefore(element("span", "level", event.level), node.lastChild);
  return node;
}

// ---- what seldom changes

async function lookSlowly() {
  const [failures, checkpoints] = await Promise.all([get("failures"), get("checkpoints")]);
  showFailures(failures);
  drawCheckpoints(checkpoints);
}

function drawCheckpoints(checkpoints) {
  say($("checkpoints-empty"), checkpoints.length ? "" : "None at this peer. Where the recipe asks for them, a monitor writes them, or a trainer where there is none.");
  const best = checkpoints.find((each) => each.best);
  const open = best && checkpoints.some((each) => each.loss === null && each.epoch > best.epoch); // it may be better
  reconcile($("checkpoints"), few($("checkpoints"), checkpoints, () => drawCheckpoints(checkpoints)), (each) => each.name, createCheckpoint, (node, each) => {
    const marks = [each.latest ? "newest" : "", each.best ? (open ? "best of those evaluated" : "best") : ""].filter(Boolean).join(", ");
    const loss = each.loss !== null ? `loss ${decimal(each.loss)} on data kept aside` : best ? "not evaluated yet" : "";
    write(node.querySelector(".sub"), [marks, bytes(each.bytes), day(each.time), loss].filter(Boolean).join(" · "));
  });
}

function createCheckpoint(each) {
  const get_it = link(`/api/v1/checkpoints/${encodeURIComponent(each.name)}.tar`, "Download");
  get_it.setAttribute("download", "");
  get_it.setAttribute("aria-label", `Download the checkpoint of epoch ${count(each.epoch)}`);
  return element("li", "", element("span", "name", `Epoch ${count(each.epoch)}`), get_it, element("span", "sub"));
}

// ---- all of it

const tellTime = listPeers();

follow({
  begin() {
    Object.assign(view, { rounds: [], events: [] }); // all of it comes anew
    curves.reload();
  },
  state(state) {
    tellTime(state.run.now);
    drawState(state);
    if (view.epoch !== state.run.epoch) curves.reload();
    view.epoch = state.run.epoch;
    const evaluated = state.run.evaluation?.epoch ?? null;
    if (view.evaluated !== evaluated) setTimeout(look, WRITTEN_MS);
    view.evaluated = evaluated;
  },
  rounds(data) {
    learnNames(data.names);
    view.rounds = merge(view.rounds, data.rows, MOST_ROUNDS);
    drawRounds();
  },
  events(data) {
    view.events = merge(view.events, data, MOST_EVENTS);
    drawEvents();
  },
});

const look = again(SLOWLY_SECONDS, () => lookSlowly().catch(() => {})); // the connection that is lost is told already

$("qr-toggle").addEventListener("click", () => {
  const shown = $("qr-toggle").getAttribute("aria-expanded") !== "true";
  $("qr-toggle").setAttribute("aria-expanded", String(shown));
  drawInvite(here.state.run);
});

copyButtons();
