// The views that are always there: tokens, next tokens, components; of two runs, routes; of dictionaries, features.
import { alike, bars, card, chips, error, h, map, matrix, menu, number, percent, plain, quoted, sideBySide, strongest, sum, visible, worded } from "./draw.js";
import { NOTHING, isPair } from "./state.js";

export const FEW_TOKENS = 32; // of a longer prompt, removing each token waits for a click

export function tokensView(prompt, view, state, go, about) {
  const two = isPair(state);
  const unit = about.classes ? "patch" : "token";
  const scores = prompt.tokens.map((token, at) => ({ name: `${quoted(token)} ${at}`, score: view.scores[at] }));
  const top = strongest(scores, view.total !== null);
  const table = { columns: ["token", "score"], rows: prompt.tokens.map((token, at) => [`${at} ${visible(token)}`, view.scores[at]]) };
  const method = two ? null : h("select", { id: "method", "aria-label": "Method", onchange: (event) => go({ method: event.target.value }) },
    [...new Set(about.methods.map((of) => of.group))].map((label) => h("optgroup", { label },
      about.methods.filter((of) => of.group === label).map((of) => h("option", { value: of.name, selected: of.name === view.method }, of.name)))));
  const says = two ? "Each part of the exact change, with nothing held fixed." : view.rule ? `By the rule ${view.rule} in place of what is not linear, as in the graph, where it is chosen.` : about.methods.find((of) => of.name === view.method)?.about;
  return card("tokens", two ? `What changed the answer, by ${unit}` : `Which ${unit}${unit === "token" ? "s" : "es"} matter`, worded(view.label),
    h("div", { class: "row" }, method, menu(view.label, "tokens", table, view.code)),
    view.scores.some((score) => score < 0) || view.total !== null ? h("p", { class: "soft hint" }, view.total === null ? "" : "Numbers are logits. ", "Blue raises what is explained, orange lowers it.") : null,
    chips(prompt.tokens, {
      values: view.scores, selected: prompt.query, changed: prompt.changed, linked: state.at,
      label: about.classes ? "Patches, by row and column" : "Tokens; press one to ask about the prediction after it",
      pick: about.classes ? undefined : (at) => go({ ...NOTHING, query: at, target: undefined, minus: undefined }),
    }),
    h("p", { class: "soft hint" }, about.classes ? "Patches are called by their row and column, from the top left." : "Press a token to ask about the prediction after it.",
      /^<.+>$/.test(prompt.tokens[0]) && !two ? ` ${quoted(prompt.tokens[0])} begins every prompt: heads with nothing to read attend to it, so it may score high.` : ""),
    two && top.length === 1 ? h("p", { class: "soft" }, `All of it comes from ${top[0].name.replace(/ (\d+)$/, " at position $1")}, the only token that differs. The graph shows how.`) : bars(top, { label: "Largest token scores" }), tokenSum(prompt, view, two),
    !two && !about.classes && prompt.tokens.length > FEW_TOKENS && !state.removed ? h("button", { type: "button", id: "remove", onclick: () => go({ removed: 1 }) }, "Measure what the live model loses without each token") : null,
    says ? h("details", { class: "soft" }, h("summary", {}, `About ${view.rule ?? view.method}`), h("p", {}, says)) : null);
}

// The sum holds attention fixed; here the model runs again, so that both may name different tokens.
export function removedView(prompt, view, about) {
  const scores = prompt.tokens.map((token, at) => ({ name: `${quoted(token)} ${at}`, score: view.scores[at] }));
  const table = { columns: ["token", "score"], rows: prompt.tokens.map((token, at) => [`${at} ${visible(token)}`, view.scores[at]]) };
  return card("removed", "What the live model loses without a token", worded(view.label), menu(view.label, "removed", table, view.code),
    bars(strongest(scores, false), { label: "Largest losses" }),
    h("p", { class: "soft hint" }, "Each token is replaced in turn and the model runs again. A token that only directs attention counts here, but has a small part in an exact sum, which holds attention fixed."),
    h("details", { class: "soft" }, h("summary", {}, "About leave-one-out"), h("p", {}, about.methods.find((of) => of.name === "leave-one-out").about)));
}

