// Asks this peer. Errors are Errors whose message a person can read.

export const NEEDS_TOKEN = "This page may only look. To change something, type “swarm status” on the computer on which this peer runs, and open the address behind “page”: it brings the token along.";

const SILENCE_MS = 6000; // a frozen process keeps its connections, but does not answer

export async function asked(path, options) {
  let response;
  const silence = new AbortController();
  const timer = setTimeout(() => silence.abort(), SILENCE_MS);
  try {
    response = await fetch(`/api/v1/${path}`, { ...options, signal: silence.signal });
  } catch {
    throw new Error("This peer does not answer. Has it ended?");
  } finally {
    clearTimeout(timer);
  }
  if (response.ok) return response.json();
  if (response.status === 401 || response.status === 403) throw new Error(NEEDS_TOKEN);
  throw new Error((await reason(response)) || `This peer answered with an error (${response.status}).`);
}

async function reason(response) {
  try {
    const { detail } = await response.json();
    return typeof detail === "string" ? detail : "";
  } catch {
    return "";
  }
}

export function get(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(given).toString();
  return asked(text ? `${path}?${text}` : path, {});
}

// Calls `work` now, and again `seconds` after each end, while the page is visible, or `always`. Returns a function that
// calls it at once.
export function again(seconds, work, always = false) {
  let timer = null;
  let running = false;
  async function turn() {
    clearTimeout(timer);
    if (running) return;
    running = true;
    try {
      if (always || document.visibilityState === "visible") await work();
    } finally {
      running = false;
      timer = setTimeout(turn, seconds * 1000);
    }
  }
  document.addEventListener("visibilitychange", () => {
    if (document.visibilityState === "visible") turn();
  });
  turn();
  return turn;
}
