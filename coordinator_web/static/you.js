// The page of a volunteer: what the own computer does, and how to have it do less, more or nothing.

import { again, get, NEEDS_TOKEN } from "/static/api.js";
import { Chart } from "/static/chart.js";
import { send } from "/static/control.js";
import { $, say, write } from "/static/dom.js";
import { capital, count, moment, plural, rate, roughly } from "/static/format.js";
import { offerLimits, showLimits } from "/static/limits.js";
import { follow, here } from "/static/live.js";

const HISTORY_SECONDS = 5; // between two looks at the own history

let allowed = false; // to change something
let seen = false; // a state has come
let busy = false; // while the peer is asked to change something
let answer = null; // the activity that the peer has just told; the next state may have been looked at before it changed

// ---- what it does

function draw({ run, me, can_control: may }) {
  allowed = may;
  if (!seen) lookBack(); // now it is known who this is
  seen = true;
  if (answer !== null) me.activity = answer;
  answer = null;
  drawActivity(me);
  const computes = me.activity.state === "running" && ["training", "averaging"].includes(run.state);
  write($("speed"), rate(computes ? me.samples_per_second : 0));
  const placed = me.rank !== null && me.ranked > 1; // who is alone has no place
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
  $("pause-choice").hidden = $("pause").hidden;
  $("pause-until-choice").hidden = $("pause").hidden || $("pause-for").value !== "until";
  $("stop").hidden = over && keeps === 0;
  write($("stop"), over ? "Leave at once…" : "Leave the run…");
  $("stop-after").hidden = over;
  write($("stop-not"), over ? "Wait" : "Stay");
  $("controls").hidden = !allowed; // it shows what it may
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
    here.state.me.activity = answer; // of the state that has come meanwhile
  } catch (error) {
    if (error.message === NEEDS_TOKEN) allowed = false; // the peer has been started anew
    else say($("control-error"), error.message);
  }
  busy = false;
  drawActivity(here.state.me);
  const next = ["resume", "pause"].map($).find((button) => !button.hidden && !button.disabled);
  const held = document.activeElement; // the button that was pressed is gone; the browser may not have noticed yet
  if (held === document.body || held.hidden) next?.focus();
}

// The next time that clocks here show this.
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
    const epochs = (await get("epochs")).filter((each) => each.samples > 0 && each.seconds > 0); // of the others only others tell
    work.show(epochs.map((each) => ({ x: each.epoch, value: each.own_samples / each.seconds })));
  } catch {
    // the connection that is lost is told already; a peer that is not listed yet has no history
  }
});

// ---- all of it

offerLimits(async (key, text) => {
  const limits = await send("PATCH", "limits", { changes: { [key]: text }, keep: $("limits-keep").checked });
  if (here.state) here.state.me.limits = limits;
  return limits.seat;
});

follow(draw);
