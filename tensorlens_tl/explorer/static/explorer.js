// The page: one state, in the address; every view follows it.
import { copy, card, error, h, percent, plain, quoted } from "./draw.js";
import { generatedView, showModes } from "./generated.js";
import { graphView, measuredView } from "./circuit.js";
import { gallery, imageControls, imageView } from "./images.js";
import { ablateView, featureView, headView, neuronsView, whyView } from "./inspect.js";
import { begin, end } from "./jobs.js";
import { listen, redraw } from "./keys.js";
import { NOTHING, ask, forget, isAnswered, isPair, read, stop, write } from "./state.js";
import { FEW_TOKENS, alignedView, componentsView, featuresView, mendsView, nextView, removedView, routesView, tokensView } from "./views.js";

const find = (id) => document.getElementById(id);
let about = { methods: [], dictionaries: [], two_models: false };
let turn = 0;
const drafts = new Set(); // prompts that were typed and not yet submitted: they stay in their boxes

// No token stands against itself: what is chosen last counts.
function changed(state, change) {
  const next = { ...state, ...change };
  if (next.minus === undefined || next.minus === null || next.minus !== next.target) return next;
  return { ...next, [change.target === undefined ? "target" : "minus"]: undefined };
}

// What a click opens stands in the panel, which is always in view; nothing of the page scrolls away.
const go = async (change) => {
  write(changed(read(), change));
  await show();
  const opened = OPENED.find((name) => OPENS[name].some((field) => change[field] !== undefined) && !slots[name].hidden);
  if (opened) panel.scrollTop = slots[opened].offsetTop - panel.firstChild.offsetTop;
};
const OPENS = { ablate: ["without", "by"], head: ["head", "key"], why: [], neurons: ["node"], feature: ["feature"] };
const OPENED = Object.keys(OPENS);

// What is typed is read by the model's tokenizer; the address has the token's number, as it has that of a chosen one.
async function against(text) {
  try {
    const answer = await ask("prompt", { ...read(), minus: text });
    go({ minus: answer.minus?.id });
  } catch (refusal) {
    if (refusal.name !== "AbortError") fail(refusal.message);
  }
}

// Which places of the page are filled, by which questions and how; "" stands for no question.
function places(state, prompt) {
  const two = isPair(state);
  const hasHead = state.layer !== undefined && state.head !== undefined;
  const isNode = state.node !== undefined;
  const isMlp = isNode && state.node.startsWith("MLP");
  const next = ["next", "", (answer, prompt) => nextView(prompt, state, go, about, against)];
  const written = ["generated", "generated", (answer) => generatedView(answer, state, go)];
  if (prompt.aligned) return [...(state.new ? [written] : []), ["aligned", "", (answer, prompt) => alignedView(prompt)], next, ["mends", "mends", (answer) => mendsView(answer, state, go)]];
  const list = [
    next,
    ["tokens", "tokens", (answer, prompt) => tokensView(prompt, answer, state, go, about)],
    ["graph", "graph", (answer) => graphView(answer, state, go, about)],
    ["components", "components", (answer) => componentsView(answer, state, go)],
  ];
  if (state.image) list.push(["image", "image", (answer, prompt) => imageView(answer, prompt, state, about, go)]);
  if (state.new && !state.image) list.push(written);
  if (hasHead) list.push(["head", "head", (answer, prompt) => headView(prompt, answer, state, go)], ["why", "why", (answer, prompt) => whyView(prompt, answer, state, go)]);
  if (isMlp) list.push(["neurons", "neurons", (answer) => neuronsView(answer, state, go)]);
  if (state.without) list.push(["ablate", "ablate", (answer) => ablateView(answer, state, go)]);
  if (state.feature !== undefined && !two) list.push(["feature", "feature", (answer, prompt) => featureView(prompt, answer, state)]);
  if (about.dictionaries.length && !two) list.push(["features", "features", (answer) => featuresView(answer, state, go, about)]);
  if (two && state.measured) list.push(["measured", "measured", (answer, prompt) => measuredView(prompt, answer, state, go)]);
  if (!two && !about.classes && (state.removed || prompt.tokens.length <= FEW_TOKENS)) list.push(["removed", "removed", (answer, prompt) => removedView(prompt, answer, about)]);
  if (two) list.push(["routes", "routes", (answer) => routesView(answer)]);
  return list;
}

// The rows of the page, and what the panel beside them holds.
const ROWS = ["image", "generated", "tokens", "aligned", "next", "removed", "mends", "graph", "measured", "components", "features", "routes"];
const slots = {};
const panel = h("aside", { class: "panel", "aria-label": "What is opened", hidden: true });

