// What was pressed, opened: a head, the neurons of an MLP, a feature, and the model without one of them.
import { bars, card, chips, error, h, largest, menu, number, percent, plain, quoted, sideBySide, sum, together, visible, worded } from "./draw.js";
import { ablated, isPair, toggled } from "./state.js";

const ablateButton = (name, state, go) => h("button", { type: "button", id: "ablate", "aria-pressed": String(ablated(state).includes(name)), onclick: () => go(toggled(state, name)) },
  ablated(state).includes(name) ? "Do not ablate" : ablated(state).length ? "Ablate it, too" : "Ablate");

export function headView(prompt, view, state, go) {
  const moved = { columns: ["token", "attention", "moved"], rows: prompt.tokens.map((token, at) => [`${at} ${visible(token)}`, view.pattern[at], view.moved[at]]) };
  const change = view.other_pattern?.map((value, at) => view.pattern[at] - value);
  const total = view.moved.reduce((a, b) => a + b, 0);
  const says = (at) => (change ? `${percent(view.pattern[at])} in the first run, ${percent(view.other_pattern[at])} in the second` : percent(view.pattern[at]));
  return card("head", `Head ${view.name}`, `${change ? "change of its" : "its"} direct effect, straight to the logit: ${number(view.score)}`,
    h("div", { class: "row" },
      ablateButton(view.name, state, go),
      menu(`Head ${view.name}`, view.name, moved, view.code)),
    h("h3", {}, change ? "How its attention changed" : "Where it attends"),
    chips(prompt.tokens, { values: change ?? view.pattern, most: 1, says, selected: view.key, label: "Attention; press a token to ask why", pick: (at) => go({ key: at, part: undefined }) }),
    h("p", { class: "soft hint" }, `To ${quoted(view.reads)}: ${says(view.key)}. Full colour is ${change ? "a change by " : ""}100 %.`),
    h("h3", {}, change ? "What it moves to the answer, by the position whose change caused it" : "What it moves to the answer, by source token"),
    change ? h("small", {}, `a change of its query counts at ${quoted(prompt.tokens[prompt.query])}, where it writes; one of its values or keys where it reads them`) : null,
    chips(prompt.tokens, { values: view.moved, label: "Effects by source token" }),
    sum([["tokens", total], ["=", view.score], ["relative error", error(Math.abs(total - view.score)), total - view.score]]),
    h("h3", {}, `What it promotes, reading ${quoted(view.reads)}`), h("small", {}, "first the explained tokens, then the largest; by its weights alone, often unreadable, and not part of any sum"),
    view.promotes.length ? bars(view.promotes.map((of) => ({ name: of.text, score: of.score })), { label: "Promoted tokens" }) : h("p", { class: "soft" }, "Not defined for this model."));
}

// Why a head attends to a token: sums by token and by layer, on either side; a row opens into what it is made of.
export function whyView(prompt, view, state, go) {
  const changes = view.of === "pattern";
  const shown = together(largest([view.total, ...view.lists.flatMap((list) => list.rows.map((row) => row.score))]));
  const named = (name, by) => (by === "token" && /^\d+$/.test(name) ? `${quoted(prompt.tokens[name])} ${name}` : name);
  const where = { query: changes ? "by the query" : "in the query", key: changes ? "by the keys" : "in the key" };
  const rows = (list) => list.rows.map((row) => ({ ...row, name: named(row.name, list.by), pick: changes && list.by === "token" ? undefined : row.part ?? undefined }));
  const listed = (list, title) => [h("h3", {}, title), bars(rows(list), { label: title, shown, selected: state.part, pick: (part) => go({ part: part === state.part ? undefined : part }) }), sum([["all", list.total]], shown)];
  const { opened } = view;
  const insideOf = (list) => {
    if (opened?.by !== list.by || opened.side !== list.side) return null;
    const name = named(opened.name, opened.by);
    const other = opened.side === "query" ? "key" : "query";
    return h("div", { class: "inside" }, listed(opened, opened.pairs ? `${name} ${where[opened.side]}, with ${opened.by}s ${where[other]}` : `${name} ${where[opened.side]}, by part`));
  };
  const verb = !changes ? "attends to" : view.total < 0 ? "turned away from" : "turned to";
  const title = `Why ${view.name} ${verb} ${quoted(prompt.tokens[view.key])}`;
  const table = { columns: ["by", "side", "source", "score"], rows: view.lists.flatMap((list) => list.rows.map((row) => [list.by, list.side, named(row.name, list.by), row.score])) };
  const sums = Object.entries(view.sums).map(([name, value]) => [where[name] ?? name, value]);
  return card("why", title, changes ? "the change of its attention, by what its query and its keys read" : "its attention score before the softmax, by what its query reads and, once more, by what its key reads",
    menu(title, "why", table, view.code),
    h("div", { class: "pair" }, view.lists.map((list) => h("div", {}, listed(list, `${list.by === "token" ? "Tokens" : "Layers"} ${where[list.side]}`), insideOf(list)))),
    sum([...sums, [changes ? "= change of attention" : "attention score", view.total], ["relative error", error(view.gap), view.gap]]),
    h("p", { class: "soft hint" }, changes ? "Press a layer for its heads and its MLP." : "Press a token or a head for its pairs with the other side, a layer for its heads and its MLP."));
}

