// A line chart drawn by hand in SVG: one or two lines over epochs or time. Follows the pointer and the arrow keys.

import { $, element, svg, write } from "/static/dom.js";
import { axisTime } from "/static/format.js";

const MARGIN = { top: 8, right: 12, bottom: 34, left: 46 };
const SMOOTH_FROM = 40; // with so many points a smoothed line is easier to read than the raw one
const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 2592000, 7776000, 31536000];

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });

// Round numbers that divide low…high into about `wanted` steps.
function roundStep(low, high, wanted) {
  const raw = (high - low) / Math.max(1, wanted) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw * 0.999);
}

function multiples(low, high, step) {
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) found.push(i * step + 0); // and no -0
  return found;
}

// The mean over a window around each point, so that the line does not lag; it narrows towards the ends.
function smooth(values) {
  const reach = Math.min(12, Math.ceil(values.length / 30));
  return values.map((_, i) => {
    const radius = Math.min(reach, i, values.length - 1 - i);
    const near = values.slice(i - radius, i + radius + 1);
    return near.reduce((sum, value) => sum + value, 0) / near.length;
  });
}

export class Chart {
  // Draws into the element NAME-chart. `describe(point, beside, axis)` returns the text for the point that is looked
  // at, shown in NAME-readout; `beside`: the last point of the second line up to there, or null.
  constructor(name, { label, empty, describe, fromZero = true }) {
    const container = $(`${name}-chart`);
    Object.assign(this, { name, container, describe, fromZero });
    this.points = []; // points of the first line: {x, value}, by x
    this.second = []; // points of the second line
    this.axis = "epoch"; // or "time"
    this.looked = null; // the x that is looked at, or null for the latest
    this.root = svg("svg", { role: "slider", tabindex: "0", "aria-label": label, "aria-orientation": "horizontal" });
    this.note = element("p", "empty", empty);
    container.append(this.root, this.note);
    const on = (name, handle) => this.root.addEventListener(name, handle);
    on("pointermove", (event) => this.moved(event));
    for (const left of ["pointerleave", "blur"]) on(left, () => this.look(null));
    on("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(container);
  }

  show(points, second = [], axis = this.axis) {
    Object.assign(this, { points, second, axis });
    if (!points.some((point) => point.x === this.looked)) this.looked = null;
    this.draw();
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.container;
    const empty = this.points.length === 0;
    this.note.hidden = !empty;
    this.root.toggleAttribute("hidden", empty);
    if (empty || width === 0 || height === 0) return;
    this.root.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const marks = this.scale(width - MARGIN.left - MARGIN.right, height - MARGIN.top - MARGIN.bottom);
    this.root.replaceChildren(this.axes(width, height, marks), ...this.lines(height - MARGIN.bottom), this.cursor(height));
    this.tell();
  }

  // Returns the marks of the vertical axis.
  scale(width, height) {
    const values = [...this.points, ...this.second].map((point) => point.value);
    let low = this.fromZero ? 0 : Math.min(...values);
    let high = Math.max(...values, low);
    if (high === low) [low, high] = [low - Math.abs(low) * 0.1, high + (Math.abs(high) * 0.1 || 1)];
    const step = roundStep(low, high, height / 44);
    [low, high] = [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step]; // from one grid line to another
    const first = this.points[0].x;
    const last = Math.max(this.points.at(-1).x, first + 1);
    this.x = (x) => MARGIN.left + ((x - first) / (last - first)) * width;
    this.y = (value) => MARGIN.top + (1 - (value - low) / (high - low)) * height;
    this.span = { first, last };
    return multiples(low, high, step);
  }

  axes(width, height, marks) {
    const group = svg("g", { class: "axes", "aria-hidden": "true" });
    for (const value of marks) {
      const y = this.y(value);
      group.append(
        svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y, class: "grid" }),
        svg("text", { x: MARGIN.left - 8, y: y + 4, "text-anchor": "end" }, compact.format(value)),
      );
    }
    const { first, last } = this.span;
    const inner = width - MARGIN.left - MARGIN.right;
    const wanted = Math.min(10, inner / 70);
    const time = this.axis === "time";
    const step = time ? (TIME_STEPS.find((each) => (last - first) / each <= wanted) ?? TIME_STEPS.at(-1)) : Math.max(1, Math.ceil(roundStep(first, last, wanted)));
    const shift = time ? new Date(first * 1000).getTimezoneOffset() * 60 : 0; // so that days begin at the reader's midnight
    for (const x of multiples(first - shift, last - shift, step).map((each) => each + shift)) {
      group.append(svg("text", { x: this.x(x), y: height - MARGIN.bottom + 17, "text-anchor": "middle" }, time ? axisTime(x, step) : x.toLocaleString("en")));
    }
    group.append(svg("text", { x: MARGIN.left + inner / 2, y: height - 2, "text-anchor": "middle", class: "axis-name" }, this.axis));
    return group;
  }

  path(points, values = points.map((point) => point.value)) {
    return values.map((value, i) => `${i ? "L" : "M"}${this.x(points[i].x).toFixed(1)} ${this.y(value).toFixed(1)}`).join("");
  }

  lines(bottom) {
    const { points, second } = this;
    const values = points.map((point) => point.value);
    const smoothed = values.length >= SMOOTH_FROM;
    const shown = this.path(points, smoothed ? smooth(values) : values);
    const [from, to] = [points[0], points.at(-1)].map((point) => this.x(point.x));
    const drawn = [svg("path", { class: "area", d: `${shown}L${to.toFixed(1)} ${bottom}L${from.toFixed(1)} ${bottom}Z` })];
    if (smoothed) drawn.push(svg("path", { class: "raw", d: this.path(points) }));
    drawn.push(svg("path", { class: "line", d: shown }));
    if (second.length > 0) drawn.push(svg("path", { class: "line second", d: this.path(second) }));
    return drawn;
  }

  cursor(height) {
    const { x: at, value } = this.current();
    const x = this.x(at);
    const group = svg("g", { class: "cursor" }, svg("circle", { cx: x, cy: this.y(value), r: 4 }));
    if (this.looked !== null) group.prepend(svg("line", { x1: x, x2: x, y1: MARGIN.top, y2: height - MARGIN.bottom }));
    return group;
  }

  current() {
    return this.points.find((point) => point.x === this.looked) ?? this.points.at(-1);
  }

  look(x) {
    this.looked = x;
    this.draw();
  }

  moved(event) {
    if (this.points.length === 0) return;
    const pixel = event.clientX - this.root.getBoundingClientRect().left;
    const distance = (point) => Math.abs(this.x(point.x) - pixel);
    this.look(this.points.reduce((best, point) => (distance(point) < distance(best) ? point : best)).x);
  }

  key(event) {
    if (this.points.length === 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const last = this.points.length - 1;
    const at = this.points.indexOf(this.current());
    const there = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last, PageUp: at - 10, PageDown: at + 10 }[event.key];
    if (there === undefined) return;
    this.look(this.points[Math.max(0, Math.min(last, there))].x);
    event.preventDefault();
  }

  tell() {
    const point = this.current();
    const text = this.describe(point, this.second.findLast((each) => each.x <= point.x) ?? null, this.axis);
    const told = { valuemin: this.points[0].x, valuemax: this.points.at(-1).x, valuenow: point.x, valuetext: text };
    for (const [name, value] of Object.entries(told)) this.root.setAttribute(`aria-${name}`, value);
    write($(`${this.name}-readout`), text);
  }
}
