// Asks this peer for its state, on every page, twice a second; draws the frame with the alerts, and passes the state to
// the page.

import { again } from "/static/api.js";
// importing it takes the token out of the address, whichever page the link leads to
import { send } from "/static/control.js";
import { $, element, fill, reconcile, say, write } from "/static/dom.js";
import { clock, decimal } from "/static/format.js";

const ASK_SECONDS = 0.5;
const LOST_MS = 1500; // without an answer: a server that restarts in place is back before anyone reads a banner

export const here = { state: null }; // the last Overview

let heard = Date.now();

// `begin` is called when the peer answers for the first time, or again; `draw` with each state.
export function follow(draw = () => {}, begin = () => {}) {
  again(ASK_SECONDS, () => look(draw, begin), true);
}

async function look(draw, begin) {
  let state;
  try {
    state = await send("GET", "state"); // the answer says whether the token is right
  } catch {
    if (Date.now() - heard > LOST_MS) tellLost();
    return;
  }
  heard = Date.now();
  here.state = state;
  fill(state);
  drawFrame(state);
  if (document.body.dataset.connection !== "live") await begin();
  await draw(state);
  document.body.dataset.connection = "live";
  write($("connection"), "live");
  $("lost").hidden = true;
}

function tellLost() {
  document.body.dataset.connection = "lost";
  write($("connection"), "not connected");
  const since = here.state ? ` What you see is from ${clock(here.state.run.now)}.` : "";
  const left = here.state?.me?.activity?.state === "stopping"; // it left, or ended before it could
  const what = left ? "Your computer has left the run. The same command takes you back in." : "The connection to this peer is lost; trying again.";
  say($("lost"), what + since);
}

// ---- the frame of every page

function drawFrame({ run, alerts }) {
  document.body.dataset.state = run.state;
  document.body.dataset.tone = run.tone;
  const name = run.name || run.peer_id.slice(0, 10);
  write($("viewer"), name === run.role ? `the ${name}` : `${run.role} ${name}`);
  const loss = run.losses.at(-1) ?? null;
  document.title = `epoch ${run.epoch}${loss === null ? "" : ` · loss ${decimal(loss)}`} · ${run.run_id} · swarm`;
  reconcile($("alerts"), alerts, (alert) => alert.id, createAlert, (node, alert) => write(node.lastChild, alert.text));
}

function createAlert(alert) {
  return element("p", "alarm", element("strong", "", `Since ${clock(alert.since)}: `), element("bdi"));
}
