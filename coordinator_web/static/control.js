// Sends requests that change something. They need the token of this process, which the printed link brings in the
// address's fragment. The token is kept per origin, port included, and not as a cookie: cookies of 127.0.0.1 go to
// every server of this computer.

import { asked } from "/static/api.js";

const KEY = "swarm-control";
let token = "";

// Takes the token out of the address, so that it stays neither in the history nor in a link that somebody copies.
function adopt() {
  const fragment = new URLSearchParams(location.hash.slice(1));
  const found = fragment.get("control") ?? fragment.get("token"); // some write it as in `?token=`
  try {
    if (found) localStorage.setItem(KEY, found);
    token = localStorage.getItem(KEY) ?? "";
  } catch {
    token = found ?? ""; // the browser keeps nothing: the token lasts as long as the page is open
  }
  if (found) history.replaceState(null, "", location.pathname + location.search);
}

// Sends a request with the token, if there is one. Resolves to the answer; throws an Error that a person can read.
export function send(method, path, body) {
  const headers = { Authorization: `Bearer ${token}`, ...(body === undefined ? {} : { "Content-Type": "application/json" }) };
  return asked(path, { method, headers, ...(body === undefined ? {} : { body: JSON.stringify(body) }) });
}

adopt();
