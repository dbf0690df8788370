// A map of who reaches whom, and how. The peer that shows it stands in the middle; those that can be dialed stand nearer
// to it than those that cannot. With many peers only the connections of the chosen one are drawn.

import { again, get } from "/static/api.js";
import { $, element, link, peerPath, reconcile, say, svg, write } from "/static/dom.js";
import { count, plural } from "/static/format.js";
import { follow } from "/static/live.js";

const REFRESH_SECONDS = 10;
const FEW = 24; // up to so many peers stand in a ring, with their names and all connections
const MOST_NAMED = 12; // of the chosen peer's connections, in words
const GOLDEN = Math.PI * (3 - Math.sqrt(5)); // the angle between two seeds of a sunflower: no place is empty, none full
const WAYS = ["direct", "punched", "relayed"];
const IN_WORDS = { direct: "directly", punched: "directly, opened by both ends together", relayed: "through a relay" };

const drawing = $("drawing");
const root = svg("svg", { role: "listbox", tabindex: "0", "aria-label": "Peers", "aria-orientation": "horizontal" });
const lines = svg("g", { "aria-hidden": "true" });
const dots = svg("g", { role: "presentation" });
root.append(lines, dots);
drawing.append(root);

const view = { nodes: [], edges: [], chosen: null, places: new Map(), seen: "" };

function called(node) {
  return node.name || node.peer.slice(0, 10);
}

// Who can be dialed first, then who cannot; within these by role and name, so that everyone keeps a place.
function order(a, b) {
  const rank = (node) => [node.me ? 0 : 1, node.dialable === false ? 1 : 0, { monitor: 0, auxiliary: 1 }[node.role] ?? 2];
  const [left, right] = [rank(a), rank(b)];
  const differing = left.findIndex((value, i) => value !== right[i]);
  return differing >= 0 ? left[differing] - right[differing] : called(a) < called(b) ? -1 : 1;
}

function place(width, height) {
  const [x, y] = [width / 2, height / 2];
  const others = view.nodes.length - 1;
  const few = view.nodes.length <= FEW;
  const across = few ? Math.max(60, x - 110) : Math.min(x, y) - 12;
  const down = few ? Math.max(60, y - 40) : across;
  view.places = new Map(view.nodes.map((node, i) => {
    if (i === 0) return [node.peer, { x, y, angle: 0 }];
    const top = others > 2 ? -Math.PI / 2 : 0; // two stand beside the middle
    const angle = few ? top + (2 * Math.PI * (i - 1)) / others : i * GOLDEN;
    const away = few ? 1 : Math.sqrt(i / others);
    return [node.peer, { x: x + Math.cos(angle) * across * away, y: y + Math.sin(angle) * down * away, angle }];
  }));
}

function draw() {
  const width = drawing.clientWidth;
  const height = drawing.clientHeight;
  root.toggleAttribute("hidden", view.nodes.length === 0);
  if (width === 0 || view.nodes.length === 0) return;
  root.setAttribute("viewBox", `0 0 ${width} ${height}`);
  place(width, height);
  const few = view.nodes.length <= FEW;
  const radius = few ? 8 : Math.max(1.8, Math.min(6, Math.min(width, height) / Math.sqrt(view.nodes.length) / 5.4));
  reconcile(dots, view.nodes, (node) => node.peer, createDot, (dot, node) => updateDot(dot, node, radius, few && width >= 480));
  choose(view.chosen ?? view.nodes[0].peer);
}

function createDot(node) {
  return svg("g", { role: "option", id: `peer-${node.peer}` }, svg("title"), svg("path"), svg("text"));
}

function updateDot(dot, node, radius, named) {
  const { x, y, angle } = view.places.get(node.peer);
  const [title, shape, text] = dot.children;
  dot.setAttribute("class", `dot-of ${node.dialable === false ? "hollow" : ""} ${node.me ? "me" : ""}`);
  dot.setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
  dot.setAttribute("aria-label", about(node));
  write(title, called(node));
  shape.setAttribute("d", outline(node.role, node.me ? radius * 1.3 : radius));
  shape.setAttribute("class", "node");
  const side = node.me ? 0 : Math.abs(Math.cos(angle)) < 0.3 ? 0 : Math.sign(Math.cos(angle));
  text.setAttribute("text-anchor", side === 0 ? "middle" : side > 0 ? "start" : "end");
  text.setAttribute("x", side * (radius + 7));
  text.setAttribute("y", side !== 0 ? 4 : !node.me && Math.sin(angle) < 0 ? -radius - 7 : radius + 19);
  write(text, named ? shortened(called(node)) : "");
}

function shortened(name) {
  return name.length > 16 ? `${name.slice(0, 15)}…` : name;
}

function outline(role, r) {
  if (role === "monitor") return `M0 ${-r * 1.2}L${r * 1.2} 0L0 ${r * 1.2}L${-r * 1.2} 0Z`;
  if (role === "auxiliary") return `M${-r * 0.9} ${-r * 0.9}h${r * 1.8}v${r * 1.8}h${-r * 1.8}Z`;
  return `M${-r} 0a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0Z`;
}

