// The page: one state, in the address; every view follows it.
import { ask, read, write } from "./state.js";
import { bars, card, chips, copy, error, h, matrix, menu, number, plain, sum, visible } from "./draw.js";

const find = (id) => document.getElementById(id);
let about = { methods: [], two_models: false };
let turn = 0;

const go = (change) => { write({ ...read(), ...change }); show(); };
const HEAD = { layer: undefined, head: undefined, key: undefined, node: undefined };

async function show() {
  const state = read();
  const mine = ++turn;
  find("text").value = state.text ?? find("text").value;
  find("other").value = state.other ?? "";
  open(Boolean(state.other) || !find("second").hidden);
  find("error").hidden = true;
  if (!state.text) return;
  find("views").classList.add("busy");
  find("status").textContent = "Running the model …";
  const start = performance.now();
  try {
    const prompt = await ask("prompt", state);
    const asked = { ...state, query: prompt.query };
    const next = nextView(prompt, state);
    if (mine !== turn) return;
    const [tokens, components] = await Promise.all([ask("tokens", asked), ask("components", asked)]);
    const beside = h("div", { class: "half" }, componentsView(components, state));
    const views = [tokensView(prompt, tokens, state), next, beside];
    if (state.layer !== undefined && state.head !== undefined) views.push(headView(prompt, await ask("head", asked), state));
    if (state.node && !state.other) beside.append(ablateView(await ask("ablate", asked)));
    if (state.other) views.push(routesView(await ask("routes", asked)));
    if (mine !== turn) return;
    const focused = document.activeElement?.dataset ?? {};
    find("views").replaceChildren(...views);
    restore(focused);
    find("status").textContent = `${plain((performance.now() - start) / 1000)} s`;
    find("foot").textContent = `Every block was proved against the model; its largest relative error is ${error(prompt.proof)}.`;
  } catch (refusal) {
    if (mine !== turn || refusal.name === "AbortError") return;
    find("status").textContent = "";
    find("views").replaceChildren();
    find("foot").textContent = "";
    find("error").textContent = refusal.message;
    find("error").hidden = false;
  } finally {
    if (mine === turn) find("views").classList.remove("busy");
  }
}

// After views are drawn again the keyboard stays where it was.
function restore({ at, cell }) {
  if (at !== undefined) document.querySelector(`.tokens [data-at="${at}"]`)?.focus();
  if (cell !== undefined) document.querySelector(`.components [data-cell="${cell}"]`)?.focus();
}

function tokensView(prompt, view, state) {
  const scores = prompt.tokens.map((token, at) => ({ name: `${at} ${visible(token)}`, score: view.scores[at] }));
  const top = [...scores].sort((a, b) => Math.abs(b.score) - Math.abs(a.score)).slice(0, 8).filter((row) => row.score);
  const table = { columns: ["token", "score"], rows: scores.map((row) => [row.name, row.score]) };
  const method = state.other
    ? null
    : h("select", { id: "method", "aria-label": "Method", onchange: (event) => go({ method: event.target.value }) },
      about.methods.map((of) => h("option", { value: of.name, selected: of.name === view.method }, of.name)));
  const can = state.other
    ? `Each token's part of the exact change, with nothing held fixed. First run ${number(prompt.numbers[0])}, second ${number(prompt.numbers[1])}.`
    : about.methods.find((of) => of.name === view.method)?.about;
  const line = view.additive
    ? sum([["tokens", view.scores.reduce((a, b) => a + b, 0)], ["+ bias", view.bias], ["= ", view.total], ["residual", error(view.gap), view.gap]])
    : sum(view.total === null
      ? [["These scores are not parts of a sum:", "compare them with each other only"]]
      : [["tokens", view.scores.reduce((a, b) => a + b, 0)], ["+ bias", view.bias], ["against the model's", view.total], ["short by", error(view.gap), view.gap]]);
  return card("wide tokens", state.other ? "What changed the answer, by token" : "Which tokens matter", view.label,
    h("div", { class: "row" }, method, menu(view.label, "tokens", table, view.code)),
    can ? h("p", { class: "soft" }, can) : null,
    chips(prompt.tokens, { values: view.scores, selected: prompt.query, changed: prompt.changed, label: "Tokens; press one to ask about the prediction after it", pick: (at) => go({ query: at, target: undefined, minus: undefined, ...HEAD }) }),
    h("h3", {}, "Largest"), bars(top, { label: "Largest token scores" }), line);
}

function nextView(prompt, state) {
  const rows = prompt.next.map((of) => ({ name: of.text, score: of.chance, shown: `${(100 * of.chance).toFixed(1)} %`, pick: of.id }));
  const table = { columns: ["token", "probability"], rows: prompt.next.map((of) => [of.text, of.chance]) };
  const minus = h("select", { "aria-label": "Compared with", onchange: (event) => go({ minus: event.target.value === "" ? undefined : event.target.value === "none" ? null : Number(event.target.value) }) },
    h("option", { value: "", selected: state.minus === undefined }, "the runner-up"),
    h("option", { value: "none", selected: state.minus === null }, "nothing"),
    prompt.next.filter((of) => of.id !== prompt.target?.id).map((of) => h("option", { value: of.id, selected: state.minus === of.id }, visible(of.text))));
  return card("narrow next", `After “${visible(prompt.tokens[prompt.query])}”`, state.other ? "the next token of the first run" : "the model's next token",
    menu("next token", "next", table, prompt.code),
    bars(rows, { unsigned: true, label: "Next tokens; press one to explain it", pick: (id) => go({ target: id }) }),
    h("p", { class: "sum row" }, "Explaining ", h("b", {}, `“${visible(prompt.target.text)}”`), " against ", minus));
}

