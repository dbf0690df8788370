// A line chart drawn by hand in SVG: one or two lines over epochs or time. Follows the pointer and the arrow keys; dragging
// over it, plus, minus and nought change what is seen of it.

import { element, svg } from "/static/dom.js";
import { axisTime } from "/static/format.js";

const MARGIN = { top: 8, right: 12, bottom: 34, left: 46 };
const SMOOTH_FROM = 40; // points from which on a smoothed line is easier to read than the raw one
const LEAST_DRAG = 8; // pixels; less is a click
const ZOOM = 2; // how much nearer one step brings
const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 2592000, 7776000, 31536000];

// Round numbers that divide low…high into about `wanted` steps.
export function ticks(low, high, wanted, whole = false) {
  const raw = (high - low) / Math.max(1, wanted) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw * 0.999);
  if (whole) step = Math.max(1, Math.ceil(step));
  return { step, values: multiples(low, high, step) };
}

function multiples(low, high, step) {
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) found.push(i * step + 0); // and no -0
  return found;
}

function timeTicks(low, high, wanted) {
  const step = TIME_STEPS.find((each) => (high - low) / each <= wanted) ?? TIME_STEPS.at(-1);
  const shift = new Date(low * 1000).getTimezoneOffset() * 60; // so that days begin at the reader's midnight
  return { step, values: multiples(low - shift, high - shift, step).map((each) => each + shift) };
}

// 1, 2, 5, 10, 20… within low…high; round numbers where that is less than a decade.
function logTicks(low, high, wanted) {
  if (high / low < 10) return ticks(low, high, wanted).values;
  const found = [];
  for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10) found.push(...[1, 2, 5].map((each) => each * power));
  return found.filter((each) => each >= low * 0.999 && each <= high * 1.001);
}

// The mean over a window around each point, so that the line does not lag; it narrows towards the ends.
export function smooth(values, strength = 1) {
  const reach = strength > 1 ? Math.min(60, Math.ceil(values.length / 10)) : Math.min(12, Math.ceil(values.length / 30));
  return values.map((_, i) => {
    const radius = Math.min(reach, i, values.length - 1 - i);
    const window = values.slice(i - radius, i + radius + 1);
    return window.reduce((sum, value) => sum + value, 0) / window.length;
  });
}

export class Chart {
  // `describe(point, axis)` is the text for the point that is looked at; `onLook` gets it, with those of the second line.
  // `onRange([from, to] or null)` is told what the reader wants to see of the axis.
  constructor(container, { label, empty, describe, onLook, onRange = () => {}, fromZero = false, smoothed = false, marked = false }) {
    this.container = container;
    this.options = { label, empty, describe, onLook, onRange, fromZero, smoothed, marked };
    this.points = []; // of the first line: {x, value, begins}, by x; one that `begins` is not joined to the one before
    this.second = []; // of the second
    this.axis = "epoch"; // or "time"
    this.range = null; // what is seen of the axis; null: all
    this.bounds = null; // of all that there is; null: as far as the points go
    this.log = false;
    this.smoothing = 1; // 0: none, 1: some, 2: much
    this.looked = null; // the x that is looked at, or null for the latest
    this.drag = null; // where a drag began and is, in pixels
    this.root = svg("svg", { role: "slider", tabindex: "0", "aria-label": label, "aria-orientation": "horizontal" });
    this.note = element("p", "empty", empty);
    container.append(this.root, this.note);
    this.listen();
    new ResizeObserver(() => this.draw()).observe(container);
  }

  listen() {
    const on = (name, handle) => this.root.addEventListener(name, handle);
    on("pointermove", (event) => this.moved(event));
    on("pointerleave", () => this.look(null));
    on("pointerdown", (event) => this.pressed(event));
    on("pointerup", () => this.released());
    on("pointercancel", () => { this.drag = null; });
    on("dblclick", () => this.options.onRange(null));
    on("blur", () => this.look(null));
    on("keydown", (event) => this.key(event));
  }

  show(points, second = []) {
    this.points = points;
    this.second = second;
    if (this.looked !== null && !points.some((point) => point.x === this.looked)) this.looked = null;
    this.draw();
  }

  set(changes) {
    Object.assign(this, changes);
    this.draw();
  }