function buildGrid() {
  const rows = h("div", { class: "rows" });
  for (const name of [...ROWS, ...OPENED]) {
    slots[name] = h("div", { class: `slot ${name}-slot`, hidden: true });
    (ROWS.includes(name) ? rows : panel).append(slots[name]);
  }
  const close = () => go({ ...NOTHING, without: undefined, by: undefined });
  panel.prepend(h("button", { type: "button", id: "close", class: "quiet", title: "Close (Esc)", onclick: close }, "Close"),
    h("button", { type: "button", id: "fold", class: "quiet", title: "Smaller, or as it was", onclick: () => panel.classList.toggle("low") }, "↕"));
  find("views").append(rows, panel);
}

function showPanel() {
  panel.hidden = OPENED.every((name) => slots[name].hidden);
  find("views").classList.toggle("open", !panel.hidden);
}

const ONE_RUN = "Features are of one run; a comparison does not show them. ";
const WAITING = { graph: "Following the strongest nodes back …", measured: "Patching the drawn nodes, one by one …" };

function wait(name) {
  slots[name].classList.add("busy");
  if (!slots[name].childElementCount) slots[name].replaceChildren(card("waiting", WAITING[name] ?? "Computing …", null, null, h("div", { class: "skeleton", "aria-hidden": "true" })));
}

function fill(name, drawn) {
  redraw(slots[name], drawn);
  slots[name].classList.remove("busy");
}

async function show() {
  const state = read();
  const mine = ++turn;
  for (const id of ["text", "other"]) if (!drafts.has(id)) find(id).value = state[id] ?? "";
  open(Boolean(state.other) || !find("second").hidden);
  find("error").hidden = true;
  showModes(about, state, go);
  imageControls(about, state, go, fail);
  if (!state.text && !state.image) { stop(); end(); return welcome(); }
  find("examples").hidden = !about.examples.length;
  if (!isAnswered("prompt", state)) stop();
  begin();
  find("views").classList.add("busy");
  find("status").textContent = "Running the model …";
  const start = performance.now();
  try {
    const prompt = await ask("prompt", state);
    if (mine !== turn) return;
    title(prompt, state);
    find("status").textContent = `Next tokens in ${plain((performance.now() - start) / 1000)} s, explaining them …`;
    const list = places(state, prompt);
    const names = list.map(([name]) => name);
    for (const [name, slot] of Object.entries(slots)) { slot.hidden = !names.includes(name); if (slot.hidden) slot.replaceChildren(); }
    showPanel();
    const asked = { ...state, query: prompt.query };
    stop(list.map(([, view]) => view));
    let proved;
    await Promise.all(list.map(async ([name, view, draw]) => {
      if (view) wait(name);
      try {
        const answer = view ? await ask(view, asked) : null;
        proved = answer?.proof ?? proved;
        if (mine === turn) fill(name, draw(answer, prompt));
      } catch (refusal) {
        if (mine !== turn) return;
        if (refusal.name === "AbortError" || name === "tokens" || name === "components") throw refusal;
        fill(name, card("refused", "Not for this question", null, null, h("p", { class: "soft" }, refusal.message)));
      }
    }));
    if (mine !== turn) return;
    find("status").textContent = `Answered in ${plain((performance.now() - start) / 1000)} s`;
    find("foot").replaceChildren(proved === undefined ? "" : `Every block was checked against the model; the largest relative error is ${error(proved)}. `, isPair(state) ? ONE_RUN : "",
      "Keys: arrows move over tokens, cells and nodes, Enter presses, Esc closes, z undoes, / is the prompt.");
  } catch (refusal) {
    if (mine !== turn) return;
    if (refusal.name === "AbortError") return cancelled();
    find("status").textContent = "";
    find("foot").textContent = "";
    const isPredicted = isAnswered("prompt", state);
    find("question").hidden = !isPredicted || Boolean(about.classes);
    for (const [name, slot] of Object.entries(slots)) { slot.hidden = !(isPredicted && name === "next"); if (slot.hidden) slot.replaceChildren(); }
    showPanel();
    fail(refusal.message);
  } finally {
    if (mine === turn) { end(); find("views").classList.remove("busy"); }
  }
}

