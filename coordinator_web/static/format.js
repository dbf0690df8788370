// Numbers, times and sizes as people read them. All take null for "unknown".

const NONE = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(value) {
  return value === null || value === undefined ? NONE : whole.format(value);
}

export function decimal(value, digits = 3) {
  if (value === null || value === undefined) return NONE;
  const magnitude = Math.abs(value);
  if (magnitude >= 1e5 || (magnitude > 0 && magnitude < 1e-3)) return value.toExponential(2);
  return value.toFixed(magnitude >= 1000 ? 0 : magnitude >= 100 ? 1 : digits);
}

// A number of which only the size matters.
export function tiny(value) {
  if (value === null || value === undefined) return NONE;
  return value === 0 ? "0" : value.toExponential(0);
}

export function rate(value) {
  if (value === null || value === undefined) return NONE;
  return value >= 10 || value === 0 ? whole.format(value) : value.toFixed(1);
}

export function percent(share) {
  if (share === null || share === undefined) return NONE;
  return share > 0 && share < 0.01 ? "<1 %" : `${Math.round(share * 100)} %`;
}

export function bytes(size) {
  if (size === null || size === undefined) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (size >= 999.5 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${unit === 0 || size >= 9.95 ? Math.round(size) : size.toFixed(1)} ${units[unit]}`;
}

// The longer, the coarser: swarmcli/words.py writes durations in the same way.
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 0.0995) return `${Math.round(seconds * 1000)} ms`;
  const scaled = (size) => (seconds < 9.95 * size ? (seconds / size).toFixed(1) : Math.round(seconds / size));
  if (seconds < 99.5) return `${scaled(1)} s`;
  if (seconds < 5970) return `${Math.round(seconds / 60)} min`;
  return seconds < 171000 ? `${scaled(3600)} h` : `${scaled(86400)} days`;
}

// For estimates: nobody needs their tenths of a second.
export function roughly(seconds) {
  return seconds < 99.5 ? `${Math.max(1, Math.round(seconds))} s` : duration(seconds);
}

export function ago(seconds) {
  return seconds < 5 ? "now" : `${roughly(seconds)} ago`;
}

/* What a peer's report says may be old, where many report or its line is slow. */
export function asOf(peer, now) {
  return peer.told !== null && now - peer.told > 30 ? `as of ${ago(now - peer.told)}` : "";
}

export function clock(time) {
  return new Date(time * 1000).toLocaleTimeString("en-GB");
}

export function day(time) {
  return new Date(time * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" });
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

const named = (options) => new Intl.DateTimeFormat("en-GB", options);
const hourMinute = named({ hour: "2-digit", minute: "2-digit" });
const hourMinuteSecond = named({ hour: "2-digit", minute: "2-digit", second: "2-digit" });
const dayMonth = named({ day: "numeric", month: "short" });
const weekday = named({ weekday: "long" });

// For an axis whose marks are `step` seconds apart.
export function axisTime(time, step) {
  return (step < 60 ? hourMinuteSecond : step < 86400 ? hourMinute : dayMonth).format(new Date(time * 1000));
}

// A moment in the near past or future: the hour, and the day if it is not today.
export function moment(time, now = Date.now() / 1000) {
  const date = new Date(time * 1000);
  const hour = hourMinute.format(date);
  if (date.toDateString() === new Date(now * 1000).toDateString()) return hour;
  return `${Math.abs(time - now) < 6 * 86400 ? weekday.format(date) : dayMonth.format(date)}, ${hour}`;
}

// Follows a number: of how many.
export function ofAll(number) {
  return number === null || number === undefined ? "" : ` of ${whole.format(number)}`;
}

export function capital(text) {
  return text.slice(0, 1).toUpperCase() + text.slice(1);
}

const WAYS = { direct: "connected directly", punched: "connected directly, opened by both ends together", relayed: "connected through a relay" };

// How the peer that shows the page is connected to another one, and whether others can dial that one.
export function reached(peer) {
  return [peer.client_mode ? "nobody can dial it" : "", WAYS[peer.way] ?? ""].filter(Boolean).join(" · ");
}

export function hours(value) {
  return duration(value ? 3600 * value : null);
}
