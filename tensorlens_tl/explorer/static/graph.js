// The contribution graph: the strongest nodes and the edges between them, and the sums of the node that is picked.
import { bars, card, error, h, largest, menu, number, percent, quoted, s, sum, together, visible } from "./draw.js";
import { layout, shortName as short } from "./layout.js";
import { NOTHING, isPair } from "./state.js";

const STEPS = [20, 40, 80, 120];
let shown = 60; // edges that are drawn; it only changes the drawing, so it is no part of the address

export const keyOf = (node) => `${node.name}@${node.pos}`;
const HEAD = /^L(\d+)H(\d+)/;
const MLP = /^(MLP\d+)/;
const PATCH = /^patch (?=\d+,\d+$)/; // a column of a patch is called by the patch's row and column
const told = (node) => (node.kind === "others" ? node.name : `${short(node)} at ${quoted(node.token)} ${node.pos}`);

// A picked node is selected in every view: its head or MLP opens, and its token is marked.
function selection(node) {
  const head = HEAD.exec(node.name);
  const mlp = MLP.exec(node.name);
  return {
    ...NOTHING, pick: keyOf(node), at: node.pos,
    layer: head ? Number(head[1]) : undefined, head: head ? Number(head[2]) : undefined, node: mlp?.[1],
  };
}

const isLinked = (node, state) => {
  const head = HEAD.exec(node.name);
  if (head) return Number(head[1]) === state.layer && Number(head[2]) === state.head;
  return MLP.exec(node.name)?.[1] === state.node && state.node !== undefined;
};

// Nodes that are not drawn, as one: what enters each node sums on the picture.
export function withOthers({ nodes, edges, ...view }) {
  const { pos, token } = nodes.at(-1);
  const others = { name: "all other nodes", kind: "others", layer: -1, pos, token, weight: null, others: 0, bias: 0 };
  const from = nodes.flatMap((node, at) => (node.others ? [[nodes.length, at, node.others]] : []));
  return { ...view, nodes: [...nodes, others], edges: [...edges, ...from].sort((a, b) => Math.abs(b[2]) - Math.abs(a[2])), target: nodes.at(-1) };
}

export function graphView(answer, state, go, width) {
  const view = withOthers(answer);
  const nodes = view.nodes;
  const place = layout(nodes, width < 900 ? width - 40 : width - 330);
  const picked = nodes.find((node) => keyOf(node) === state.pick);
  const shell = h("div", { class: "scroll graph-scroll" });
  const said = h("output", { class: "soft" });
  const most = Math.min(view.edges.length, 300);
  const paint = () => {
    const count = Math.min(shown, most);
    said.textContent = `${count} of ${view.edges.length}`;
    const before = shell.scrollLeft;
    shell.replaceChildren(drawing(view, place, state, picked, count, go));
    shell.scrollLeft = before;
  };
  const slider = h("input", { type: "range", min: 1, max: most, value: Math.min(shown, most), "aria-label": "Edges that are drawn", oninput: (event) => { shown = Number(event.target.value); paint(); } });
  const count = h("select", { "aria-label": "Nodes", onchange: (event) => go({ nodes: Number(event.target.value) || undefined }) },
    h("option", { value: "", selected: state.nodes === undefined }, "80 % of the answer"), STEPS.map((step) => h("option", { value: step, selected: step === state.nodes }, step)));
  paint();
  const middle = place.columns.find((column) => column.pos === view.target.pos);
  requestAnimationFrame(() => { shell.scrollLeft = middle.x - shell.clientWidth / 2; }); // a narrow screen begins at the answer
  const table = { columns: ["source", "source position", "reader", "reader position", "weight"], rows: view.edges.map(([a, b, weight]) => [nodes[a].name, nodes[a].pos, nodes[b].name, nodes[b].pos, weight]) };
  const part = view.covered ? "" : ` (partial: ${percent(view.coverage)})`;
  return card("graph", `${isPair(state) ? "How the change reached the answer" : "How the answer came about"}${part}`,
    `${view.label}; the ${nodes.length - 2} nodes drawn carry ${percent(view.coverage)} of what enters the answer, all others are one node`,
    h("div", { class: "row" }, h("label", { class: "inline" }, "Nodes ", count), h("label", { class: "inline" }, "Edges ", slider, said),
      menu("graph", "graph", table, view.code, () => picture(view, place, state, Math.min(shown, most)))),
    h("div", { class: "beside" }, shell, nodePanel(view, picked, state, go)),
    sum([["nodes drawn", view.total - view.target.others - view.target.bias], ["+ all others", view.target.others], ["+ bias", view.target.bias || null], ["=", view.total], ["gap of all parts", error(view.gap), view.gap]]),
    h("p", { class: "soft" }, "Node weights do not add up: what passes two nodes counts for both. What enters one node does.",
      isPair(state) ? " A head is .v for its values, .q and .k for where its queries and keys made it attend." : ""));
}