  draw() {
    const width = this.container.clientWidth;
    const height = this.container.clientHeight;
    const within = (point) => this.range === null || (point.x >= this.range[0] && point.x <= this.range[1]);
    this.seen = this.points.filter(within);
    this.seenSecond = this.second.filter(within);
    if (this.log) [this.seen, this.seenSecond] = [this.seen, this.seenSecond].map((line) => line.filter((point) => point.value > 0));
    const empty = this.seen.length === 0;
    this.note.hidden = !empty;
    this.note.textContent = empty && this.points.length > 0 ? "Nothing was noted in this span." : this.options.empty;
    this.root.toggleAttribute("hidden", empty);
    if (empty || width === 0 || height === 0) return;
    this.root.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.scale(width, height);
    this.root.replaceChildren(this.axes(width, height), ...this.lines(height), this.selection(height), this.cursor(height));
    this.tell();
  }

  scale(width, height) {
    const [first, end] = this.range ?? [this.seen[0].x, this.seen.at(-1).x];
    const last = end > first ? end : first + 1;
    const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
    const { low, high, marks } = this.vertical(inner.height / 44);
    const at = this.log ? Math.log10 : (value) => value;
    this.x = (x) => MARGIN.left + ((x - first) / (last - first)) * inner.width;
    this.back = (pixel) => first + ((pixel - MARGIN.left) / inner.width) * (last - first);
    this.y = (value) => MARGIN.top + (1 - (at(value) - at(low)) / (at(high) - at(low))) * inner.height;
    this.span = { first, last, marks, inner };
  }

  vertical(wanted) {
    const values = [...this.seen, ...this.seenSecond].map((point) => point.value);
    let low = this.options.fromZero && !this.log ? 0 : Math.min(...values);
    let high = Math.max(...values, low);
    if (high === low) [low, high] = [low - Math.abs(low) * 0.1, high + (Math.abs(high) * 0.1 || 1)];
    if (this.log) return { low: low * 0.97, high: high * 1.03, marks: logTicks(low * 0.97, high * 1.03, wanted) };
    const { step } = ticks(low, high, wanted); // from one grid line to another
    low = Math.floor(low / step + 1e-9) * step;
    high = Math.ceil(high / step - 1e-9) * step;
    return { low, high, marks: multiples(low, high, step) };
  }

