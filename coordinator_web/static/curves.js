// The curves of a run: loss, rate and peers, over epochs or time. All show the same span of the axis.

import { get } from "/static/api.js";
import { Chart } from "/static/chart.js";
import { $, say } from "/static/dom.js";
import { count, day, decimal, rate } from "/static/format.js";

const MOST_POINTS = 400;
const LEAST_MS = 1000; // between two requests

const few = (value) => Number(value.toFixed(1)).toLocaleString("en"); // a mean of small numbers
const place = (point, axis) => (axis === "time" ? day(point.x) : `epoch ${count(point.x)}`);

// The norms of an epoch's gradient and update, if its row has them.
function norms({ row }) {
  const told = [["gradient", row.gradient_norm], ["update", row.update_norm]].filter(([, norm]) => typeof norm === "number");
  return told.map(([name, norm]) => `, ${name} ${Number(norm.toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 })}`).join("");
}

const loss = new Chart("loss", {
  label: "Loss",
  empty: "The loss appears here after the first epoch.",
  describe: (point, aside, axis) => `${place(point, axis)}: ${decimal(point.value, 4)}${aside ? `, on data kept aside ${decimal(aside.value, 4)}` : ""}${norms(point)}`,
  fromZero: false,
});
const rates = new Chart("rate", {
  label: "Samples per second, all peers together",
  empty: "The throughput appears here after the first epoch.",
  describe: (point, _, axis) => `${place(point, axis)}: ${rate(point.value)}`,
});
const alive = new Chart("alive", {
  label: "Peers that were there",
  empty: "Who was there appears here after the first epoch.",
  describe: (point, trainers, axis) => `${place(point, axis)}: ${few(point.value)}${trainers ? `, ${few(trainers.value)} train` : ""}`,
});

let asked = 0;
let waiting = null;
let lookedAt = 0;
let ends = null; // {first, last}: the first and the last point of the run

// Returns a function that draws the curves again.
export function drawCurves() {
  for (const choice of document.querySelectorAll("[name=axis], #span")) choice.addEventListener("change", fetchCurves);
  // At most once in LEAST_MS.
  return () => {
    waiting ??= setTimeout(() => {
      waiting = null;
      fetchCurves();
    }, Math.max(0, LEAST_MS - (performance.now() - lookedAt)));
  };
}

async function fetchCurves() {
  lookedAt = performance.now();
  asked += 1;
  const turn = asked;
  const axis = document.querySelector("[name=axis]:checked").value;
  const part = Number($("span").value); // which part of the axis, counted from its end
  const from = part < 1 && ends !== null ? ends.last[axis] - part * (ends.last[axis] - ends.first[axis]) : null;
  try {
    // On the axis of epochs, epochs themselves: the history has only means over some seconds.
    const exact = axis === "epoch" ? get("epochs", { after: from === null ? null : Math.ceil(from) - 1 }) : null;
    const [history, epochs] = await Promise.all([get("history", { by: axis, from, points: MOST_POINTS }), exact]);
    if (turn !== asked) return;
    say($("curves-error"), "");
    const [begin, end] = [history.points[0], history.points.at(-1)];
    if (begin) ends = { first: from === null ? begin : ends.first, last: end };
    draw(history, epochs, axis);
  } catch (error) {
    say($("curves-error"), error.message);
  }
}

function draw({ points, evaluations }, epochs, axis) {
  const line = (rows, value) => rows.map((row) => ({ x: row[axis], value: value(row), row })).filter((point) => point.value !== null);
  loss.show(line(epochs ?? points, (row) => row.loss), line(evaluations, (row) => row.loss), axis);
  $("aside-legend").hidden = evaluations.length === 0;
  const timed = epochs?.filter((row) => row.samples > 0 && row.seconds > 0);
  rates.show(timed ? line(timed, (row) => row.samples / row.seconds) : line(points, (row) => row.samples_per_second || null), [], axis);
  const there = axis === "epoch" ? points.filter((row) => row.epoch > 0) : points;
  alive.show(line(there, (row) => row.alive), line(there, (row) => row.trainers), axis);
}
