// What the page shows is in its address, so that a link, a reload, undo and redo all give the same page.
const NUMBERS = ["query", "target", "layer", "head", "key"];
const TEXTS = ["text", "other", "method", "node"];

export function read() {
  const found = new URLSearchParams(location.hash.slice(1));
  const state = {};
  for (const name of TEXTS) if (found.get(name)) state[name] = found.get(name);
  for (const name of NUMBERS) if (/^\d+$/.test(found.get(name) ?? "")) state[name] = Number(found.get(name));
  const minus = found.get("minus");
  if (minus === "none") state.minus = null;
  else if (/^\d+$/.test(minus ?? "")) state.minus = Number(minus);
  return state;
}

export function write(state) {
  const fields = new URLSearchParams();
  for (const name of [...TEXTS, ...NUMBERS]) if (state[name] !== undefined && state[name] !== null) fields.set(name, state[name]);
  if (state.minus !== undefined) fields.set("minus", state.minus === null ? "none" : state.minus);
  const address = `${location.pathname}${location.search}#${fields}`;
  if (location.hash.slice(1) !== fields.toString()) history.pushState(null, "", address);
}

// Asked of the server; a newer question of the same view ends an older one.
const running = {};

export async function ask(view, state) {
  running[view]?.abort();
  const mine = (running[view] = new AbortController());
  const answer = await fetch(`/api/${view}`, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Token": new URLSearchParams(location.search).get("token") ?? "" },
    body: JSON.stringify(state),
    signal: mine.signal,
  });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}