function drawing(view, place, state, picked, count, go) {
  const { nodes, edges } = view;
  const most = largest(nodes.filter((node) => node !== view.target).map((node) => node.weight));
  const widest = largest(edges.map((edge) => edge[2]));
  const at = picked ? nodes.indexOf(picked) : -1;
  const lines = edges.slice(0, count).map(([from, to, weight]) => {
    const size = Math.abs(weight) / widest;
    const on = from === at || to === at;
    return s("path", {
      d: curve(nodes[from], nodes[to], place.high), fill: "none", class: `${weight < 0 ? "less" : "more"}${on ? " on" : ""}`,
      "stroke-width": (0.75 + 3.5 * size).toFixed(2), "data-ends": `${from},${to}`,
    }, s("title", {}, `${told(nodes[from])} → ${told(nodes[to])}: ${number(weight)}`));
  });
  const marks = nodes.map((node, number_) => mark(node, number_, most, place, state, node === picked, picked, () => go(node === picked ? NOTHING : ["target", "others"].includes(node.kind) ? { ...NOTHING, pick: keyOf(node) } : selection(node))));
  const names = place.rows.map((row) => s("text", { x: 4, y: row.y + 4, class: "axis" }, row.name));
  const bands = place.rows.filter((_, at) => at % 2 === 0).map((row) => s("rect", { x: 0, y: row.top, width: place.width, height: row.high, class: "band" }));
  const tokens = place.columns.map((column) => s("g", {},
    s("line", { x1: column.left, x2: column.left, y1: 0, y2: place.height - 20, class: "rule" }),
    s("text", { x: column.x, y: place.height - 8, "text-anchor": "middle", class: column.pos === state.at ? "axis linked" : "axis" },
      `${visible(column.token).trim().replace(PATCH, "").slice(0, Math.max(5, Math.floor(column.width / 8)))}`, s("title", {}, `${column.pos} ${visible(column.token)}`))));
  return s("svg", { width: place.width, height: place.height, viewBox: `0 0 ${place.width} ${place.height}`, class: picked ? "picked" : "", role: "group", "aria-label": "Contribution graph; columns are tokens, rows are layers", "data-rove": "" },
    bands, tokens, names, s("g", { class: "edges" }, lines), s("g", {}, marks));
}

const curve = (from, to, high) => {
  const [y0, y1] = [from.y - high / 2, to.y + high / 2];
  const bend = Math.max(12, (y0 - y1) / 2);
  return `M${from.x.toFixed(1)},${y0.toFixed(1)} C${from.x.toFixed(1)},${(y0 - bend).toFixed(1)} ${to.x.toFixed(1)},${(y1 + bend).toFixed(1)} ${to.x.toFixed(1)},${y1.toFixed(1)}`;
};

function mark(node, index, most, place, state, isPicked, picked, choose) {
  const strength = node.weight === null || node.kind === "target" ? 0 : 0.06 + 0.6 * Math.min(1, Math.abs(node.weight) / most);
  const kinds = ["node", isLinked(node, state) && "linked"].filter(Boolean).join(" ");
  return s("g", {
    class: kinds, role: "button", tabindex: (picked ? isPicked : node.kind === "target") ? 0 : -1, "data-item": "", "data-node": keyOf(node), "data-number": index,
    "aria-pressed": String(isPicked), "aria-label": `${told(node)}${node.weight === null ? "" : `: ${number(node.weight)}`}`, onclick: choose,
    onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(); } },
    onpointerenter: (event) => hover(event.currentTarget, index), onpointerleave: (event) => hover(event.currentTarget, -1),
    onfocus: (event) => hover(event.currentTarget, index), onblur: (event) => hover(event.currentTarget, -1),
  },
  s("title", {}, `${told(node)}${node.weight === null ? "" : `: ${node.weight}`}`),
  s("rect", { x: node.x - node.wide / 2, y: node.y - place.high / 2, width: node.wide, height: place.high, rx: 4, class: "ground" }),
  s("rect", { x: node.x - node.wide / 2, y: node.y - place.high / 2, width: node.wide, height: place.high, rx: 4, class: node.weight < 0 ? "less" : "more", "fill-opacity": strength.toFixed(3) }),
  s("text", { x: node.x, y: node.y + 4, "text-anchor": "middle" }, short(node)));
}