  axes(width, height) {
    const { first, last, marks, inner } = this.span;
    const group = svg("g", { class: "axes", "aria-hidden": "true" });
    const digits = Math.max(...marks.map((value) => (String(Number(value.toPrecision(3))).split(".")[1] ?? "").length));
    const short = (value) => (value >= 100_000 ? `${Number((value / 1000).toPrecision(4))}k` : value.toFixed(Math.min(6, digits)));
    for (const value of marks) {
      const y = this.y(value);
      group.append(
        svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y, class: "grid" }),
        svg("text", { x: MARGIN.left - 8, y: y + 4, "text-anchor": "end" }, short(value)),
      );
    }
    const wanted = Math.min(10, inner.width / 70);
    const { step, values } = this.axis === "time" ? timeTicks(first, last, wanted) : ticks(first, last, wanted, true);
    for (const x of values) {
      const text = this.axis === "time" ? axisTime(x, step) : x.toLocaleString("en");
      group.append(svg("text", { x: this.x(x), y: height - MARGIN.bottom + 17, "text-anchor": "middle" }, text));
    }
    group.append(svg("text", { x: MARGIN.left + inner.width / 2, y: height - 2, "text-anchor": "middle", class: "axis-name" }, this.axis));
    return group;
  }

  path(points, values = points.map((point) => point.value)) {
    return values.map((value, i) => `${i ? "L" : "M"}${this.x(points[i].x).toFixed(1)} ${this.y(value).toFixed(1)}`).join("");
  }

  pieces() {
    const pieces = [];
    for (const point of this.seen) {
      if (pieces.length === 0 || point.begins) pieces.push([]);
      pieces.at(-1).push(point);
    }
    return pieces;
  }

  piece(points, height) {
    const values = points.map((point) => point.value);
    const smoothed = this.options.smoothed && this.smoothing > 0 && values.length >= SMOOTH_FROM;
    const shown = this.path(points, smoothed ? smooth(values, this.smoothing) : values);
    const bottom = height - MARGIN.bottom;
    const ends = [this.x(points[0].x), this.x(points.at(-1).x)];
    const drawn = [svg("path", { class: "area", d: `${shown}L${ends[1].toFixed(1)} ${bottom}L${ends[0].toFixed(1)} ${bottom}Z` })];
    if (smoothed) drawn.push(svg("path", { class: "raw", d: this.path(points) }));
    drawn.push(svg("path", { class: "line", d: shown }));
    if (values.length === 1) drawn.push(svg("circle", { class: "dot", r: 3.5, cx: ends[0], cy: this.y(values[0]) }));
    return drawn;
  }

  lines(height) {
    const drawn = this.pieces().flatMap((points) => this.piece(points, height));
    if (this.seenSecond.length > 0) {
      drawn.push(svg("path", { class: "line second", d: this.path(this.seenSecond) }));
      if (this.options.marked && this.seenSecond.length <= 60) drawn.push(...this.seenSecond.map(({ x, value }) => this.diamond(x, value)));
    }
    return drawn;
  }

  diamond(x, value) {
    const [cx, cy] = [this.x(x), this.y(value)];
    return svg("path", { class: "diamond", d: `M${cx} ${cy - 4}L${cx + 4} ${cy}L${cx} ${cy + 4}L${cx - 4} ${cy}Z` });
  }

  selection(height) {
    if (this.drag === null) return svg("g");
    const [from, to] = [this.drag.from, this.drag.to].toSorted((a, b) => a - b);
    return svg("rect", { class: "selection", x: from, width: to - from, y: MARGIN.top, height: height - MARGIN.top - MARGIN.bottom });
  }

  cursor(height) {
    const point = this.current();
    const group = svg("g", { class: this.looked === null ? "cursor latest" : "cursor" });
    const x = this.x(point.x);
    if (this.looked !== null) group.append(svg("line", { x1: x, x2: x, y1: MARGIN.top, y2: height - MARGIN.bottom }));
    group.append(svg("circle", { cx: x, cy: this.y(point.value), r: 4 }));
    return group;
  }

  current() {
    return this.seen.find((point) => point.x === this.looked) ?? this.seen.at(-1);
  }

  // The last point of the second line up to the one that is looked at.
  beside(point) {
    return this.seenSecond.findLast((each) => each.x <= point.x) ?? null;
  }

  look(x) {
    this.looked = x;
    this.draw();
  }

  // ---- the pointer

  pixel(event) {
    const { left, width } = this.root.getBoundingClientRect();
    return Math.max(MARGIN.left, Math.min(width - MARGIN.right, event.clientX - left));
  }

  pressed(event) {
    if (event.button !== 0 || this.seen.length === 0) return;
    this.drag = { from: this.pixel(event), to: this.pixel(event) };
    this.root.setPointerCapture(event.pointerId);
  }

  moved(event) {
    if (this.seen.length === 0) return;
    const pixel = this.pixel(event);
    if (this.drag) this.drag.to = pixel;
    const distance = (point) => Math.abs(this.x(point.x) - pixel);
    this.look(this.seen.reduce((best, point) => (distance(point) < distance(best) ? point : best)).x);
  }

  released() {
    const { drag } = this;
    this.drag = null;
    if (drag && Math.abs(drag.to - drag.from) >= LEAST_DRAG) {
      this.options.onRange([this.back(drag.from), this.back(drag.to)].toSorted((a, b) => a - b));
    }
  }

  // ---- the keyboard

  key(event) {
    if (this.seen.length === 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const last = this.seen.length - 1;
    const at = this.seen.indexOf(this.current());
    const there = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last, PageUp: at - 10, PageDown: at + 10 }[event.key];
    const zoom = { "+": ZOOM, "=": ZOOM, "-": 1 / ZOOM }[event.key];
    if (there !== undefined) this.look(this.seen[Math.max(0, Math.min(last, there))].x);
    else if (zoom !== undefined) this.zoom(zoom);
    else if (event.key === "0" || event.key === "Escape") this.options.onRange(null);
    else return;
    event.preventDefault();
  }

  // Nearer (more than 1) or farther, around what is looked at; all of it once there is no more to see.
  zoom(factor) {
    if (this.seen.length === 0) return;
    const { first, last } = this.span;
    const middle = this.looked ?? (first + last) / 2;
    const half = (last - first) / factor / 2;
    const all = this.bounds ?? [this.points[0].x, this.points.at(-1).x];
    const [from, to] = [Math.max(all[0], middle - half), Math.min(all[1], middle + half)];
    this.options.onRange(from <= all[0] && to >= all[1] ? null : [from, to]);
  }

  tell() {
    const point = this.current();
    const text = this.options.describe(point, this.beside(point), this.axis);
    this.root.setAttribute("aria-valuemin", this.seen[0].x);
    this.root.setAttribute("aria-valuemax", this.seen.at(-1).x);
    this.root.setAttribute("aria-valuenow", point.x);
    this.root.setAttribute("aria-valuetext", text);
    this.options.onLook(text);
  }
}