function componentsView(view, state) {
  const count = Math.max(...view.heads.map((row) => row.length));
  const columns = [...Array.from({ length: count }, (_, head) => `H${head}`), "MLP"];
  const values = view.heads.map((row, layer) => [...row, ...Array(count - row.length).fill(null), view.mlps[layer]]);
  const names = view.heads.map((_, layer) => `L${layer}`);
  const others = view.rest.reduce((total, term) => total + term.score, 0);
  const table = { columns: ["layer", ...columns], rows: values.map((row, at) => [names[at], ...row.map((value) => value ?? "")]) };
  return card("components", state.other ? "What changed the answer, by component" : "Which components write it",
    `${view.label}; direct effects. Press a head to look into it.`, menu(view.label, "components", table, view.code),
    matrix(names, columns, values, {
      label: "Direct effects, layers by heads and MLP",
      selected: (layer, column) => state.layer === layer && (column < count ? state.head === column : state.node === `MLP${layer}`),
      pick: (layer, column) => column < count ? go({ layer, head: column, key: undefined, node: undefined }) : go({ ...HEAD, layer, node: `MLP${layer}` }),
    }),
    h("details", {}, h("summary", { class: "soft" }, `Embeddings and biases: ${number(others)}`), bars(view.rest, { label: "Other terms" })),
    sum([["heads and MLPs", view.total - others], ["+ the rest", others], ["= ", view.total], ["residual", error(view.gap), view.gap]]));
}

function headView(prompt, view, state) {
  const moved = { columns: ["token", "attention", "moved"], rows: prompt.tokens.map((token, at) => [`${at} ${visible(token)}`, view.pattern[at], view.moved[at]]) };
  const change = view.other_pattern?.map((value, at) => view.pattern[at] - value);
  const why = view.why.refused
    ? h("p", { class: "soft" }, view.why.refused)
    : h("div", {}, bars(view.why.top, { label: "Why it attends there" }),
      sum([[view.why.of === "pattern" ? "change of attention" : "attention score", view.why.total], ["residual", error(view.why.gap), view.why.gap]]));
  return card("half head", `Head ${view.name}`, `${state.other ? "change of the" : "direct"} effect ${number(view.score)}`,
    h("div", { class: "row" },
      state.other ? null : h("button", { type: "button", id: "ablate", onclick: () => go({ node: view.name }) }, "Ablate it"),
      menu(`Head ${view.name}`, view.name, moved, view.code)),
    h("h3", {}, change ? "How its attention changed" : "Where it attends"),
    chips(prompt.tokens, { values: change ?? view.pattern, selected: view.key, label: "Attention; press a token to ask why", pick: (key) => go({ key }) }),
    h("h3", {}, "What it moves to the answer, by source token"),
    chips(prompt.tokens, { values: view.moved, label: "Effects by source token" }),
    h("div", { class: "pair" },
      h("div", {}, h("h3", {}, `Why it ${change ? "turned" : "attends"} to “${visible(prompt.tokens[view.key])}”`),
        h("small", {}, change ? "by what its query reads, and what its keys read" : "source read by the query × source read by the key"), why),
      h("div", {}, h("h3", {}, `What it promotes where it reads “${visible(prompt.tokens[view.key])}”`),
        view.promotes.length ? bars(view.promotes.map((of) => ({ name: of.text, score: of.score })), { label: "Promoted tokens" }) : h("p", { class: "soft" }, "Not defined for this model."))));
}

function ablateView(view) {
  const rows = [{ name: "live model", score: view.live }, { name: "frozen model", score: view.frozen }];
  const table = { columns: ["model", "loss"], rows: rows.map((row) => [row.name, row.score]) };
  return card("ablate", `Without ${view.node}`, "what the answer loses when its output is taken away",
    menu(`Without ${view.node}`, "ablation", table, view.code), bars(rows, { label: "Losses" }),
    sum([["before", view.before], ["after, live", view.after]]),
    h("p", { class: "soft" }, "The live model responds: attention, activations and norms change. The frozen model holds them."));
}

function routesView(view) {
  const table = { columns: ["layer", ...view.routes], rows: view.scores.map((row, at) => [view.layers[at], ...row]) };
  return card("routes", "By which routes it passes each layer", "each row sums to the whole change; rows are cuts at different depths and do not add up",
    menu("routes", "routes", table, view.code), matrix(view.layers, view.routes, view.scores, { label: "Routes" }),
    sum([["each row", view.total], ["residual", error(view.gap), view.gap]]));
}

function open(two) {
  find("second").hidden = !two;
  find("compare").setAttribute("aria-expanded", String(two));
  find("compare").textContent = two ? "One prompt only" : about.two_models ? "Compare the two models" : "Compare two prompts";
}

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!find("text").value.trim()) {
    find("error").textContent = "Type a prompt first.";
    find("error").hidden = false;
    return;
  }
  const other = find("second").hidden ? "" : find("other").value;
  write({ method: read().method, text: find("text").value, other: other || undefined });
  show();
});
for (const id of ["text", "other"]) {
  find(id).addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); find("ask").requestSubmit(); }
  });
}
find("compare").addEventListener("click", () => {
  const two = find("second").hidden;
  open(two);
  if (two) { find("other").value ||= find("text").value; find("other").focus(); }
  else if (read().other) go({ other: undefined, ...HEAD });
});
find("undo").addEventListener("click", () => history.back());
find("redo").addEventListener("click", () => history.forward());
find("link").addEventListener("click", (event) => copy(location.href, event.target));
addEventListener("popstate", show);

about = await ask("about", {});
find("model").textContent = about.name;
document.title = about.name ? `${about.name} · Explorer` : "Explorer";
open(false);
await show();
