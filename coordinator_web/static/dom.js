// Nodes made and changed by hand. Whatever a peer chose (names, reasons) becomes text nodes and nothing else.

import * as format from "/static/format.js";

export const $ = (id) => document.getElementById(id);

export function element(tag, className = "", ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// Sets a text only when it changed, so that a selection in it survives.
export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Shows a line only while it has something to say.
export function say(node, text) {
  node.hidden = text === "";
  write(node, text);
}

// Writes values into the nodes that name them: data-of="run.epoch count" is `values.run.epoch` as `format.count` writes
// it. Nodes with data-maybe are shown only while they have something to say.
export function fill(values) {
  for (const node of document.querySelectorAll("[data-of]")) {
    const [path, as] = node.dataset.of.split(" ");
    const [first, ...others] = path.split(".");
    if (!(first in values)) continue;
    const value = others.reduce((found, key) => found?.[key], values[first]);
    const text = as ? format[as](value) : (value ?? "");
    if (node.hasAttribute("data-maybe")) say(node, text);
    else write(node, text || "\u00a0");
  }
}

// Makes the children of `parent` show `items`, in order; keeps the nodes of items that stay.
export function reconcile(parent, items, keyOf, create, update) {
  const old = new Map(Array.from(parent.children, (node) => [node.dataset.key, node]));
  items.forEach((item, index) => {
    const key = String(keyOf(item));
    let node = old.get(key);
    if (node === undefined) {
      node = create(item);
      node.dataset.key = key;
    }
    old.delete(key);
    update(node, item);
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] ?? null);
  });
  for (const node of old.values()) node.remove();
}

// Tables name their roles: on a phone they become cards, which would lose them.
export function cell(label, className = "", text = "") {
  const node = element("td", className, ...(text ? [text] : []));
  node.setAttribute("role", "cell");
  node.dataset.label = label;
  return node;
}

export function row(...cells) {
  const node = element("tr", "", ...cells);
  node.setAttribute("role", "row");
  return node;
}

export function link(href, text, className = "") {
  const node = element("a", className, element("bdi", "", text));
  node.href = href;
  return node;
}

export function peerPath(id) {
  return `/peers/${encodeURIComponent(id)}`;
}
