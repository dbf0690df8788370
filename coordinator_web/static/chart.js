// A line chart over epochs, drawn by hand in SVG. Follows the pointer and the arrow keys.

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { top: 8, right: 12, bottom: 34, left: 46 };
const SMOOTH_FROM = 40; // points from which on a smoothed line is easier to read than the raw one

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// Round numbers that divide low…high into about `wanted` steps.
export function ticks(low, high, wanted, whole = false) {
  const raw = (high - low) / Math.max(1, wanted) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw * 0.999);
  if (whole) step = Math.max(1, Math.ceil(step));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) found.push(i * step);
  return { step, values: found };
}

// The mean over a window around each point, so that the line does not lag; it narrows towards the ends.
export function smooth(values) {
  const reach = Math.min(12, Math.ceil(values.length / 30));
  return values.map((_, i) => {
    const radius = Math.min(reach, i, values.length - 1 - i);
    const window = values.slice(i - radius, i + radius + 1);
    return window.reduce((sum, value) => sum + value, 0) / window.length;
  });
}

export class Chart {
  // `points`: [{epoch, value}], by epoch. `describe(point)` is the text for the point that is looked at.
  constructor(container, { label, empty, describe, onLook, fromZero = false, smoothed = false }) {
    this.container = container;
    this.options = { label, empty, describe, onLook, fromZero, smoothed };
    this.points = [];
    this.looked = null; // the epoch that is looked at, or null for the latest
    this.root = svg("svg", { role: "slider", tabindex: "0", "aria-label": label, "aria-orientation": "horizontal" });
    this.note = document.createElement("p");
    this.note.className = "empty";
    this.note.textContent = empty;
    container.append(this.root, this.note);
    this.root.addEventListener("pointermove", (event) => this.lookAt(event));
    this.root.addEventListener("pointerleave", () => this.look(null));
    this.root.addEventListener("blur", () => this.look(null));
    this.root.addEventListener("keydown", (event) => this.step(event));
    new ResizeObserver(() => this.draw()).observe(container);
  }

  show(points) {
    this.points = points;
    if (this.looked !== null && !points.some((point) => point.epoch === this.looked)) this.looked = null;
    this.draw();
  }

  draw() {
    const width = this.container.clientWidth;
    const height = this.container.clientHeight;
    const empty = this.points.length === 0;
    this.note.hidden = !empty;
    this.root.toggleAttribute("hidden", empty);
    if (empty || width === 0 || height === 0) return;
    this.root.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.scale(width, height);
    this.root.replaceChildren(this.axes(width, height), ...this.lines(height), this.cursor(height));
    this.say();
  }

  scale(width, height) {
    const first = this.points[0].epoch;
    const last = Math.max(first + 1, this.points.at(-1).epoch);
    const values = this.points.map((point) => point.value);
    const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
    let low = this.options.fromZero ? 0 : Math.min(...values);
    let high = Math.max(...values, low);
    if (high === low) [low, high] = [low - Math.abs(low) * 0.1, high + (Math.abs(high) * 0.1 || 1)];
    const { step } = ticks(low, high, inner.height / 44); // from one grid line to another
    low = Math.floor(low / step + 1e-9) * step;
    high = Math.ceil(high / step - 1e-9) * step;
    this.x = (epoch) => MARGIN.left + ((epoch - first) / (last - first)) * inner.width;
    this.y = (value) => MARGIN.top + (1 - (value - low) / (high - low)) * inner.height;
    this.range = { first, last, low, high, step, inner };
  }

  axes(width, height) {
    const { first, last, low, high, inner } = this.range;
    const group = svg("g", { class: "axes" });
    const vertical = ticks(low, high, Math.round((high - low) / this.range.step));
    const digits = Math.min(6, (String(Number(vertical.step.toPrecision(3))).split(".")[1] ?? "").length);
    for (const value of vertical.values) {
      const y = this.y(value);
      group.append(
        svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y, class: "grid" }),
        svg("text", { x: MARGIN.left - 8, y: y + 4, "text-anchor": "end" }, value.toFixed(digits)),
      );
    }
    for (const epoch of ticks(first, last, Math.min(10, inner.width / 70), true).values) {
      group.append(svg("text", { x: this.x(epoch), y: height - MARGIN.bottom + 17, "text-anchor": "middle" }, String(epoch)));
    }
    group.append(svg("text", { x: MARGIN.left + inner.width / 2, y: height - 2, "text-anchor": "middle", class: "axis-name" }, "epoch"));
    return group;
  }

  lines(height) {
    const values = this.points.map((point) => point.value);
    const smoothed = this.options.smoothed && values.length >= SMOOTH_FROM;
    const path = (series) => series.map((value, i) => `${i ? "L" : "M"}${this.x(this.points[i].epoch).toFixed(1)} ${this.y(value).toFixed(1)}`).join("");
    const shown = smoothed ? smooth(values) : values;
    const bottom = height - MARGIN.bottom;
    const ends = [this.x(this.points[0].epoch), this.x(this.points.at(-1).epoch)];
    const drawn = [
      svg("path", { class: "area", d: `${path(shown)}L${ends[1].toFixed(1)} ${bottom}L${ends[0].toFixed(1)} ${bottom}Z` }),
    ];
    if (smoothed) drawn.push(svg("path", { class: "raw", d: path(values) }));
    drawn.push(svg("path", { class: "line", d: path(shown) }));
    if (this.points.length === 1) drawn.push(svg("circle", { class: "dot", r: 3.5, cx: ends[0], cy: this.y(values[0]) }));
    return drawn;
  }

  cursor(height) {
    const point = this.current();
    const group = svg("g", { class: this.looked === null ? "cursor latest" : "cursor" });
    const x = this.x(point.epoch);
    if (this.looked !== null) group.append(svg("line", { x1: x, x2: x, y1: MARGIN.top, y2: height - MARGIN.bottom }));
    group.append(svg("circle", { cx: x, cy: this.y(point.value), r: 4 }));
    return group;
  }

  current() {
    return this.points.find((point) => point.epoch === this.looked) ?? this.points.at(-1);
  }

  look(epoch) {
    this.looked = epoch;
    this.draw();
  }

  lookAt(event) {
    if (this.points.length === 0) return;
    const { left } = this.root.getBoundingClientRect();
    const distance = (point) => Math.abs(this.x(point.epoch) - (event.clientX - left));
    this.look(this.points.reduce((best, point) => (distance(point) < distance(best) ? point : best)).epoch);
  }

  step(event) {
    const last = this.points.length - 1;
    const here = this.points.indexOf(this.current());
    const there = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: last, PageUp: here - 10, PageDown: here + 10 }[event.key];
    if (there === undefined || last < 0) return;
    event.preventDefault();
    this.look(this.points[Math.max(0, Math.min(last, there))].epoch);
  }

  say() {
    const point = this.current();
    const text = this.options.describe(point);
    this.root.setAttribute("aria-valuemin", this.points[0].epoch);
    this.root.setAttribute("aria-valuemax", this.points.at(-1).epoch);
    this.root.setAttribute("aria-valuenow", point.epoch);
    this.root.setAttribute("aria-valuetext", text);
    this.options.onLook(text);
  }
}
