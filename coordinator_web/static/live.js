// Follows /api/v1/stream on every page: draws the frame, tells alerts, and hands what arrives to the page.

import "/static/control.js"; // takes the token out of the address, whichever page the link leads to
import { $, element, fill, reconcile, say, write } from "/static/dom.js";
import { clock, decimal } from "/static/format.js";

const SILENCE_MS = 6000; // a stream that says nothing for this long is taken for lost
const RETRY_MS = [500, 1000, 2000, 3000, 5000];

export const here = { state: null }; // the last Overview

let takers = {};
let stream = null;
let failures = 0;
let retry = null;
let heard = 0;
let opened = false;

// `given`: what a page does with each kind of message, by name.
export function follow(given) {
  takers = given;
  setInterval(() => {
    if (Date.now() - heard > SILENCE_MS) lose(true);
  }, 1000);
  window.addEventListener("online", connect);
  document.addEventListener("visibilitychange", () => {
    if (document.visibilityState === "visible" && document.body.dataset.connection !== "live") connect();
  });
  offerNotifications();
  connect();
}

function connect() {
  clearTimeout(retry);
  stream?.close();
  stream = new EventSource("/api/v1/stream");
  heard = Date.now();
  for (const name of ["begin", "state", "rounds", "events"]) {
    stream.addEventListener(name, (event) => take(name, JSON.parse(event.data)));
  }
  stream.onerror = () => lose(failures > 0); // a server that restarts in place is back before anyone reads a banner
}

function take(name, data) {
  heard = Date.now();
  if (name === "state") {
    here.state = data;
    fill(data);
    drawFrame(data);
    data.alerts.forEach(notify);
    opened = true; // those that stood before are none to be notified of
  }
  takers[name]?.(data);
  if (name === "state" && (failures || document.body.dataset.connection !== "live")) connected(); // it comes last
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
  heard = Date.now();
  if (!tell) return;
  document.body.dataset.connection = "lost";
  write($("connection"), "not connected");
  const since = here.state ? ` What you see is from ${clock(here.state.run.now)}.` : "";
  say($("lost"), `The connection to this peer is lost; trying again.${since}`);
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

// ---- notifications of the browser, once somebody has asked for them. Browsers offer them to pages of this machine and to
// those that come over TLS.

const told = new Set(); // ids
const wanted = () => "Notification" in window && Notification.permission === "granted" && localStorage.getItem("notify") === "yes";

function notify(alert) {
  if (told.has(alert.id)) return;
  told.add(alert.id);
  if (opened && wanted()) new Notification(here.state.run.run_id, { body: alert.text, tag: alert.id });
}

function offerNotifications() {
  const button = $("notify");
  if (!("Notification" in window) || !window.isSecureContext) return;
  const show = () => {
    button.hidden = false;
    button.disabled = Notification.permission === "denied";
    button.setAttribute("aria-pressed", String(wanted()));
    write(button, button.disabled ? "Alerts: the browser forbids them" : wanted() ? "Alerts: on" : "Alerts: off");
  };
  button.addEventListener("click", async () => {
    const on = wanted();
    if (!on) await Notification.requestPermission();
    localStorage.setItem("notify", on ? "no" : "yes");
    show();
  });
  show();
}
