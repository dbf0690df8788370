// The curves of a run: loss, rate and who was there, over epochs or time. One span of the axis is seen in all of them.

import { get } from "/static/api.js";
import { Chart } from "/static/chart.js";
import { $, say, write } from "/static/dom.js";
import { count, day, decimal, rate } from "/static/format.js";

const MOST_POINTS = 400;
const LEAST_MS = 1000; // between two looks

// A mean of small numbers.
function few(value) {
  return Number(value.toFixed(1)).toLocaleString("en");
}

// How far the step of an epoch went, where its row says that.
function norms({ row }) {
  const told = [["gradient", row.gradient_norm], ["update", row.update_norm]].filter(([, norm]) => typeof norm === "number");
  return told.map(([name, norm]) => `, ${name} ${Number(norm.toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 })}`).join("");
}

function place(point, axis) {
  return axis === "time" ? day(point.x) : `epoch ${count(point.x)}`;
}

export class Curves {
  // `epochFrom` is told the first point of the loss.
  constructor({ epochFrom }) {
    this.epochFrom = epochFrom;
    this.axis = "epoch";
    this.range = null;
    this.asked = 0;
    this.waiting = null;
    this.lookedAt = 0;
    const onRange = (range) => this.see(range);
    this.loss = new Chart($("loss-chart"), {
      label: "Loss",
      empty: "The loss appears here after the first epoch.",
      describe: (point, aside, axis) => `${place(point, axis)}: ${decimal(point.value, 4)}${aside ? `, on data kept aside ${decimal(aside.value, 4)}` : ""}${norms(point)}`,
      onLook: (text) => write($("loss-readout"), text),
      onRange,
      smoothed: true,
      marked: true,
    });
    this.rate = new Chart($("rate-chart"), {
      label: "Samples per second, all peers together",
      empty: "The throughput appears here after the first epoch.",
      describe: (point, _, axis) => `${place(point, axis)}: ${rate(point.value)}`,
      onLook: (text) => write($("rate-readout"), text),
      onRange,
      fromZero: true,
      smoothed: true,
    });
    this.alive = new Chart($("alive-chart"), {
      label: "Peers that were there",
      empty: "Who was there appears here after the first epoch.",
      describe: (point, trainers, axis) => `${place(point, axis)}: ${few(point.value)}${trainers ? `, ${few(trainers.value)} train` : ""}`,
      onLook: (text) => write($("alive-readout"), text),
      onRange,
      fromZero: true,
    });
    this.charts = [this.loss, this.rate, this.alive];
    this.listen();
  }

  listen() {
    for (const choice of document.querySelectorAll("[name=axis]")) choice.addEventListener("change", () => this.along(choice.value));
    $("log").addEventListener("change", () => this.loss.set({ log: $("log").checked }));
    $("smoothing").addEventListener("change", () => {
      for (const chart of this.charts) chart.set({ smoothing: Number($("smoothing").value) });
    });
    $("nearer").addEventListener("click", () => this.loss.zoom(2));
    $("farther").addEventListener("click", () => this.loss.zoom(0.5));
    $("whole").addEventListener("click", () => this.see(null));
  }

  along(axis) {
    this.axis = axis;
    this.see(null);
  }

  see(range) {
    this.range = range;
    $("whole").disabled = range === null;
    $("farther").disabled = range === null;
    for (const chart of this.charts) chart.set({ range, looked: null });
    this.fetch(); // nearer, more is to be seen
  }

  // Soon, but not more often than the eye follows.
  reload() {
    if (this.waiting !== null) return;
    this.waiting = setTimeout(() => {
      this.waiting = null;
      this.fetch();
    }, Math.max(0, LEAST_MS - (performance.now() - this.lookedAt)));
  }

  async fetch() {
    this.lookedAt = performance.now();
    this.asked += 1;
    const turn = this.asked;
    const { axis, range } = this;
    const span = { by: axis, from: range?.[0], to: range?.[1], points: MOST_POINTS };
    const exact = axis === "epoch" ? get("epochs", range ? { after: Math.ceil(range[0]) - 1, until: Math.floor(range[1]) } : {}) : null;
    try {
      const [history, epochs] = await Promise.all([get("history", span), exact]);
      if (turn === this.asked) this.draw(history, epochs, axis);
    } catch (error) {
      say($("curves-error"), error.message);
    }
  }

  // `epochs` where they are the axis: the history knows means of some seconds only.
  draw({ points, evaluations, first, last }, epochs, axis) {
    say($("curves-error"), "");
    const at = (point) => (axis === "time" ? point.time : point.epoch);
    const line = (rows, value) => rows.map((row) => ({ x: at(row), value: value(row), row })).filter((point) => point.value !== null);
    const bounds = first && last ? [at(first), at(last)] : null; // also of what is not seen now
    for (const chart of this.charts) Object.assign(chart, { axis, bounds });
    const losses = line(epochs ?? points, (row) => row.loss);
    this.loss.show(losses, line(evaluations, (row) => row.loss));
    $("aside-legend").hidden = evaluations.length === 0;
    this.rate.show(epochs ? line(epochs.filter((row) => row.samples > 0 && row.seconds > 0), (row) => row.samples / row.seconds) : line(points, (row) => row.samples_per_second || null));
    const there = axis === "epoch" ? points.filter((row) => row.epoch > 0) : points;
    this.alive.show(line(there, (row) => row.alive), line(there, (row) => row.trainers));
    if (axis === "epoch" && this.range === null) this.epochFrom(losses.length > 1 ? { epoch: losses[0].x, value: losses[0].value } : null);
  }
}