// Frozen beside live: the parts sum to the frozen model's number, and the live model's is what it has to be.
function tokenSum(prompt, view, two) {
  const parts = view.scores.reduce((a, b) => a + b, 0);
  if (view.total === null) return sum([["Not parts of a sum:", "compare these scores with each other only"]]);
  const live = two ? prompt.numbers[0] - prompt.numbers[1] : prompt.numbers[0];
  if (!view.additive) return sum([["tokens", parts], ...(view.bias ? [["+ bias", view.bias]] : []), ["of", view.total], ["not attributed", view.total - parts - view.bias]]);
  const line = [["tokens", parts], ["+ bias", view.bias], ["=", parts + view.bias]];
  const runs = view.baseline ? [["live model", live], [`− with ${view.baseline}`, live - view.total], ["=", view.total]] : two ? [["first run", prompt.numbers[0]], ["− second run", prompt.numbers[1]], ["=", live]] : [["live model", live]];
  const shown = alike([...line, ...runs].map((part) => part[1]));
  return h("div", {}, sum([...line, ["relative error", error(view.gap), view.gap]], shown), sum(runs, shown));
}

export function nextView(prompt, state, go, about, against) {
  const two = isPair(state);
  const [first, second] = prompt.runners_up;
  const differ = two && first && second && first.id !== second.id;
  const ofSecond = prompt.second_choice ? "the second run’s first choice" : "the second run’s runner-up";
  const ofFirst = !two ? "the runner-up" : differ ? "the first run’s runner-up" : "both runs’ runner-up";
  const [usual, named, other, otherNamed] = prompt.second_choice ? [second, ofSecond, first, ofFirst] : [first, ofFirst, second, ofSecond];
  const listed = prompt.next.filter((of) => of.id !== prompt.target?.id && !(differ && of.id === other.id));
  if (typeof state.minus === "number" && !(differ && state.minus === other.id) && !listed.some((of) => of.id === state.minus)) listed.push(prompt.minus); // typed, or of a link
  const minus = h("select", { "aria-label": "Compared with", onchange: (event) => go({ minus: event.target.value === "" ? undefined : event.target.value === "none" ? null : Number(event.target.value) }) },
    h("option", { value: "", selected: state.minus === undefined }, usual ? `${named}, ${quoted(usual.text)}` : named),
    differ ? h("option", { value: other.id, selected: state.minus === other.id }, `${otherNamed}, ${quoted(other.text)}`) : null,
    h("option", { value: "none", selected: state.minus === null }, "nothing"),
    listed.map((of) => h("option", { value: of.id, selected: state.minus === of.id }, visible(of.text))));
  const what = about.classes ? "class" : "token";
  const typed = h("input", { type: "text", class: "typed", "aria-label": `Type the ${what} to compare with`, placeholder: `or type a ${what}`, spellcheck: "false", autocomplete: "off", onchange: (event) => { if (event.target.value) against(event.target.value); } });
  const columns = two ? ["token", "first run", "second run"] : ["token", "probability"];
  const table = { columns, rows: prompt.next.map((of) => (two ? [of.text, of.chance, of.other_chance] : [of.text, of.chance])) };
  const title = about.classes ? "Classes" : `After ${quoted(prompt.tokens[prompt.query])}`;
  return card("next", title, two ? "what each run predicts; the target is the first run’s choice unless you press another" : about.classes ? "what the model says of the image" : "the model’s next token",
    menu("next token", "next", table, prompt.code),
    two ? sideBySide(prompt.next, ["first run", "second run"], { label: "Next tokens of both runs; press one to explain it", selected: prompt.target.id, pick: (id) => go({ target: id }) }) : bars(prompt.next.map((of) => ({ name: of.text, score: of.chance, shown: percent(of.chance), pick: of.id })), {
      unsigned: true, label: "Next tokens; press one to explain it", selected: prompt.target.id, pick: (id) => go({ target: id }),
    }),
    two ? movedLine(prompt, go) : null,
    h("p", { class: "sum row" }, h("span", {}, "Explaining ", h("b", {}, quoted(prompt.target.text))), h("label", { class: "inline" }, "against ", minus), typed));
}