export function neuronsView(view, state, go) {
  const rows = [...view.top, ...(view.count ? [{ name: `${view.count} other neurons`, score: view.others, muted: true }] : [])];
  const short = rows.map((row) => ({ ...row, name: row.name.replace(`${view.node}.`, "") }));
  const table = { columns: ["neuron", "score"], rows: rows.map((row) => [row.name, row.score]) };
  return card("neurons", view.node, `${worded(view.label)}; direct effects of its neurons`,
    h("div", { class: "row" },
      ablateButton(view.node, state, go),
      menu(view.node, view.node, table, view.code)),
    bars(short, { label: `Neurons of ${view.node}` }),
    sum([["neurons listed", view.total - view.others], ["+ others", view.others], ["=", view.total], ["relative error", error(view.gap), view.gap]]));
}

const VALUES = { zero: "by zero", mean: "by the mean over the prompt’s tokens", other: "by the second run’s value" };

// The live model without some heads and MLPs: what it says then, and how much of the explained number is left.
export function ablateView(view, state, go) {
  const two = isPair(state);
  const runs = view.next.map((next, at) => ({ next, at, name: view.next.length > 1 ? ["first prompt", "second prompt"][at] : "" })).filter(({ at }) => !at || view.by !== "other");
  const title = `Without ${view.nodes.join(", ")}`;
  const columns = ["token", "before", "ablated"];
  const table = { columns, rows: view.next[0].map((of) => [of.text, of.chance, of.other_chance]) };
  const by = h("select", { id: "by", "aria-label": "Ablated by", onchange: (event) => go({ by: event.target.value === "zero" ? undefined : event.target.value }) },
    Object.entries(VALUES).filter(([value]) => two || value !== "other").map(([value, name]) => h("option", { value, selected: value === view.by }, name)));
  const of = two ? "difference of the two runs" : "number explained";
  return card("ablate", title, "in the live model: attention, activations and norms respond", menu(title, "ablation", table, view.code),
    h("div", { class: "row" }, view.nodes.map((name) => h("button", { type: "button", class: "gone", title: `Do not ablate ${name}`, onclick: () => go(toggled(state, name)) }, `${name} ×`)), by),
    runs.map(({ at, name }) => h("p", {}, name ? `After the ${name}: ` : "", view.answers.map((answer, number) => h("span", { class: "answer" }, number ? " · " : "", quoted(answer.text), " ", h("b", { title: String(answer.before[at]) }, percent(answer.before[at])), " → ", h("b", { title: String(answer.after[at]) }, percent(answer.after[at])))))),
    sum([["before", view.before], ["ablated", view.after], ...(view.share === null ? [] : [[`of the ${of}`, Math.abs(view.share) < 0.005 ? "nothing is left" : `${(100 * view.share).toFixed(0).replace("-", "−")} % is left`, view.share]])]),
    runs.map(({ next, name }) => h("div", {}, h("h3", {}, name ? `Next tokens after the ${name}` : "Next tokens"),
      sideBySide(next.slice(0, 6), ["before", "ablated"], { label: `Next tokens before and after${name ? ` the ablation, ${name}` : ""}` }))));
}

export function featureView(prompt, view, state) {
  const table = { columns: ["token", "score"], rows: prompt.tokens.map((token, at) => [`${at} ${visible(token)}`, view.scores[at]]) };
  const parts = view.scores.reduce((a, b) => a + b, 0);
  const name = [view.name, view.label].filter(Boolean).join(" · ");
  return card("feature", name, `at ${quoted(prompt.tokens[view.at])}, position ${view.at}: ${view.value ? `active with ${plain(view.value)}` : "not active"}`,
    menu(name, view.name, table, view.code),
    h("h3", {}, "Which tokens its pre-activation comes from"),
    chips(prompt.tokens, { values: view.scores, label: "Tokens that make it active" }),
    sum([["tokens", parts], ["+ bias", view.bias], ["=", view.total], ["relative error", error(view.gap), view.gap]]),
    h("h3", {}, "What it promotes"), h("small", {}, "logits for one unit of its decoder, computed from weights alone; not part of any sum"),
    bars(view.promotes.map((of) => ({ name: of.text, score: of.score })), { label: "Promoted tokens" }));
}