function hover(mark_, index) {
  const svg = mark_.ownerSVGElement;
  svg.classList.toggle("hovered", index >= 0);
  for (const path of svg.querySelectorAll(".edges path")) path.classList.toggle("near", path.dataset.ends.split(",").includes(String(index)));
}

function nodePanel(view, node, state, go) {
  if (!node && state.pick?.includes("@")) return h("div", { class: "panel empty" }, h("h3", {}, state.pick.replace("@", " at ")), h("p", { class: "soft" }, "is not one of the strongest nodes of this question. Choose more nodes to see it."));
  if (!node) {
    const panel = nodePanel(view, view.target, state, go);
    panel.append(h("p", { class: "soft" }, "Press a node to read what enters it and where it leads, and to open its head or MLP below. Blue adds to the answer, orange takes from it."));
    return panel;
  }
  const at = view.nodes.indexOf(node);
  const listed = (near, far) => view.edges.filter((edge) => edge[near] === at).map((edge) => ({ name: told(view.nodes[edge[far]]), score: edge[2], pick: edge[far] }));
  const into = listed(1, 0);
  const out = listed(0, 1);
  const jump = (number_) => { const to = view.nodes[number_]; go(["target", "others"].includes(to.kind) ? { ...NOTHING, pick: keyOf(to) } : selection(to)); };
  const [near, unseen] = [into.filter((row) => row.pick !== view.nodes.length - 1), into.find((row) => row.pick === view.nodes.length - 1)];
  const rest = near.slice(6).reduce((total, row) => total + row.score, 0);
  const entering = [...near.slice(0, 6), ...(near.length > 6 ? [{ name: `${near.length - 6} other edges`, score: rest, muted: true }] : []), { name: "its own bias", score: node.bias, muted: true }, { ...unseen, name: "all other nodes", score: node.others, muted: true }];
  const shown = together(largest([node.weight, ...entering.map((row) => row.score)]));
  const isSource = ["embedding", "bias", "others"].includes(node.kind);
  return h("div", { class: "panel" }, h("h3", {}, told(node)),
    isSource ? h("p", { class: "soft" }, node.kind === "others" ? "All that is not drawn, as one node: its edges make up what enters each node." : "It is where the sum begins: nothing enters it.") : h("div", {}, h("small", {}, "what enters it"),
      bars(entering, { label: "What enters the node", pick: jump, shown }), sum([["=", node.weight]], shown)),
    out.length ? h("div", {}, h("small", {}, "where it leads; no sum, as nodes are left out"), bars(out.slice(0, 6), { label: "Where the node leads", pick: jump })) : null);
}

// The drawing as a file: colours that a page's style gives are written into it.
function picture(view, place, state, count) {
  const svg = drawing(view, place, { ...state, pick: undefined }, undefined, count, () => {});
  svg.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  svg.setAttribute("font-family", "sans-serif");
  svg.setAttribute("font-size", "11");
  for (const path of svg.querySelectorAll("path")) { path.setAttribute("stroke", path.classList.contains("less") ? "#eb7828" : "#4292e6"); path.setAttribute("stroke-opacity", 0.5); }
  for (const rect of svg.querySelectorAll("rect:not(.band)")) rect.setAttribute("fill", rect.classList.contains("ground") ? "#fff" : rect.classList.contains("less") ? "#eb7828" : "#4292e6");
  for (const rect of svg.querySelectorAll("rect.band")) rect.setAttribute("fill", "#f5f5f6");
  for (const rect of svg.querySelectorAll("rect.ground")) rect.setAttribute("stroke", "#999");
  for (const line of svg.querySelectorAll("line")) line.setAttribute("stroke", "#eee");
  svg.prepend(s("rect", { width: "100%", height: "100%", fill: "#fff" }));
  return new XMLSerializer().serializeToString(svg);
}
