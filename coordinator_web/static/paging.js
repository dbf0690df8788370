// A page of a long list, with buttons to the previous and the next one.

import { element, reconcile } from "/static/dom.js";
import { count } from "/static/format.js";

const ROWS = 25;

export class Pages {
  // `body` holds the rows. `load(offset, limit)` resolves to {total, rows}; `onTotal(total)` is called. `expand` makes
  // what is drawn from the rows of a page.
  constructor({ body, load, keyOf, create, update = () => {}, onTotal = () => {}, expand = (rows) => rows, size = ROWS }) {
    Object.assign(this, { body, load, keyOf, create, update, onTotal, expand, size });
    this.offset = 0;
    this.asked = 0;
    this.where = element("span", "where");
    this.back = this.button("Previous", -1);
    this.forth = this.button("Next", 1);
    this.bar = element("div", "pager", this.back, this.where, this.forth);
    this.bar.hidden = true;
    (body.closest(".scroll") ?? body).after(this.bar);
  }

  button(words, direction) {
    const node = element("button", "", words);
    node.type = "button";
    node.addEventListener("click", () => {
      this.offset = Math.max(0, this.offset + direction * this.size);
      this.refresh();
    });
    return node;
  }

  async refresh() {
    this.asked += 1;
    const turn = this.asked;
    const { total, rows } = await this.load(this.offset, this.size);
    if (turn !== this.asked) return; // another page was asked for meanwhile
    if (rows.length === 0 && this.offset > 0) await this.restart(); // the list has become shorter
    else this.draw(total, rows);
  }

  // Back to the first page, for another order or another search.
  restart() {
    this.offset = 0;
    return this.refresh();
  }

  draw(total, rows) {
    reconcile(this.body, this.expand(rows), this.keyOf, this.create, this.update);
    this.bar.hidden = total <= this.size;
    this.where.textContent = `${count(this.offset + 1)} to ${count(this.offset + rows.length)} of ${count(total)}`;
    this.back.disabled = this.offset === 0;
    this.forth.disabled = this.offset + rows.length >= total;
    this.onTotal(total);
  }
}

// The same for a list that is already here: `show(items)` draws it.
export function pagesOf(options) {
  let items = [];
  const pages = new Pages({ ...options, load: async (offset, limit) => ({ total: items.length, rows: items.slice(offset, offset + limit) }) });
  return (given) => {
    items = given;
    return pages.refresh();
  };
}
