// A long table of which only the rows in sight are fetched and drawn. Space above and below stands for the others.

import { element, reconcile } from "/static/dom.js";

const AROUND = 12; // rows above and below those in sight, so that scrolling and the tab key find them there
const LEAST_HEIGHT = 24;
const WHOLE = 12; // a list of so many is shown whole; a longer one in a box, which ends below a whole row and is …
const MOST_HEIGHT = 608; // … so many pixels high

export class WindowedRows {
  // `scroller`: what scrolls; `body`: the tbody of the rows. `load(offset, limit)` gives {total, rows}.
  constructor({ scroller, body, load, keyOf, create, update, onTotal, onError }) {
    Object.assign(this, { scroller, body, load, keyOf, create, update, onTotal, onError });
    this.height = 53; // of a row, measured once there is one
    this.total = 0;
    this.offset = 0;
    this.rows = [];
    this.asked = 0;
    this.above = spacer();
    this.below = spacer();
    body.before(this.above);
    body.after(this.below);
    let waiting = false;
    scroller.addEventListener("scroll", () => {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => {
        waiting = false;
        this.follow();
      });
    });
  }

  wanted() {
    const top = Math.max(0, this.scroller.scrollTop);
    const first = Math.max(0, Math.floor(top / this.height) - AROUND);
    const count = Math.ceil(this.scroller.clientHeight / this.height) + 2 * AROUND;
    return { first: Math.min(first, Math.max(0, this.total - 1)), count: Math.max(40, count) };
  }

  // Fetches again only when rows in sight are missing.
  follow() {
    const { first, count } = this.wanted();
    const end = Math.min(this.total, first + count);
    const near = AROUND / 2;
    const enough = this.offset <= Math.max(0, first - near) + near && this.offset + this.rows.length >= end - near;
    if (!enough) this.refresh();
  }

  async refresh() {
    const { first, count } = this.wanted();
    this.asked += 1;
    const turn = this.asked;
    try {
      const { total, rows } = await this.load(first, count);
      if (turn !== this.asked) return; // another one was asked for meanwhile
      Object.assign(this, { total, rows, offset: first });
      if (rows.length === 0 && total > 0) { // the list has become shorter than where it was read
        this.scroller.scrollTop = 0;
        this.offset = 0;
      }
      this.draw();
    } catch (error) {
      this.onError(error);
    }
  }

  // Back to the top, for another order or another search.
  restart() {
    this.scroller.scrollTop = 0;
    return this.refresh();
  }

  fit() {
    const long = this.total > WHOLE;
    const head = this.body.closest("table").tHead.offsetHeight;
    this.scroller.classList.toggle("long", long);
    this.scroller.style.maxHeight = long ? `${head + Math.max(1, Math.floor((MOST_HEIGHT - head) / this.height)) * this.height}px` : "";
  }

  draw() {
    const held = this.body.contains(document.activeElement) ? document.activeElement.closest("tr").dataset.key : null;
    reconcile(this.body, this.rows, this.keyOf, this.create, (node, item) => {
      this.update(node, item);
      node.setAttribute("aria-rowindex", String(this.offset + this.rows.indexOf(item) + 2)); // the head is the first
    });
    const first = this.body.firstElementChild;
    if (first) this.height = Math.max(LEAST_HEIGHT, this.body.getBoundingClientRect().height / this.rows.length || this.height);
    this.fit();
    stretch(this.above, this.offset * this.height);
    stretch(this.below, Math.max(0, this.total - this.offset - this.rows.length) * this.height);
    this.body.closest("table").setAttribute("aria-rowcount", String(this.total + 1));
    if (held && !this.body.contains(document.activeElement)) this.scroller.focus({ preventScroll: true });
    this.onTotal(this.total);
  }
}

function spacer() {
  const node = element("tbody", "spacer", element("tr", "", element("td")));
  node.setAttribute("aria-hidden", "true");
  node.hidden = true;
  return node;
}

function stretch(node, height) {
  node.hidden = height < 1;
  node.querySelector("td").style.height = `${height}px`;
}
