// Text that the model writes: how many tokens, a stretch of them, hops; and whether prompts are a chat.
import { bars, card, chips, error, h, menu, number, quoted, sum, worded } from "./draw.js";
import { NOTHING, isPair } from "./state.js";

const NO_TARGET = { query: undefined, target: undefined, minus: undefined };
const NO_SPAN = { ...NO_TARGET, start: undefined, stop: undefined };

// The controls beside the prompt, built once; what they say goes into the state.
export function showModes(about, state, go) {
  if (about.classes) return;
  const place = document.getElementById("modes");
  if (!place.childElementCount) place.replaceChildren(...modes(about, go));
  if (about.chat) document.getElementById("chat").checked = Boolean(state.chat);
  const length = document.getElementById("new");
  length.value = state.new ?? "";
  length.disabled = isPair(state);
  document.getElementById("one-prompt").hidden = !isPair(state);
}

function modes(about, go) {
  const chat = about.chat
    ? h("label", { class: "mode" }, h("input", { type: "checkbox", id: "chat", onchange: (event) => go({ chat: event.target.checked || undefined, ...NO_SPAN }) }), " As a chat message")
    : null;
  const length = h("input", { type: "number", id: "new", min: 1, max: 200, placeholder: "0", "aria-label": "Tokens to write",
    onchange: (event) => go({ new: event.target.value ? Number(event.target.value) : undefined, hops: undefined, ...NO_SPAN }) });
  return [chat, h("label", { class: "mode" }, "Write ", length, " tokens", h("small", { id: "one-prompt", hidden: true }, "(of one prompt only)"))].filter(Boolean);
}

export function generatedView(view, state, go) {
  const inside = (at) => at >= view.start && at < view.stop;
  const pick = (from, to) => go({ ...NOTHING, ...NO_TARGET, start: from - view.first, stop: to + 1 - view.first });
  const rows = view.tokens.map((token, at) => ({ name: `${quoted(token)} ${at}`, score: view.scores[at] }));
  const top = [...rows].sort((a, b) => Math.abs(b.score) - Math.abs(a.score)).slice(0, 8).filter((row) => row.score);
  const table = { columns: ["token", "score"], rows: rows.map((row) => [row.name, row.score]) };
  const hops = h("select", { id: "hops", "aria-label": "Hops", onchange: (event) => go({ hops: event.target.value === "0" ? undefined : event.target.value === "all" ? "all" : Number(event.target.value) }) },
    [["0", "no hops"], ["1", "1 hop"], ["2", "2 hops"], ["all", "all hops"]].map(([value, name]) => h("option", { value, selected: String(state.hops ?? 0) === value }, name)));
  const tokens = chips(view.tokens, { values: view.scores, selected: view.start, pick: () => {}, label: "Prompt and generated text; press a generated token to ask about it; drag, or press with Shift, for a span" });
  let dragged;
  [...tokens.children].forEach((chip, at) => {
    chip.setAttribute("aria-pressed", String(inside(at)));
    if (at < view.first) return;
    chip.classList.add("new");
    chip.addEventListener("click", (event) => (event.shiftKey ? pick(Math.min(at, view.start), Math.max(at, view.stop - 1)) : pick(at, at)));
    chip.addEventListener("pointerdown", () => { dragged = at; });
    chip.addEventListener("pointerup", () => { if (dragged !== undefined && dragged !== at) pick(Math.min(at, dragged), Math.max(at, dragged)); });
  });
  return card("generated", "What the model writes", worded(view.label),
    h("div", { class: "row" }, hops,
      h("button", { type: "button", id: "all", onclick: () => go(NO_SPAN) }, "All of it"), menu(view.label, "generated", table, view.code)),
    h("p", { class: "soft" }, "Press a generated token, and every view explains it; drag over several for a span. Hops trace generated tokens back to the tokens they came from."),
    tokens, h("h3", {}, "Largest"), bars(top, { label: "Largest sources" }),
    sum([["tokens", view.scores.reduce((a, b) => a + b, 0)], ["+ bias", view.bias], ["= ", view.total], ["relative error", error(view.gap), view.gap]]));
}
