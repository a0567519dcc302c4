// What was pressed, opened: a head, the neurons of an MLP, a feature, and the model without one of them.
import { bars, card, chips, error, h, largest, menu, number, plain, quoted, sum, together, visible } from "./draw.js";
import { isPair } from "./state.js";

export function nothingView() {
  return card("empty", "Look inside", null, null, h("p", { class: "soft" },
    "Press a head or an MLP in the table, or a node of the graph: here you see where a head attends, what it moves and why, and which neurons of an MLP write to the answer."));
}

export function headView(prompt, view, state, go) {
  const moved = { columns: ["token", "attention", "moved"], rows: prompt.tokens.map((token, at) => [`${at} ${visible(token)}`, view.pattern[at], view.moved[at]]) };
  const change = view.other_pattern?.map((value, at) => view.pattern[at] - value);
  const key = quoted(prompt.tokens[view.key]);
  const whyShown = view.why.refused ? null : together(largest([view.why.total, ...view.why.rows.map((row) => row.score)]));
  const why = view.why.refused
    ? h("p", { class: "soft" }, view.why.refused)
    : h("div", {}, bars(view.why.rows, { label: "Why it attends there", shown: whyShown }),
      sum([[view.why.of === "pattern" ? "all: change of attention" : "all: attention score", view.why.total], ["gap", error(view.why.gap), view.why.gap]], whyShown));
  const total = view.moved.reduce((a, b) => a + b, 0);
  return card("head", `Head ${view.name}`, `${isPair(state) ? "change of its" : "its"} direct effect ${number(view.score)}`,
    h("div", { class: "row" },
      isPair(state) ? null : h("button", { type: "button", id: "ablate", onclick: () => go({ node: view.name }) }, "Take it away"),
      menu(`Head ${view.name}`, view.name, moved, view.code)),
    h("h3", {}, change ? "How its attention changed" : "Where it attends"),
    chips(prompt.tokens, { values: change ?? view.pattern, selected: view.key, label: "Attention; press a token to ask why", pick: (at) => go({ key: at }) }),
    h("h3", {}, "What it moves to the answer, by source token"),
    chips(prompt.tokens, { values: view.moved, label: "Effects by source token" }),
    sum([["tokens", total], ["=", view.score], ["gap", error(Math.abs(total - view.score)), total - view.score]]),
    h("div", { class: "pair" },
      h("div", {}, h("h3", {}, `Why it ${change ? "turned" : "attends"} to ${key}`),
        h("small", {}, change ? "by what its query and its keys read" : "source read by the query × source read by the key"), why),
      h("div", {}, h("h3", {}, `What it promotes, reading ${quoted(view.reads)}`), h("small", {}, "by its weights alone: no part of a sum"),
        view.promotes.length ? bars(view.promotes.map((of) => ({ name: of.text, score: of.score })), { label: "Promoted tokens" }) : h("p", { class: "soft" }, "Not defined for this model."))));
}

export function neuronsView(view, state, go) {
  const rows = [...view.top, ...(view.count ? [{ name: `${view.count} other neurons`, score: view.others, muted: true }] : [])];
  const short = rows.map((row) => ({ ...row, name: row.name.replace(`${view.node}.`, "") }));
  const table = { columns: ["neuron", "score"], rows: rows.map((row) => [row.name, row.score]) };
  return card("neurons", view.node, `${view.label}; direct effects of its neurons`,
    h("div", { class: "row" },
      isPair(state) ? null : h("button", { type: "button", id: "ablate", onclick: () => go({ layer: undefined, head: undefined, node: view.node, pick: "without" }) }, "Take it away"),
      menu(view.node, view.node, table, view.code)),
    bars(short, { label: `Neurons of ${view.node}` }),
    sum([["neurons listed", view.total - view.others], ["+ others", view.others], ["=", view.total], ["gap", error(view.gap), view.gap]]));
}

export function ablateView(view) {
  const rows = [{ name: "live model", score: view.live }, { name: "frozen model", score: view.frozen }];
  const table = { columns: ["model", "loss"], rows: rows.map((row) => [row.name, row.score]) };
  return card("ablate", `Without ${view.node}`, "what the answer loses when its output is taken away",
    menu(`Without ${view.node}`, "ablation", table, view.code), bars(rows, { label: "Losses" }),
    sum([["before", view.before], ["− lost, live", view.live], ["= after", view.after]]),
    h("p", { class: "soft" }, "In the live model attention, activations and norms respond; the frozen model holds them."));
}

export function featureView(prompt, view, state) {
  const table = { columns: ["token", "score"], rows: prompt.tokens.map((token, at) => [`${at} ${visible(token)}`, view.scores[at]]) };
  const parts = view.scores.reduce((a, b) => a + b, 0);
  const name = [view.name, view.label].filter(Boolean).join(" · ");
  return card("feature", name, `at ${quoted(prompt.tokens[view.at])}, position ${view.at}: ${view.value ? `active with ${plain(view.value)}` : "not active"}`,
    menu(name, view.name, table, view.code),
    h("h3", {}, "Which tokens its pre-activation comes from"),
    chips(prompt.tokens, { values: view.scores, label: "Tokens that make it active" }),
    sum([["tokens", parts], ["+ bias", view.bias], ["=", view.total], ["gap", error(view.gap), view.gap]]),
    h("h3", {}, "What it promotes"), h("small", {}, "logits for one unit of its decoder, by the weights alone: no part of a sum"),
    bars(view.promotes.map((of) => ({ name: of.text, score: of.score })), { label: "Promoted tokens" }));
}