// The tokens that moved most are often a better question than the likeliest ones, which both runs may agree on.
function movedLine(prompt, go) {
  const [first, second] = prompt.moved;
  if (!first || (prompt.target.id === first.id && prompt.minus?.id === second.id)) return null;
  return h("p", { class: "soft" }, "The prompts move these tokens most: ",
    h("button", { type: "button", class: "example quiet", id: "moved", onclick: () => go({ target: first.id, minus: second.id }) }, `explain ${quoted(first.text)} against ${quoted(second.text)}`));
}

// Two prompts of different lengths, token under token; what only one of them has is marked.
export function alignedView(prompt) {
  const count = (end) => prompt.aligned.reduce((sum, part) => sum + part[end].length, 0);
  const token = (text, same) => h("span", { class: same ? "chip" : "chip changed" }, visible(text));
  const row = (end, name) => h("tr", {}, h("th", { scope: "row" }, `${name}, ${count(end)} tokens`),
    prompt.aligned.map((part) => h("td", {}, part[end].map((text) => token(text, part.same)))));
  return card("aligned", "The two prompts differ in length", "a difference is taken token by token", null,
    h("p", {}, `The first prompt has ${count("first")} tokens and the second ${count("second")}, so only their predictions are compared. With the same number of tokens in both, every view shows their exact difference.`),
    h("div", { class: "scroll" }, h("table", { class: "opposite", "aria-label": "Both prompts, token under token" }, row("first", "First"), row("second", "Second"))));
}

// Ways to make them equally long, each with what the model says then.
export function mendsView(view, state, go) {
  const said = (mend) => `${mend.kind === "put in" ? "Put" : "Leave"} ${quoted(mend.what)} ${mend.kind === "put in" ? "into" : "out of"} the ${mend.which ? "second" : "first"} prompt`;
  const rows = view.mends.map((mend) => h("li", {},
    h("button", { type: "button", onclick: () => go({ ...NOTHING, query: undefined, target: undefined, minus: undefined, [mend.which ? "other" : "text"]: mend.text }) }, said(mend)),
    h("span", { class: "soft" }, ` ${quoted(mend.choice)} ${percent(mend.before)} → ${percent(mend.after)}${mend.stays ? "" : ", no longer its first choice"}`)));
  return card("mends", "Make them equally long", "each was tried: the probability of that prompt’s first choice before and after", null,
    rows.length ? h("ul", {}, rows) : h("p", { class: "soft" }, "No change of a few tokens fits. Edit one of the prompts."));
}

const FEW = 8; // layers and heads whose numbers are all written out