// Nothing stays that belongs to the question before.
function cancelled() {
  find("status").textContent = "Cancelled";
  if (!isAnswered("prompt", read())) { // every view is of the question before
    for (const [name, slot] of Object.entries(slots)) { slot.hidden = name !== "tokens"; slot.replaceChildren(); }
    showPanel();
    slots.tokens.classList.add("busy");
  }
  for (const slot of Object.values(slots)) {
    if (!slot.classList.contains("busy")) continue;
    slot.replaceChildren(card("refused", "Cancelled", null, null, h("button", { type: "button", class: "again", onclick: show }, "Ask again")));
    slot.classList.remove("busy");
  }
}

function fail(message) {
  find("error").textContent = message;
  find("error").hidden = false;
}

// The question in words, with the probabilities of both tokens.
function title(prompt, state) {
  const told = (token) => `${quoted(token.text)} ${percent(token.chance)}${isPair(state) ? ` after the first prompt, ${percent(token.other_chance)} after the second` : ""}`;
  const asked = [prompt.target, prompt.minus].filter(Boolean);
  find("question").replaceChildren(`Why ${asked.map((token) => quoted(token.text)).join(" and not ")}? `, h("small", { class: "soft" }, asked.map(told).join(" · ")));
  find("question").hidden = Boolean(about.classes);
}

function examples() {
  find("examples").replaceChildren("Examples:", ...about.examples.map(({ name, text, other }) =>
    h("button", { type: "button", class: "example quiet", onclick: () => { drafts.clear(); go({ ...NOTHING, query: undefined, target: undefined, minus: undefined, new: undefined, chat: undefined, without: undefined, by: undefined, arranged: undefined, text, other }); } }, name)));
}

function welcome() {
  find("question").hidden = true;
  find("examples").hidden = !about.examples.length;
  for (const [name, slot] of Object.entries(slots)) slot.hidden = name !== "tokens";
  showPanel();
  const image = Boolean(about.classes);
  const example = image ? gallery(about, go) : null;
  fill("tokens", card("welcome", image ? "Choose an image" : "Type a prompt and press Enter", null, null, h("p", { class: "soft" },
    `You will see which ${image ? "patches" : "tokens"}, heads and MLPs make the model’s ${image ? "class" : "next token"}, as exact sums, each with its relative error.`), example));
}

function open(two) {
  find("second").hidden = !two;
  find("compare").setAttribute("aria-expanded", String(two));
  find("compare").textContent = two ? "One prompt only" : about.two_models ? "Compare the two models" : "Compare two prompts";
  for (const id of ["text", "other"]) { find(id).style.height = "auto"; find(id).style.height = `${find(id).scrollHeight + 2}px`; }
}

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!find("text").value.trim()) {
    fail("Type a prompt first.");
    return;
  }
  // the second prompt of an example does not go with a first one that was typed
  if (drafts.has("text") && !drafts.has("other") && about.examples.some((of) => of.other === find("other").value)) find("second").hidden = true;
  forget();
  drafts.clear();
  const other = find("second").hidden ? "" : find("other").value;
  write({ method: read().method, rule: read().rule, nodes: read().nodes, dictionary: read().dictionary, chat: read().chat, new: read().new, text: find("text").value, other: other || undefined });
  show();
});
for (const id of ["text", "other"]) {
  find(id).addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); find("ask").requestSubmit(); }
  });
  find(id).addEventListener("input", () => { drafts.add(id); open(!find("second").hidden); });
}
find("compare").addEventListener("click", () => {
  const two = find("second").hidden;
  open(two);
  if (two) { drafts.add("other"); find("other").value ||= find("text").value; find("other").focus(); return; }
  drafts.delete("other");
  if (read().other) go({ ...NOTHING, other: undefined, by: read().by === "other" ? undefined : read().by });
});
find("undo").addEventListener("click", () => history.back());
find("redo").addEventListener("click", () => history.forward());
find("link").addEventListener("click", (event) => copy(location.href, event.target));
listen({ escape: () => go({ ...NOTHING, without: undefined, by: undefined }), undo: () => history.back(), redo: () => history.forward(), prompt: () => find("text").focus() });
addEventListener("resize", () => open(!find("second").hidden));
addEventListener("popstate", show);
addEventListener("changed", show);

about = await ask("about", {});
find("model").textContent = about.name;
document.title = about.name ? `${about.name} · Explorer` : "Explorer";
buildGrid();
open(false);
examples();
const begun = location.hash ? undefined : about.examples[0];
if (begun) history.replaceState(null, "", `${location.pathname}${location.search}#${new URLSearchParams({ text: begun.text, other: begun.other })}`);
const shown = show();
if (begun) find("text").select(); // what is typed replaces an example
await shown;