function about(node) {
  const dialed = { true: "others can dial it", false: "nobody can dial it" }[node.dialable] ?? "not known who can dial it";
  return `${called(node)}, ${node.role}${node.me ? ", this one" : ""}, ${dialed}`;
}

// Those of the chosen peer over the others, which are there only while there are few.
function drawLines() {
  const mine = view.edges.filter((edge) => edge.source === view.chosen || edge.target === view.chosen);
  const others = view.nodes.length <= FEW ? view.edges.filter((edge) => !mine.includes(edge)) : [];
  lines.replaceChildren(...WAYS.map((way) => line(others, way, "")), ...WAYS.map((way) => line(mine, way, " chosen")));
}

function line(edges, way, kind) {
  const drawn = edges.filter((edge) => edge.way === way && view.places.has(edge.source) && view.places.has(edge.target));
  const segment = ({ source, target }) => {
    const [a, b] = [view.places.get(source), view.places.get(target)];
    return `M${a.x.toFixed(1)} ${a.y.toFixed(1)}L${b.x.toFixed(1)} ${b.y.toFixed(1)}`;
  };
  return svg("path", { class: `way ${way}${kind}${drawn.length > 60 ? " many" : ""}`, d: drawn.map(segment).join("") });
}

function choose(peer) {
  const node = view.nodes.find((each) => each.peer === peer) ?? view.nodes[0];
  view.chosen = node.peer;
  for (const dot of dots.children) {
    const mine = dot.dataset.key === node.peer;
    dot.setAttribute("aria-selected", String(mine));
    if (mine) root.setAttribute("aria-activedescendant", dot.id);
  }
  drawLines();
  $("chosen-name").replaceChildren(link(peerPath(node.peer), called(node)));
  write($("chosen-about"), about(node).slice(called(node).length + 2));
  drawWays(node);
}

function drawWays(node) {
  const named = new Map(view.nodes.map((each) => [each.peer, called(each)]));
  const mine = view.edges.filter((edge) => edge.source === node.peer || edge.target === node.peer);
  const ways = WAYS.map((way) => ({ way, edges: mine.filter((edge) => edge.way === way) })).filter(({ edges }) => edges.length > 0);
  reconcile($("chosen-ways"), ways, ({ way }) => way, () => element("li", "", element("bdi")), (item, { way, edges }) => {
    const others = edges.map((edge) => {
      const other = edge.source === node.peer ? edge.target : edge.source;
      return `${named.get(other) ?? other.slice(0, 10)}${edge.via ? ` (at ${named.get(edge.via) ?? edge.via.slice(0, 10)})` : ""}`;
    });
    const more = others.length > MOST_NAMED ? ` and ${count(others.length - MOST_NAMED)} more` : "";
    write(item.firstChild, `${IN_WORDS[way]}, ${plural(others.length, "peer")}: ${others.slice(0, MOST_NAMED).join(", ")}${more}`);
  });
}

function note() {
  const hollow = view.nodes.filter((node) => node.dialable === false).length;
  const open = view.nodes.filter((node) => node.dialable === true).length;
  return view.nodes.length ? `${plural(view.nodes.length, "peer")}: ${count(open)} can be dialed, ${count(hollow)} cannot` : "\u00a0";
}

// ---- what arrives, and what the reader does

again(REFRESH_SECONDS, async () => {
  try {
    const { nodes, edges, sentence } = await get("reach");
    say($("map-error"), "");
    const seen = JSON.stringify([nodes, edges]);
    if (seen === view.seen) return;
    Object.assign(view, { nodes: nodes.toSorted(order), edges, seen });
    write($("map-sentence"), sentence || "\u00a0");
    write($("map-note"), note());
    $("map").hidden = nodes.length === 0;
    $("map-empty").hidden = nodes.length > 1;
    draw();
  } catch (error) {
    say($("map-error"), error.message);
  }
});

root.addEventListener("click", (event) => {
  const dot = event.target.closest("[role=option]");
  if (dot) choose(dot.dataset.key);
});

root.addEventListener("keydown", (event) => {
  const at = view.nodes.findIndex((node) => node.peer === view.chosen);
  const last = view.nodes.length - 1;
  const there = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: last }[event.key];
  if (event.key === "Enter" && at >= 0) location.assign(peerPath(view.chosen));
  if (there === undefined || last < 0) return;
  event.preventDefault();
  choose(view.nodes[Math.max(0, Math.min(last, there))].peer);
});

$("map-search").addEventListener("input", () => {
  const wanted = $("map-search").value.trim().toLowerCase();
  const found = wanted ? view.nodes.filter((node) => `${node.name}\n${node.peer}`.toLowerCase().includes(wanted)) : [];
  write($("map-found"), wanted ? (found.length ? `${count(found.length)} found, the first is shown` : "no peer is called that") : "\u00a0");
  if (found.length) choose(found[0].peer);
});

new ResizeObserver(draw).observe(drawing);
follow({});
