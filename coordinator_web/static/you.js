// The page of a volunteer: what this computer does, and the controls to have it do less, more or nothing.

import { again, get, NEEDS_TOKEN } from "/static/api.js";
import { Chart } from "/static/chart.js";
import { send } from "/static/control.js";
import { $, say, write } from "/static/dom.js";
import { capital, count, moment, plural, rate, roughly } from "/static/format.js";
import { offerLimits, showLimits } from "/static/limits.js";
import { follow, here } from "/static/live.js";

const HISTORY_SECONDS = 5; // between two requests for this peer's history

let allowed = false; // whether this page may change something
let seen = false; // whether a state has arrived
let busy = false; // whether a request to change something is under way
let answer = null; // the activity in the peer's last answer; the next state may have been taken before the change

// ---- what it does

function draw({ run, me, can_control: may }) {
  allowed = may;
  if (!seen) lookBack(); // lookBack needs a state, and this is the first
  seen = true;
  if (answer !== null) me.activity = answer;
  answer = null;
  drawActivity(me);
  const computes = me.activity.state === "running" && ["training", "averaging"].includes(run.state);
  write($("speed"), rate(computes ? me.samples_per_second : 0));
  const placed = me.rank !== null && me.ranked > 1; // a peer that is ranked alone has no place
  write($("rank"), placed ? count(me.rank) : "–");
  write($("ranked"), placed ? `of ${count(me.ranked)}${me.told_by && `, ${me.told_by}`}` : "\u00a0");
  drawRun(run);
  showLimits(me.limits.limits ?? {}, allowed, run.seat);
}

function drawActivity(me) {
  const { state, reasons, keeps } = me.activity;
  document.body.dataset.activity = state;
  write($("sentence"), me.sentence);
  write($("activity"), capital(state === "running" ? here.state.run.state_in_words : state));
  const until = reasons.map((reason) => reason.until).filter((time) => time !== null);
  write($("until"), state === "paused" && until.length === reasons.length && until.length > 0 ? `It goes on by itself: ${moment(Math.max(...until))}.` : "");
  const asked = reasons.some((reason) => reason.kind === "asked");
  const over = state === "stopping";
  $("resume").hidden = !asked || over;
  $("pause").hidden = asked || over;
  write($("pause"), state === "running" ? "Pause" : "Stay paused"); // a limit pauses it, for as long as that holds
  $("pause-choice").hidden = $("pause").hidden;
  $("pause-until-choice").hidden = $("pause").hidden || $("pause-for").value !== "until";
  $("stop").hidden = over && keeps === 0;
  write($("stop"), over ? "Leave at once…" : "Leave the run…");
  $("stop-after").hidden = over;
  write($("stop-not"), over ? "Wait" : "Stay");
  $("controls").hidden = !allowed; // the page hides controls that it may not use
  for (const id of ["resume", "pause", "stop"]) $(id).disabled = !allowed || busy;
  say($("control-note"), allowed ? "" : NEEDS_TOKEN);
}

function drawRun(run) {
  const whole = run.max_epochs ?? 0;
  const part = whole > 0 ? Math.min(1, run.epoch / whole) : 0;
  $("progress").hidden = whole === 0;
  $("progress").setAttribute("aria-valuenow", Math.round(part * 100));
  $("progress-fill").style.transform = `scaleX(${part})`;
  const left = run.run_eta_seconds === null ? "" : `about ${roughly(run.run_eta_seconds)} to go`;
  const together = run.samples_per_second > 0 ? `${rate(run.samples_per_second)} samples a second together` : "";
  const line = [left, `${plural(here.state.counts.alive, "peer")} there`, together];
  write($("run-line"), run.state === "finished" ? "The run has reached its last epoch. Thank you." : line.filter(Boolean).join(" · "));
}

// ---- what one asks of it

async function ask(path, body) {
  busy = true;
  say($("control-error"), "");
  drawActivity(here.state.me);
  try {
    answer = await send("POST", path, body);
    here.state.me.activity = answer; // a state that arrived during the request may still have the old activity
  } catch (error) {
    if (error.message === NEEDS_TOKEN) allowed = false; // the peer was started again, and has another token
    else say($("control-error"), error.message);
  }
  busy = false;
  drawActivity(here.state.me);
  const next = ["resume", "pause"].map($).find((button) => !button.hidden && !button.disabled);
  const held = document.activeElement; // the pressed button is hidden now; the browser may not have noticed yet
  if (held === document.body || held.hidden) next?.focus();
}

// Returns the next moment at which clocks here show this time, in seconds since 1970.
function nextTime(text) {
  const [hour, minute] = text.split(":").map(Number);
  const then = new Date();
  then.setHours(hour, minute, 0, 0);
  if (then.getTime() <= Date.now()) then.setDate(then.getDate() + 1);
  return then.getTime() / 1000;
}

function pause() {
  const choice = $("pause-for").value;
  if (choice !== "until") return ask("pause", choice === "" ? {} : { seconds: Number(choice) });
  if (!$("pause-until").value) {
    $("pause-until").focus();
    return undefined;
  }
  return ask("pause", { until: nextTime($("pause-until").value) });
}

$("pause").addEventListener("click", pause);
$("resume").addEventListener("click", () => ask("resume", {}));
$("pause-for").addEventListener("change", () => drawActivity(here.state.me));
$("stop").addEventListener("click", () => $("stop-dialog").showModal());
$("stop-not").addEventListener("click", () => $("stop-dialog").close());
for (const [id, now] of [["stop-after", false], ["stop-now", true]]) {
  $(id).addEventListener("click", () => {
    $("stop-dialog").close();
    ask("stop", { now });
  });
}

// ---- what it has done

const work = new Chart("work", {
  label: "Your samples per second by epoch",
  empty: "Your work appears here after your first epoch.",
  describe: (point) => `epoch ${count(point.x)}: ${rate(point.value)} samples a second`,
});

const lookBack = again(HISTORY_SECONDS, async () => {
  if (here.state === null) return;
  try {
    // this peer has no figures of epochs whose result it downloaded
    const epochs = (await get("epochs")).filter((each) => each.samples > 0 && each.seconds > 0);
    work.show(epochs.map((each) => ({ x: each.epoch, value: each.own_samples / each.seconds })));
  } catch {
    // live.js shows a lost connection; a peer that is not listed yet has no history
  }
});

// ---- all of it

offerLimits(async (key, text) => {
  const limits = await send("PATCH", "limits", { changes: { [key]: text }, keep: $("limits-keep").checked });
  if (here.state) here.state.me.limits = limits;
  return limits.seat;
});

follow(draw);