export function componentsView(view, state, go) {
  const count = Math.max(...view.heads.map((row) => row.length));
  const columns = [...Array.from({ length: count }, (_, head) => `H${head}`), "MLP"];
  const values = view.heads.map((row, layer) => [...row, ...Array(count - row.length).fill(null), view.mlps[layer]]);
  const names = view.heads.map((_, layer) => `L${layer}`);
  const others = view.rest.reduce((total, term) => total + term.score, 0);
  const table = { columns: ["layer", ...columns], rows: values.map((row, at) => [names[at], ...row.map((value) => value ?? "")]) };
  const open = (layer, column) => (column < count ? go({ ...NOTHING, layer, head: column }) : go({ ...NOTHING, node: `MLP${layer}` }));
  const drawing = count > FEW || names.length > FEW ? map : matrix;
  const all = values.flatMap((row, layer) => row.map((score, column) => ({ name: column < count ? `L${layer}H${column}` : `MLP${layer}`, score, pick: [layer, column] })));
  const top = strongest(all);
  return card("components", isPair(state) ? "What changed the answer, by component" : "Which components write it",
    `${worded(view.label)}; direct effects`, menu(view.label, "components", table, view.code),
    h("div", { class: "beside" }, drawing(names, columns, values, {
      label: "Direct effects, layers by heads and MLP", pick: open,
      selected: (layer, column) => (column < count ? state.layer === layer && state.head === column : state.node === `MLP${layer}`),
    }), bars(top, { label: "Largest components; press one to look into it", pick: ([layer, column]) => open(layer, column) })),
    h("p", { class: "soft hint" }, "Press a head or an MLP to see where it attends, what it moves and why, and to ablate it."),
    h("details", { class: "soft" }, h("summary", {}, `Embeddings and biases ${number(others)}`), bars(view.rest, { label: "Other terms" })),
    sum([["heads and MLPs", view.total - others], ["+ embeddings and biases", others], ["=", view.total], ["relative error", error(view.gap), view.gap]]));
}

export function routesView(view) {
  const table = { columns: ["layer", ...view.routes], rows: view.scores.map((row, at) => [view.layers[at], ...row]) };
  const isSmall = view.routes.map((_, at) => view.scores.every((row) => Math.abs(row[at]) < 0.01 * Math.abs(view.total)));
  const seen = (row) => row.filter((_, at) => !isSmall[at]);
  const small = view.routes.filter((_, at) => isSmall[at]);
  return card("routes", "By which routes it passes each layer", "each row sums to the whole change; rows are cuts at different depths and do not add up",
    menu("routes", "routes", table, view.code), matrix(view.layers, seen(view.routes), view.scores.map(seen), { label: "Routes", blank: true }),
    h("p", { class: "soft hint" }, "Empty cells round to zero.", small.length ? ` Below 1 % of the change in every layer, and not shown: ${small.join("; ")}.` : ""),
    sum([["each row =", view.total], ["relative error", error(view.gap), view.gap]]));
}

const named = (row) => [row.name, row.label].filter(Boolean).join(" · ");

export function featuresView(view, state, go, about) {
  const choice = about.dictionaries.length < 2 ? null : h("select", { "aria-label": "Dictionary", onchange: (event) => go({ ...NOTHING, dictionary: Number(event.target.value) }) },
    about.dictionaries.map((hook, number) => h("option", { value: number, selected: number === (state.dictionary ?? 0) }, hook)));
  const rows = view.top.map((row) => ({ name: `${named(row)} ${quoted(row.token)}`, score: row.score, pick: row.name }));
  const others = view.count ? [{ name: `${view.count} other features`, score: view.others, muted: true }] : [];
  const table = { columns: ["feature", "score"], rows: [...[...view.top, ...others].map((row) => [named(row), row.score]), ...view.rest.map((row) => [row.name, row.score])] };
  const rest = view.rest.reduce((total, row) => total + row.score, 0);
  const picked = state.feature === undefined ? undefined : `F${state.feature}@${state.at}`;
  return card("features", "Which features write it", `${worded(view.label)}; ${view.hook} explains ${percent(view.explained)} of the variance, ${plain(view.active)} active at a token`,
    h("div", { class: "row" }, choice, menu(view.label, "features", table, view.code)),
    bars([...rows, ...others], {
      label: "Features; press one to look into it", selected: picked,
      pick: (name) => { const row = view.top.find((of) => of.name === name); go({ ...NOTHING, feature: row.feature, at: row.at }); },
    }),
    h("details", { class: "soft" }, h("summary", {}, `Error, b_dec and biases ${number(rest)}`), bars(view.rest, { label: "What belongs to no feature" })),
    sum([["features", view.total], ["+ what is no feature", rest], ["=", view.whole], ["relative error", error(view.gap), view.gap]]));
}
