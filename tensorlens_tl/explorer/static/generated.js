// Text that the model writes: how many tokens, a stretch of them, hops; and whether prompts are a chat.
import { bars, card, chips, error, h, menu, quoted, strongest, sum, worded } from "./draw.js";
import { NOTHING } from "./state.js";

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
}

function modes(about, go) {
  const chat = about.chat
    ? h("label", { class: "mode" }, h("input", { type: "checkbox", id: "chat", onchange: (event) => go({ chat: event.target.checked || undefined, ...NO_SPAN }) }), " As a chat message")
    : null;
  const length = h("input", { type: "number", id: "new", min: 1, max: 200, placeholder: "0", "aria-label": "Tokens to write",
    onchange: (event) => go({ new: event.target.value ? Number(event.target.value) : undefined, hops: undefined, ...NO_SPAN }) });
  return [chat, h("label", { class: "mode" }, "Let the model write ", length, " tokens")].filter(Boolean);
}

const ORDER = ["first", "second"];

// One text, or those of two prompts: written tokens stand under each other, and a press explains that token of both.
export function generatedView(view, state, go) {
  const texts = [view, view.second].filter(Boolean);
  const length = (text) => text.tokens.length - text.first;
  const pick = (from, to) => go({ ...NOTHING, ...NO_TARGET, start: from, stop: to + 1 });
  const rows = texts.map((text) => text.tokens.map((token, at) => ({ name: `${quoted(token)} ${at}`, score: text.scores[at] })));
  const table = { columns: ["text", "token", "score"], rows: rows.flatMap((of, number) => of.map((row) => [number + 1, row.name, row.score])) };
  const hops = h("select", { id: "hops", "aria-label": "Hops", onchange: (event) => go({ hops: event.target.value === "0" ? undefined : event.target.value === "all" ? "all" : Number(event.target.value) }) },
    [["0", "no hops"], ["1", "1 hop"], ["2", "2 hops"], ["all", "all hops"]].map(([value, name]) => h("option", { value, selected: String(state.hops ?? 0) === value }, name)));
  let dragged;
  const drawn = texts.map((text) => {
    const tokens = chips(text.tokens, { values: text.scores, selected: text.start, pick: () => {}, label: "Prompt and generated text; press a generated token to ask about it; drag, or press with Shift, for a span" });
    const every = [...tokens.children];
    every.forEach((chip, place) => {
      chip.setAttribute("aria-pressed", String(place >= text.start && place < text.stop));
      const at = place - text.first;
      if (at < 0) return;
      chip.classList.add("new");
      const [start, last] = [text.start - text.first, text.stop - text.first - 1];
      chip.addEventListener("click", (event) => (event.shiftKey ? pick(Math.min(at, start), Math.max(at, last)) : pick(at, at)));
      chip.addEventListener("pointerdown", () => { dragged = at; });
      chip.addEventListener("pointerup", () => { if (dragged !== undefined && dragged !== at) pick(Math.min(at, dragged), Math.max(at, dragged)); });
    });
    return { tokens, prompt: every.slice(0, text.first), written: every.slice(text.first) };
  });
  const largest = (of, text, number) => h("div", {}, h("h3", {}, texts.length > 1 ? `Largest, after the ${ORDER[number]} prompt` : "Largest"),
    bars(strongest(of), { label: "Largest sources" }),
    sum([["tokens", text.scores.reduce((a, b) => a + b, 0)], ["+ bias", text.bias], ["= ", text.total], ["relative error", error(text.gap), text.gap]]));
  return card("generated", "What the model writes", texts.map((text) => worded(text.label)).join(" · "),
    h("div", { class: "row" }, hops,
      h("button", { type: "button", id: "all", onclick: () => go(NO_SPAN) }, "All of it"), menu(view.label, "generated", table, view.code)),
    h("p", { class: "soft" }, `Press a generated token, and every view explains it${texts.length > 1 ? ", in both texts" : ""}; drag over several for a span. Hops trace generated tokens back to the tokens they came from.`),
    texts.length > 1 ? opposite(drawn) : drawn[0].tokens,
    h("div", { class: texts.length > 1 ? "pair two" : "" }, rows.map((of, number) => largest(of, texts[number], number))));
}

// Two texts: each prompt by itself, and what was written token under token, marked where it differs.
function opposite(drawn) {
  const reached = (items) => { items[0]?.setAttribute("tabindex", 0); return items; }; // by the keyboard
  const places = Array.from({ length: Math.max(...drawn.map((text) => text.written.length)) }, (_, at) => drawn.map((text) => text.written[at]));
  for (const chips of places) if (new Set(chips.map((chip) => chip?.textContent)).size > 1) chips.forEach((chip) => chip?.classList.add("changed"));
  drawn.forEach((text) => { reached(text.prompt); reached(text.written); });
  return [
    ...drawn.map((text, number) => h("div", {}, h("h3", {}, `The ${ORDER[number]} prompt`), h("div", { class: "chips", role: "group", "data-rove": "" }, text.prompt))),
    h("h3", {}, "What the model writes after each"),
    h("div", { class: "scroll" }, h("table", { class: "opposite", "aria-label": "Both texts, token under token", "data-rove": "" },
      drawn.map((_, number) => h("tr", {}, h("th", { scope: "row" }, ORDER[number]), places.map((chips) => h("td", {}, chips[number] ?? null)))))),
  ];
}
