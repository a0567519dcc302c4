// The contribution graph: the picture that pages of results have too (graph.js), and what else a chosen node selects.
import { card, error, h, matrix, menu, percent, quoted, sum, worded } from "./draw.js";
import { NOTHING, isPair } from "./state.js";

const STEPS = [20, 40, 80, 120];
const HEAD = /^L(\d+)H(\d+)/;
const MLP = /^(MLP\d+)/;
let lost = {}; // what the live model loses with a drawn node patched, by the node's key
let last = {}; // the card of an answer stands while only what is chosen changes: pins, groups and zoom stay

// A chosen node is selected in every view: its head or MLP opens, and its token is marked. A group has no name there.
function selection({ name, node, at, kind }) {
  if (name === undefined || ["target", "others"].includes(kind)) return { ...NOTHING, pick: node };
  const head = HEAD.exec(name);
  return { ...NOTHING, pick: node, at: Number(at), layer: head ? Number(head[1]) : undefined, head: head ? Number(head[2]) : undefined, node: MLP.exec(name)?.[1] };
}

export function graphView(view, state, go, about) {
  if (last.view !== view) { lost = {}; last = { view, drawn: drawn(view, state, about) }; }
  Object.assign(last, { go, state });
  const graph = last.drawn.querySelector(".circuit");
  const measure = last.drawn.querySelector("#measure");
  measure?.setAttribute("aria-pressed", String(Boolean(state.measured)));
  for (const mark of graph.querySelectorAll(".t")) {
    const [, layer, head] = HEAD.exec(mark.dataset.name) ?? [];
    mark.classList.toggle("linked", head === undefined ? state.node !== undefined && MLP.exec(mark.dataset.name)?.[1] === state.node : Number(layer) === state.layer && Number(head) === state.head);
  }
  requestAnimationFrame(() => { // once it is on the page
    if (isPair(state)) window.tensorlensGraphs.measure(graph, state.measured ? lost : {});
    window.tensorlensGraphs.arrange(graph, state.arranged ?? "");
    const isDrawn = window.tensorlensGraphs.select(graph, state.pick);
    const hidden = state.pick?.includes("@") && !isDrawn;
    last.drawn.querySelector(".hint").textContent = hidden ? `${state.pick.replace("@", " at ")} is not one of the strongest nodes of this question. Choose more nodes to see it.` : "";
  });
  return last.drawn;
}

function drawn(view, state, about) {
  const { nodes, edges } = view;
  const holder = h("div");
  holder.innerHTML = view.picture; // the library's own, every text in it escaped
  holder.addEventListener("chosen", ({ detail: { node, arranged } }) => last.go({ ...(node ? selection(node) : NOTHING), arranged: arranged || undefined }));
  const count = h("select", { "aria-label": "Nodes", onchange: (event) => last.go({ nodes: Number(event.target.value) || undefined }) },
    h("option", { value: "", selected: state.nodes === undefined }, "80 % of the inputs"), STEPS.map((step) => h("option", { value: step, selected: step === state.nodes }, step)));
  const rule = isPair(state) ? null : h("select", { id: "rule", "aria-label": "Rule", onchange: (event) => last.go({ rule: event.target.value || undefined, method: undefined }) },
    about.rules.map((name) => h("option", { value: name === "frozen" ? "" : name, selected: name === (state.rule ?? "frozen") }, name)));
  const isRouted = nodes.some(({ name }) => /^L\d+H\d+\.[qkv]$/.test(name));
  const table = { columns: ["source", "source position", "reader", "reader position", "weight"], rows: edges.map(([a, b, weight]) => [nodes[a].name, nodes[a].pos, nodes[b].name, nodes[b].pos, weight]) };
  const part = view.covered ? "" : state.nodes ? ` (partial: ${percent(view.coverage)})` : ` (${percent(view.coverage)}: the limit of ${view.count} nodes is reached)`;
  const { bias } = nodes.at(-1);
  return card("graph-card", `${isPair(state) ? "How the change reached the answer" : "How the answer came about"}${part}`,
    `${worded(view.label)}; the ${view.count} nodes drawn carry ${percent(view.coverage)} of the answer’s inputs, added up without their signs; all others are summed by layers`,
    h("div", { class: "row" }, h("label", { class: "inline" }, "Nodes ", count), rule ? h("label", { class: "inline", title: "What stands in place of what is not linear, here and in the scores of tokens" }, "Rule ", rule) : null,
      isPair(state) && !about.two_models ? h("button", { type: "button", id: "measure", title: "Patch every drawn node with its value of the second run, one by one", onclick: () => last.go({ measured: last.state.measured ? undefined : 1 }) }, "Measure live") : null, menu("graph", "graph", table, view.code, () => window.tensorlensGraphs.svg(holder.firstChild))),
    holder, h("p", { class: "soft hint" }),
    sum([["nodes drawn", view.total - view.others - bias], ["+ all others", view.others], ["+ bias", bias || null], ["=", view.total], ["relative error of all parts", error(view.gap), view.gap]]),
    h("p", { class: "soft" }, "Node totals overlap, so they do not add up. The inputs of any one node do. A head is followed by the token that it attends to most.",
      isRouted ? " A head is .v for its values, .q and .k for where its queries and keys made it attend. Of two tokens such as “a| b” the second run has the second." : ""));
}

// What patching each drawn node takes from the live model's answer, beside what the difference finds; marks the graph.
export function measuredView(prompt, view, state, go) {
  lost = Object.fromEntries(view.rows.flatMap((row) => row.nodes.map((node) => [node, row.live])));
  requestAnimationFrame(() => { if (last.drawn?.isConnected) window.tensorlensGraphs.measure(last.drawn.querySelector(".circuit"), lost); });
  const names = view.rows.map((row) => `${row.name} ${quoted(prompt.tokens[row.at])} ${row.at}`);
  const columns = ["difference", "live"];
  const values = view.rows.map((row) => columns.map((column) => row[column]));
  const table = { columns: ["node", ...columns], rows: names.map((name, at) => [name, ...values[at]]) };
  return card("measured", "What the live model loses", `${worded(view.label)}: each drawn node with its value of the second run, the others as they respond`,
    menu("measured", "measured", table, view.code),
    matrix(names, ["total effect, by the difference", "patched live"], values, { label: "Drawn nodes, by the difference and patched live; press a number to select the node", pick: (row) => go({ pick: view.rows[row].nodes[0] }), selected: (row) => view.rows[row].nodes.includes(state.pick) }),
    sum([["the first run", view.total]]),
    h("p", { class: "soft hint" }, "In the graph the fill of a node is what the difference finds, its outline what the live model loses: blue adds to the answer, orange takes from it. A head is patched whole, with its values, queries and keys. Neither column adds up: an effect that passes through two nodes counts for both."));
}
